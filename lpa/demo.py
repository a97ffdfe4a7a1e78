"""`make demo`: hear a clip with attention, take attention out of every layer, hear it again. Nothing is trained."""

from __future__ import annotations

import copy
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from . import audio, load
from .bench import measure
from .errors import LpaError
from .evaluate import greedy
from .families import create
from .families.base import SpeechModel
from .inspect import describe
from .score import distances
from .sources import Utterance, open_source
from .surgery import swap

ROOT = Path(__file__).parents[1]  # the demo belongs to the repository: its clip is not part of the package
MODEL = ROOT / "models" / "whisper-base-ctc"
CLIPS = ROOT / "tests" / "data" / "librivox" / "manifest.jsonl"
MIXER = "pyramid"
ROUNDS = 5
SMALL = {"d_model": 256, "encoder_layers": 4, "encoder_attention_heads": 4, "encoder_ffn_dim": 1024}

NEXT = """[bold]Next[/bold]
  .venv/bin/lpa --help           every command
  .venv/bin/lpa inspect MODEL    a model's layers and what they cost
  .venv/bin/lpa bench layer      every mixer against attention, here
  README.md                      the same swap by hand, in Python"""


def main(console: Console | None = None, model: Path = MODEL) -> None:
    console = console or Console(highlight=False)
    utterance = clip()
    if (model / "plan.json").is_file():
        show_speech(console, load(model), utterance)
    else:
        console.print(
            "There is no trained model in models/ yet: this shows the layer at work on a small random model.\n"
        )
        show_layer(console, utterance)
    console.print(NEXT)


def clip() -> Utterance:
    """The bundled recording the demo plays to the models."""
    if not CLIPS.is_file():
        raise LpaError(f"{CLIPS} is not there; run the demo in a clone of the repository")
    return open_source(str(CLIPS)).utterances[0]


def hear(utterance: Utterance) -> Tensor:
    """(1, S)"""
    return torch.from_numpy(audio.read(str(utterance.audio))).unsqueeze(0)


def without_attention(model: SpeechModel, mixer: str = MIXER) -> SpeechModel:
    """A copy of a model with a mixer, built from each attention's own weights, in every layer."""
    model = copy.deepcopy(model)
    for site in model.sites():
        swap(model, site, mixer)
    return model


@torch.inference_mode()
def transcribe(model: SpeechModel, samples: Tensor) -> str:
    output = model(samples)
    if output.logits is None:
        raise LpaError(f"{MODEL.name} has no CTC head, so it cannot transcribe; train one first")
    return greedy(model, output.logits[0])


def show_speech(console: Console, model: SpeechModel, utterance: Utterance) -> None:
    """Text, time and cost of one clip, with attention and with none, both in one run."""
    samples = hear(utterance)
    seconds = samples.shape[1] / audio.RATE
    models = {"attention": model, MIXER: without_attention(model)}
    console.print(f"[bold]{escape(Path(str(utterance.audio)).name)}[/bold], {seconds:.1f} s, read for LibriVox")
    texts = {name: transcribe(each, samples) for name, each in models.items()}
    clock = measure({name: partial(transcribe, each, samples) for name, each in models.items()}, ROUNDS)
    words = utterance.text.split()
    grid = Table.grid(padding=(0, 2))
    grid.add_row("reference", utterance.text)
    for name, text in texts.items():
        wall = statistics.median(clock[name])
        wrong = distances([(words, text.split())])[0]
        speed = f"{wall:.2f} s, real-time factor {wall / seconds:.3f}"
        grid.add_row(name, escape(text) or "(nothing)")
        grid.add_row("", f"[dim]{wrong} of {len(words)} words wrong; {speed}[/dim]")
    console.print(grid)
    console.print()
    console.print(cost_table(*models.values()))
    console.print(f"Every attention became a {MIXER}, built from its own weights; nothing was trained.\n")


def cost_table(before: SpeechModel, after: SpeechModel) -> Table:
    """What mixes each layer's frames in two models, and what that costs."""
    table = Table(title="MFLOP a second of audio, in 60 s", title_justify="left")
    for name in ("layer", "was", "cost", "is", "cost"):
        table.add_column(name, justify="right" if name in ("layer", "cost") else "left")
    old, new = describe(before), describe(after)
    for a, b in zip(old["layers"], new["layers"], strict=True):
        cost = [f"{layer['mflop_per_second']['60']:,.0f}" for layer in (a, b)]
        table.add_row(str(a["index"]), a["mixer"], cost[0], b["mixer"], cost[1])
    table.add_section()
    total = [f"{facts['mixing_mflop_per_second']['60']:,.0f}" for facts in (old, new)]
    table.add_row("all", "", total[0], "", total[1])
    return table


@torch.inference_mode()
def show_layer(console: Console, utterance: Utterance) -> None:
    """On a small random model: what a swap of every layer changes and costs, and that its undo is exact."""
    torch.manual_seed(0)
    model = create("whisper", SMALL)
    samples = hear(utterance)
    before = model(samples).last
    spread = (before - before.mean(1, keepdim=True)).square().sum()
    table = Table(
        title=f"{samples.shape[1] / audio.RATE:.1f} s of LibriVox, all four layers replaced", title_justify="left"
    )
    for column in ("mixer", "output changed by", "MFLOP/s of audio, 10 s", "60 s"):
        table.add_column(column, justify="left" if column == "mixer" else "right")
    cost = describe(model)["mixing_mflop_per_second"]
    table.add_row("attention", "", *(f"{v:,.0f}" for v in cost.values()))
    for mixer in ("pyramid", "window", "ladder", "lpa"):
        undos = [swap(model, site, mixer) for site in model.sites()]
        changed = (model(samples).last - before).square().sum() / spread
        cost = describe(model)["mixing_mflop_per_second"]
        table.add_row(mixer, f"{changed:.1%}", *(f"{v:,.0f}" for v in cost.values()))
        for undo in undos:
            undo()
    console.print(table)
    console.print(
        "Random weights look nowhere in particular: these changes show that the swap works, and nothing of its quality."
    )
    same = torch.equal(model(samples).last, before)
    console.print(f"With the swaps undone the output is {'the same to the last bit' if same else 'NOT the same'}.\n")


if __name__ == "__main__":
    try:
        main()
    except LpaError as error:
        sys.exit(f"lpa: {error}")
