"""`make demo`: the built-in model hears a clip; what it says, how fast, and what its layers cost beside attention."""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import audio
from .bench import measure
from .errors import LpaError
from .families import create, load
from .families.base import SpeechModel
from .inspect import describe
from .run import open_model
from .score import distances, normalise
from .sources import Utterance, open_source

ROOT = Path(__file__).parents[1]  # the demo belongs to the repository: its clip is not part of the package
CLIPS = ROOT / "tests" / "data" / "librivox" / "manifest.jsonl"
ROUNDS = 5

NEXT = """[bold]Next[/bold]
  .venv/bin/lpa transcribe FILE…   the same for your own recordings, of any length
  .venv/bin/lpa --help             every command
  README.md                        how to convert a model of your own"""


def main(console: Console | None = None, model: str = "default") -> None:
    console = console or Console(highlight=False)
    show_speech(console, model, clip())
    network = load(model)
    console.print(cost_table(with_attention(network), network))
    console.print(NEXT)


def clip() -> Utterance:
    """The bundled recording the demo plays to the model."""
    if not CLIPS.is_file():
        raise LpaError(f"{CLIPS} is not there; run the demo in a clone of the repository")
    return open_source(str(CLIPS)).utterances[0]


def show_speech(console: Console, model: str, utterance: Utterance) -> None:
    """Text, time and real-time factor of one clip."""
    samples = audio.read(str(utterance.audio))
    seconds = len(samples) / audio.RATE
    listener = open_model(model)
    text = listener.transcribe(samples).text
    wall = statistics.median(measure({"": partial(listener.transcribe, samples)}, ROUNDS)[""])
    words = utterance.text.split()
    wrong = distances([(words, normalise(text).split())])[0]
    console.print(f"[bold]{escape(Path(str(utterance.audio)).name)}[/bold], {seconds:.1f} s, read for LibriVox")
    grid = Table.grid(padding=(0, 2))
    grid.add_row("reference", utterance.text)
    grid.add_row("heard", escape(text) or "(nothing)")
    console.print(grid)
    speed = f"{wall:.2f} s in {listener.backend}, real-time factor {wall / seconds:.3f}"
    console.print(f"{wrong} of {len(words)} words wrong; {speed}\n")


def with_attention(model: SpeechModel) -> SpeechModel:
    """A model of the same sizes, of random weights, with attention in every layer."""
    return create(model.family, model.base())


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


if __name__ == "__main__":
    try:
        main()
    except LpaError as error:
        sys.exit(f"lpa: {error}")
