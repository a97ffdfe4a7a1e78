"""Verb → function. Imports happen inside the commands, so that `lpa --help` is instant and needs no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .convert import commands as conversion
from .errors import LpaError

app = typer.Typer(
    help="Make pretrained speech models linear-time, and run them anywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich costs more start-up time than all else here
)
data_app = typer.Typer(help="Look at speech data.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure speed, attention beside everything, in one run.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"lpa {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Model folder, Hugging Face folder or hub id.")], as_json: Json = False
) -> None:
    """Print a model's layers: which are attention, which are not, what each costs."""
    from . import load
    from .inspect import describe, render

    facts = describe(load(model))
    if as_json:
        print(json.dumps(facts))
    else:
        _console().print(render(facts))


@app.command()
def evaluate(
    model: Annotated[str, typer.Option(help="Model folder, Hugging Face folder or hub id.")],
    data: Annotated[str, typer.Option(help="LibriSpeech folder, JSONL manifest, packed shards or hf:NAME:SPLIT.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many utterances.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every transcript to this JSONL file.")] = None,
    batch_seconds: Annotated[float, typer.Option(min=1, help="Seconds of audio in a batch.")] = 120.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    speaker: Annotated[list[str] | None, typer.Option(help="Only these speakers.")] = None,
    record: Annotated[bool, typer.Option(help="Add the result to results/evaluate.jsonl.")] = False,
    as_json: Json = False,
) -> None:
    """Word and character error rate with a 95 % interval; fails if a batch does not give what single files give."""
    from .evaluate import evaluate_folder

    result = evaluate_folder(
        model, data, limit=limit, out=out, batch_seconds=batch_seconds, device=device, speakers=tuple(speaker or ())
    )
    if record:
        from . import records

        figures = {k: v for k, v in result.items() if isinstance(v, int | float)}
        records.write(
            "evaluate",
            what="wer",
            model=model,
            data=data,
            figures=figures,
            interval=result["wer_interval"],
            unit="percent",
        )
    if as_json:
        print(json.dumps(result))
        return
    low, high = result["wer_interval"]
    print(f"WER {result['wer']:.2f} % ({low:.2f} to {high:.2f}), CER {result['cer']:.2f} %, ", end="")
    print(f"{result['utterances']} utterances, real-time factor {result['real_time_factor']:.4f}")


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file; see recipes/.")],
    out: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the recipe's own.")] = None,
) -> None:
    """Train a model as a recipe says. Run the same command again and it goes on where it was."""
    from . import recipe as recipes

    config = recipes.read(recipe, [*(overrides or []), *([f"out={out}"] if out else [])])
    from .train import train as run

    print(run(config))


@app.command("import-whisper")
def import_whisper(
    ggml: Annotated[Path, typer.Argument(help="A whisper.cpp model file, e.g. ggml-base.en.bin.")],
    out: Annotated[Path, typer.Argument(help="Model folder to write.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the model, e.g. mel_floor=-7.0.")
    ] = None,
) -> None:
    """Make a model folder of a Whisper encoder with a fresh CTC head."""
    from .ggml import import_whisper as run
    from .recipe import parse

    print(run(ggml, out, settings=dict(map(parse, settings or []))))


@app.command()
def compact(
    model: Annotated[str, typer.Argument(help="Model folder.")],
    out: Annotated[Path, typer.Argument(help="Model folder to write.")],
    weights: Annotated[str, typer.Option(help="int8, float16 or float32.")] = "int8",
) -> None:
    """Write a model again with smaller weights: int8 per channel, or 16 bit."""
    from . import load
    from .surgery import save

    print(save(load(model), out, weights=weights))


@app.command()
def transcribe(
    files: Annotated[list[str], typer.Argument(help="Audio files; - is stdin.")],
    model: Annotated[str, typer.Option(help="Model folder, Hugging Face folder or hub id.")] = "default",
    backend: Annotated[str | None, typer.Option(help="onnx or torch; onnx where the model has model.onnx.")] = None,
    form: Annotated[str, typer.Option("--format", help="txt, srt, vtt or json.")] = "txt",
    out: Annotated[Path | None, typer.Option(help="Write one file each into this folder.")] = None,
    chunk: Annotated[float | None, typer.Option(help="Hear so many seconds at a time, and not all at once.")] = None,
) -> None:
    """Print what is said in audio files, or write it as text, subtitles or JSON with the time of every word."""
    from .transcribe import transcribe_files

    if transcribe_files(files, model, backend=backend, form=form, out=out, chunk=chunk):
        raise typer.Exit(1)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Model folder, Hugging Face folder or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder to write; the model's own will do.")],
    to: Annotated[str, typer.Option(help="onnx.")] = "onnx",
    weights: Annotated[str, typer.Option(help="float32 or int8.")] = "float32",
) -> None:
    """Write a model for a runtime without torch."""
    from .errors import choose
    from .export import TARGETS

    print(choose(to, TARGETS, "export")(model, out, weights=weights))


@app.command()
def enhance(
    files: Annotated[list[str], typer.Argument(help="Audio files of any length, rate and number of channels.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to, one file each.")],
    model: Annotated[str, typer.Option(help="Model folder, speechbrain folder or hub id.")] = "default",
    form: Annotated[str | None, typer.Option("--format", help="wav or flac; else as the file is.")] = None,
    block: Annotated[float, typer.Option(help="Seconds of audio in a block: memory grows with it.")] = 8.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Take the noise out of speech recordings, block by block, and write them at the rate they have."""
    from .enhance import enhance_files

    if enhance_files(files, model, out, form=form, block=block, device=device):
        raise typer.Exit(1)


@data_app.command("check")
def data_check(
    folder: Annotated[str, typer.Argument(help="LibriSpeech folder, JSONL manifest or packed shards.")],
    as_json: Json = False,
) -> None:
    """Say what is there: hours, speakers, and every bad file with the reason."""
    from .data import check, show

    report = check(folder)
    if as_json:
        print(json.dumps(report))
    else:
        show(report, _console())
    if report["bad"]:
        raise typer.Exit(1)


@bench_app.command("layer")
def bench_layer(
    frames: Annotated[list[int] | None, typer.Option(help="Frames; may be given several times.")] = None,
    mixer: Annotated[list[str] | None, typer.Option(help="Only these rows.")] = None,
    dim: Annotated[int, typer.Option(help="Model width.")] = 768,
    heads: Annotated[int, typer.Option(help="Heads of the attention.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Times each is run, in turn.")] = 15,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    plain: Annotated[bool, typer.Option(help="Time the unfolded definition of lpa as well.")] = False,
    record: Annotated[bool, typer.Option(help="Add the rows to results/bench.jsonl.")] = False,
    as_json: Json = False,
) -> None:
    """One layer of every mixer against attention on the best kernel, projections included."""
    from . import bench

    rows = bench.bench_layer(
        tuple(frames or (500, 6000)), dim, heads, rounds, tuple(mixer or ()), device=device, dtype=dtype, plain=plain
    )
    if record:
        from . import records

        for row in rows:
            figures = {k: v for k, v in asdict(row).items() if k != "mixer"}
            what = f"layer, width {dim}, {dtype}, {device}"
            records.write("bench", what=what, model=row.mixer, data="random", figures=figures, seed=0)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _console().print(bench.layer_table(rows))


conversion.register(app)


def _console():
    from rich.console import Console

    return Console()


def main() -> None:
    """The `lpa` command: an error the user can put right is one line and exit code 1."""
    try:
        app()
    except LpaError as error:
        print(f"lpa: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        extra = {"torch": "torch", "transformers": "torch", "accelerate": "train", "jiwer": "train", "onnx": "onnx"}
        name = (error.name or "").split(".")[0]
        if name not in extra:
            raise
        print(f"lpa: this needs {name}; type: pip install 'lpa[{extra[name]}]'", file=sys.stderr)
        sys.exit(1)
