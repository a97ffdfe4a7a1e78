"""Verb → function. Imports happen inside the commands, so that `lpa --help` is instant and needs no torch."""

from __future__ import annotations

import json
import os
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
    from .families import load
    from .inspect import describe, render

    facts = describe(load(model))
    if as_json:
        print(json.dumps(facts))
    else:
        _console().print(render(facts))


@app.command()
def evaluate(
    model: Annotated[list[str], typer.Option(help="Model folder, Hugging Face folder or hub id; may be given again.")],
    data: Annotated[str, typer.Option(help="LibriSpeech folder, JSONL manifest, packed shards or hf:NAME:SPLIT.")],
    join: Annotated[list[float] | None, typer.Option(help="Join a speaker's utterances to so many seconds.")] = None,
    tau: Annotated[list[str] | None, typer.Option(help="Temperature of the gates: a number, or hard.")] = None,
    latency: Annotated[list[float] | None, typer.Option(help="Look no more than so many seconds ahead.")] = None,
    chunk: Annotated[float | None, typer.Option(help="Hear no more seconds than this at once; chunks overlap.")] = None,
    noise: Annotated[str, typer.Option(help="Of models that enhance: white, pink, brown or babble.")] = "white",
    snr: Annotated[float, typer.Option(help="Of models that enhance: the noise's ratio in dB.")] = 5.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many utterances.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a line an utterance to this JSONL file.")] = None,
    batch_seconds: Annotated[float, typer.Option(min=1, help="Seconds of audio in a batch.")] = 120.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    speaker: Annotated[list[str] | None, typer.Option(help="Only these speakers.")] = None,
    record: Annotated[bool, typer.Option(help="Add the result to the folder of --results.")] = False,
    results: Annotated[Path, typer.Option(help="Where --record writes.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Word and character error rate with a 95 % interval; fails if a batch does not give what single files give.

    Several --model, --join, --tau or --latency are measured one after the other, the audio read once. A model that
    enhances is judged by SI-SNRi, PESQ and STOI on the same speech with noise.
    """
    from typing import Any

    from . import judge

    judging: Any = judge  # that, or evaluate: both have the same three functions
    options: dict[str, Any] = {"limit": limit, "out": out, "device": device, "speakers": tuple(speaker or ())}
    if any(map(judge.enhances, model)):
        options |= {"kind": noise, "snr": snr}
    else:
        from . import evaluate as judging

        options |= {"join": join or (), "tau": tau or (), "latency": latency or ()}
        options |= {"chunk": chunk, "batch_seconds": batch_seconds}
    found = judging.evaluate_folders(model, data, **options)
    for result in found:
        if record:
            judging.write_record(result, results)
        if not as_json:
            print(judging.show(result, several=len(found) > 1))
    if as_json:
        print(json.dumps(found[0] if len(found) == 1 else found))


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
    from .families import load
    from .surgery import save

    print(save(load(model), out, weights=weights))


@app.command()
def transcribe(
    files: Annotated[list[str], typer.Argument(help="Audio files; - is stdin.")],
    model: Annotated[str, typer.Option(help="Model folder, Hugging Face folder or hub id.")] = "default",
    backend: Annotated[str | None, typer.Option(help="onnx, torch or mlx; onnx where there is a model.onnx.")] = None,
    form: Annotated[str, typer.Option("--format", help="txt, srt, vtt or json.")] = "txt",
    out: Annotated[Path | None, typer.Option(help="Write one file each into this folder.")] = None,
    chunk: Annotated[
        float | None, typer.Option(help="Hear so many seconds at a time, and not all at once; not exact.")
    ] = None,
    latency: Annotated[float | None, typer.Option(help="Look no more than so many seconds ahead.")] = None,
    device: Annotated[str, typer.Option(help="Of the torch backend: cpu or cuda.")] = "cpu",
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile the mixers: slow to start, then quicker on a GPU.")
    ] = False,
) -> None:
    """Print what is said in audio files, or write it as text, subtitles or JSON with the time of every word."""
    from .transcribe import transcribe_files

    if transcribe_files(
        files,
        model,
        backend=backend,
        form=form,
        out=out,
        chunk=chunk,
        latency=latency,
        device=device,
        compiled=compiled,
    ):
        raise typer.Exit(1)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Model folder, Hugging Face folder or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder to write; the model's own will do.")],
    to: Annotated[str, typer.Option(help="onnx or mlx.")] = "onnx",
    weights: Annotated[
        str | None, typer.Option(help="onnx: float32 (unless told) or int8; mlx: float16 (unless told) or float32.")
    ] = None,
    latency: Annotated[float | None, typer.Option(help="Look no more than so many seconds ahead, for good.")] = None,
) -> None:
    """Write a model for a runtime without torch."""
    from .errors import choose
    from .export import TARGETS

    print(choose(to, TARGETS, "export")(model, out, weights=weights, latency=latency))


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


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="Folder for the page, index.html.")] = Path("runs/report"),
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("results"),
    readme: Annotated[Path, typer.Option(help="The file whose marked tables are made again.")] = Path("README.md"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a marked table differs.")] = False,
) -> None:
    """Make the README's tables and the evidence page, ours beside the paper's, from records alone."""
    from .report import report as run

    page = run(out, results, readme, check)
    print(f"the tables of {readme} are those of {results}" if check else page)


@app.command()
def show(
    file: Annotated[str, typer.Argument(help="An audio file.")],
    model: Annotated[str, typer.Option(help="Model folder, Hugging Face folder or hub id.")] = "default",
    out: Annotated[Path, typer.Option("--out", "-o", help="FILE.html, with the audio in it, or FILE.png.")] = Path(
        "runs/show.html"
    ),
    start: Annotated[float, typer.Option(help="Seconds into the recording to start at.")] = 0.0,
    seconds: Annotated[float, typer.Option(help="Seconds to show, up to 30.")] = 12.0,
    sweep: Annotated[Path | None, typer.Option(help="Folder of an `lpa sweep`: what it says of each layer.")] = None,
) -> None:
    """Draw a recording as a model hears it: waveform, words, and where every layer looks and how wide."""
    from .show import show as run

    print(run(file, model, out, start=start, seconds=seconds, sweep=sweep))


@bench_app.command("model")
def bench_model(
    model: Annotated[str | None, typer.Argument(help="Model folder; else fresh weights of --size.")] = None,
    size: Annotated[str, typer.Option(help="wav2vec2-base or whisper-base.")] = "wav2vec2-base",
    mixer: Annotated[
        list[str] | None, typer.Option(help="In every layer of --size; several make several rows.")
    ] = None,
    seconds: Annotated[str, typer.Option(help="Lengths of audio.")] = "10,30,60,120,600",
    backend: Annotated[str, typer.Option(help="torch, or onnx with torch beside it.")] = "torch",
    precision: Annotated[str, typer.Option(help="fp32 or int8, of ONNX Runtime.")] = "fp32",
    rounds: Annotated[int, typer.Option(min=1, help="Times each is run, in turn.")] = 5,
    attention_up_to: Annotated[float, typer.Option(help="Seconds beyond which attention is left out.")] = 120,
    memory: Annotated[
        bool, typer.Option(help="Run each once more, in its own process, for its peak of memory.")
    ] = True,
    cpu_time: Annotated[bool, typer.Option(help="Count processor time: for machines that others use too.")] = False,
    record: Annotated[bool, typer.Option(help="Add the rows to results/bench.jsonl.")] = False,
    as_json: Json = False,
) -> None:
    """A converted model against its twin with attention and one with windows: whole, by parts, memory."""
    from .bench import commands

    settings = {"size": size, "mixers": mixer or (), "backend": backend, "precision": precision, "rounds": rounds}
    more = {"attention_up_to": attention_up_to, "memory": memory, "cpu_time": cpu_time}
    commands.show_models(model, seconds, {**settings, **more}, record, as_json)


@bench_app.command("transcribe")
def bench_transcribe(
    file: Annotated[str, typer.Argument(help="A recording, said over and over until it lasts long enough.")],
    model: Annotated[str, typer.Option(help="Model folder.")] = "default",
    backend: Annotated[list[str] | None, typer.Option(help="onnx, torch or mlx; several make several rows.")] = None,
    seconds: Annotated[str, typer.Option(help="Lengths of audio.")] = "10,600,3600",
    rounds: Annotated[int, typer.Option(min=1, help="Times each is run, in turn.")] = 3,
    record: Annotated[bool, typer.Option(help="Add the rows to results/bench.jsonl.")] = False,
    as_json: Json = False,
) -> None:
    """`lpa transcribe` from the start of its process to the text: time and memory by the length of the recording."""
    from .bench import commands

    commands.show_transcribe(file, model, backend or ["onnx"], seconds, rounds, record, as_json)


@bench_app.command("enhance")
def bench_enhance(
    file: Annotated[str, typer.Argument(help="A recording, said over and over until it lasts long enough.")],
    model: Annotated[str, typer.Option(help="Model folder.")] = "default",
    seconds: Annotated[str, typer.Option(help="Lengths of audio.")] = "20,600",
    rounds: Annotated[int, typer.Option(min=1, help="Times each is run, in turn.")] = 1,
    record: Annotated[bool, typer.Option(help="Add the rows to results/bench.jsonl.")] = False,
    as_json: Json = False,
) -> None:
    """`lpa enhance` from the start of its process to the file: time and memory by the length of the recording."""
    from .bench import commands

    commands.show_enhance(file, model, seconds, rounds, record, as_json)


@bench_app.command("peers")
def bench_peers(
    data: Annotated[str, typer.Option(help="LibriSpeech folder or JSONL manifest.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many utterances.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Model folders of ours, beside the others.")] = None,
    folder: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER: weights of one of the others.")] = None,
    record: Annotated[bool, typer.Option(help="Add the rows to results/bench.jsonl.")] = False,
    as_json: Json = False,
) -> None:
    """Other recognisers on the same files, those that are installed: errors, speed, memory."""
    from .bench import commands

    commands.show_peers(data, limit, folder or [], model or [], record, as_json)


@bench_app.command("roofline")
def bench_roofline(
    frames: Annotated[int, typer.Option(min=1, help="Frames.")] = 6000,
    dim: Annotated[int, typer.Option(min=1, help="Model width.")] = 768,
    heads: Annotated[int, typer.Option(min=1, help="Heads of the attention.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Times each is run, in turn.")] = 15,
    record: Annotated[bool, typer.Option(help="Add the rows to results/bench.jsonl.")] = False,
    as_json: Json = False,
) -> None:
    """What a layer must cost on this machine, from measured bandwidth and arithmetic: 12 pulses against 36."""
    from .bench import commands

    commands.show_roofline(frames, dim, heads, rounds, record, as_json)


conversion.register(app)


def _console():
    from rich.console import Console

    return Console()


def main() -> None:
    """The `lpa` command: an error the user can put right is one line and exit code 1."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # batches come in every length
    try:
        app()
    except LpaError as error:
        print(f"lpa: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        extra = {"torch": "torch", "transformers": "torch", "onnx": "onnx"}
        extra |= dict.fromkeys(("accelerate", "jiwer", "matplotlib"), "train")
        name = (error.name or "").split(".")[0]
        if name not in extra:
            raise
        print(f"lpa: this needs {name}; type: pip install 'lpa[{extra[name]}]'", file=sys.stderr)
        sys.exit(1)
