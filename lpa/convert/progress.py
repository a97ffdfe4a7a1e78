"""The table of a conversion's steps on stderr while it runs: rich on a terminal, else a line a step. No torch.

The table grows by a row a step and is not drawn again: between two rows are the bars of the training loop.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ..score import Measure


class Steps:
    """Steps done, what they are judged by, and how long the rest will take at the pace of this run."""

    def __init__(self, steps: int, active: bool, measure: Measure, epochs: tuple[float, float] = (0.0, 0.0)):
        """`epochs` of training in a step, and in what follows the last one."""
        self.steps, self.active, self.measure, self.label = steps, active, measure.name, measure.label
        self.each, self.after = epochs
        self.rows: list[dict[str, Any]] = []
        self.began, self.before, self.trained = time.monotonic(), 0.0, 0.0

    def add(self, record: dict[str, Any], ran: bool) -> None:
        """A step that is done; `ran`: now, not in an earlier run."""
        self.trained = 0.0
        self.rows.append(record)
        if not ran:
            self.began, self.before = time.monotonic(), self.done()
        if not self.active:
            return
        if sys.stderr.isatty():
            from rich.console import Console

            Console(stderr=True).print(self.render(record))
        else:
            layers = ", ".join(map(str, record["layers"])) or "none"
            left = self.left()
            text = f"step {record['step']}/{self.steps}  layers {layers}  {self.label} {shown(record[self.measure])}"
            print(text + (f"  {left} left" if left else ""), file=sys.stderr, flush=True)

    def stage(self, epochs: float, ran: bool = True) -> None:
        """A stage of the step under way is done; `ran`: all of it now."""
        self.trained += epochs
        if not ran:
            self.began, self.before = time.monotonic(), self.done()

    def stop(self) -> None:
        """No step follows."""
        self.steps = len(self.rows) - 1

    def done(self) -> float:
        """Epochs; steps where there is no training."""
        return (len(self.rows) - 1) * self.unit + self.trained

    @property
    def unit(self) -> float:
        return self.each if self.each or self.after else 1.0

    def left(self) -> str:
        """Minutes for all that is to come, by epochs of training (by steps where there is none); empty: not known."""
        ran, rest = self.done() - self.before, self.steps * self.unit + self.after - self.done()
        if ran <= 0 or rest <= 0:
            return ""
        return f"{(time.monotonic() - self.began) / ran * rest / 60:.1f} min"

    def render(self, row: dict[str, Any]):
        """A row of the table, the first with the names of the columns above it."""
        from rich.table import Table

        table = Table(box=None, show_header=row is self.rows[0], padding=(0, 2, 0, 0))
        for name, width in (("step", 7), (self.label, 12), ("seconds", 7), ("left", 10)):
            table.add_column(name, justify="right", width=width)  # of all rows alike
        table.add_column("layers")
        undone = " (alignment undone)" if any(s["reverted"] for s in row["stages"]) else ""
        layers = ", ".join(map(str, row["layers"])) or "none"
        took = f"{row['seconds']:.0f}"
        table.add_row(f"{row['step']}/{self.steps}", shown(row[self.measure]), took, self.left(), layers + undone)
        return table

    def end(self, value: float | None) -> None:
        if self.active:
            print(f"finished: {self.label} {shown(value)}", file=sys.stderr, flush=True)


def shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"
