"""lpa: make pretrained speech models linear-time, and run them anywhere."""

__version__ = "0.1.0"


def load(source="default", *, backend=None, latency=None, **options):
    """A working model, with `transcribe(path_or_array)` and `stream(chunks)`.

    source: "default" (the built-in model), a model folder, a Hugging Face folder or a hub id. backend: what to listen
    with, onnx or torch; latency: look no more than so many seconds ahead. Without a backend "default" and exports run
    as they are made to, and all else is a torch model to convert and train as well, with a `device` and a `dtype`.
    """
    from .run import find_model, is_export, open_model  # numpy comes in here, not on `import lpa`

    folder = find_model(str(source))
    if backend or source == "default" or is_export(folder):
        return open_model(folder, backend, latency, **options)
    from .families import load as load_model  # and torch here

    model = load_model(folder, **options)
    if latency is not None:
        from .run.torch import limit_lookahead

        limit_lookahead(model, latency)
    return model
