"""lpa: make pretrained speech models linear-time, and run them anywhere."""

__version__ = "0.1.0"


def load(source, **options):
    """A working model from a model folder, a Hugging Face folder or a hub id."""
    from .families import load as load_model  # torch comes in here, not on `import lpa`

    return load_model(source, **options)
