"""What the page is made of: figures with the records behind them, grids, charts, verdicts, items that hold these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

ONE_RUN = "one run"

REPRODUCED, DIFFERENT, IMPOSSIBLE, MISSING, OURS = (
    "reproduced",
    "different",
    "not possible here",
    "not measured yet",
    "ours",
)
MARKS = (DIFFERENT, IMPOSSIBLE, REPRODUCED, OURS, MISSING)


@dataclass(frozen=True)
class Figure:
    """A measured number, what is known of its spread, and the records it comes from."""

    value: float
    ids: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    spread: str = ONE_RUN  # what low and high are; or that there is nothing to tell them from
    digits: int = 2

    def number(self) -> str:
        return f"{self.value:,.{self.digits}f}"

    def around(self) -> str:
        """The spread in words: `one run`, or `9.80–11.20, 95 %`."""
        if self.low is None or self.high is None:
            return self.spread
        return f"{self.low:,.{self.digits}f}–{self.high:,.{self.digits}f}, {self.spread}"


Cell = str | int | float | Figure | None  # text, a number of the paper or of arithmetic, a measured one, nothing


@dataclass(frozen=True)
class Grid:
    """A table: names of its columns and rows of cells. `ours`: the columns that hold what was measured here."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]
    digits: int = 2  # of plain numbers
    ours: frozenset[int] = frozenset()

    def figures(self) -> list[Figure]:
        return [cell for row in self.rows for cell in row if isinstance(cell, Figure)]


@dataclass(frozen=True)
class Verdict:
    """How ours stands to the paper's: what was found, and where it differs or cannot be had the `because …`."""

    mark: str
    what: str = ""
    why: str = ""
    of: str = ""  # which half of an item it judges, where there are two


@dataclass(frozen=True)
class Line:
    """One curve: (x, y) points, y a number or a Figure."""

    name: str
    points: Sequence[tuple[float, Cell]]
    ours: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure to draw. `bars`: the x of a point is the number of its label."""

    id: str
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    bars: Sequence[str] = ()  # labels; empty: lines
    zero: bool = True  # the axis of y starts at zero
    small: bool = False  # one of several side by side: drawn at half the width, with text of the same size


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper, or one of ours, with all there is to say about it."""

    id: str
    name: str  # Table 1
    title: str
    verdict: Verdict
    grid: Grid | None = None
    charts: Sequence[Chart] = ()
    notes: Sequence[str] = ()
    also: Sequence[Verdict] = ()  # on its other half

    def verdicts(self) -> tuple[Verdict, ...]:
        return (self.verdict, *self.also)

    def mark(self) -> str:
        """One word for all of it: reproduced only where no half differs."""
        return next(m for m in MARKS if any(v.mark == m for v in self.verdicts()))


def machine_below(grid: Grid) -> tuple[Grid, *tuple[str, ...]]:
    """The grid, and where all its rows are of one machine, without it in every row, but in a line of its own."""
    place = grid.columns.index("machine") if "machine" in grid.columns else -1
    machines = {row[place] for row in grid.rows}
    if place < 0 or len(machines) != 1:
        return (grid,)
    columns = grid.columns[:place] + grid.columns[place + 1 :]
    rows = [row[:place] + row[place + 1 :] for row in grid.rows]
    ours = frozenset(i - (i > place) for i in grid.ours)
    return replace(grid, columns=columns, rows=rows, ours=ours), f"All on {machines.pop()}."


def missing(commands: Sequence[str]) -> Verdict:
    """Not measured yet, and what to type."""
    return Verdict(MISSING, "run " + " then ".join(f"`{c}`" for c in commands))


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def gap(ours: Figure | None, other: Figure | None, digits: int = 2) -> str | None:
    """How far the first figure lies above the second, where both are there."""
    return None if ours is None or other is None else signed(ours.value - other.value, digits)
