"""What a run writes while it goes on: whole files, a line a record, progress on stderr. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


class Records:
    """train.jsonl: one line a record. What was written after the checkpoint that a run goes on from is dropped."""

    def __init__(self, path: Path, step: int, active: bool):
        self.path, self.active = path, active
        if active and path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
            with whole_file(path) as file:
                file.write("".join(f"{line}\n" for line in kept).encode())

    def add(self, **record: Any) -> None:
        if self.active:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:  # the line that was being written when the run was killed
        return math.inf


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that is there whole or not at all, whenever the machine stops."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def list_left_out(bad: list[tuple[str, str]], path: Path) -> None:
    """A line for everything that cannot be used, and why."""
    if bad:
        with whole_file(path) as file:
            file.write("".join(json.dumps({"what": what, "why": why}) + "\n" for what, why in bad).encode())


class Ticker:
    """Progress on stderr: a bar with an estimate on a terminal, else a line now and then."""

    def __init__(self, place: float, steps: int, active: bool, every: float = 10.0):
        self.steps, self.active, self.every, self.last = steps, active, every, -math.inf
        self.bar: Any = None
        if active and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[text]}"))
            self.bar = progress.Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("training", total=steps, completed=place, text="")
            self.bar.start()

    def show(self, place: float, text: str, pace: float = 0.0) -> None:
        """`place` of `steps`, `pace` of it a second; a message without one is always shown."""
        if self.bar is not None:
            self.bar.update(self.task, completed=place, text=text)
        elif self.active and (not pace or time.monotonic() - self.last >= self.every):
            self.last = time.monotonic()
            left = f"  {max(0.0, self.steps - place) / pace / 60:.1f} min left" if pace else ""
            print(f"{min(1, place / self.steps):4.0%}  {text}{left}", file=sys.stderr, flush=True)

    def __enter__(self) -> Ticker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def bar(bars: Any, name: str) -> Callable[[int, int], None]:
    """A bar more on a rich Progress: call it with what is done and what there is."""
    task = bars.add_task(name, total=None)
    return lambda done, total: bars.update(task, completed=done, total=total)
