"""What `lpa bench model`, `transcribe`, `enhance`, `peers` and `roofline` print and record."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .. import records
from ..errors import LpaError

if TYPE_CHECKING:
    from .whole import WholeRow

WIDTH = 120  # columns of a table that goes to a file


def show_models(source: str | None, seconds: str, settings: dict[str, Any], record: bool, as_json: bool) -> None:
    from .model import bench_model, model_tables, split_gain

    rows = bench_model(source, seconds=read_seconds(seconds), **settings)
    if record:
        what = source or settings["size"]
        clock = "processor time" if settings["cpu_time"] else "wall clock"
        for row in rows:
            figures = {k: v for k, v in asdict(row).items() if isinstance(v, int | float)}
            setting = f"model, {what}, {row.backend}, {row.precision}, {clock}"
            records.write("bench", what=setting, model=row.model, data="random", figures=figures, seed=0)
    show({"rows": [asdict(row) for row in rows], "split": split_gain(rows)}, model_tables(rows), as_json)


def read_seconds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise LpaError(f"--seconds {text} is no list of numbers; try --seconds 10,60") from None


def show_transcribe(
    source: str, model: str, backends: Sequence[str], seconds: str, rounds: int, record: bool, as_json: bool
) -> None:
    from .whole import bench_transcribe

    rows = bench_transcribe(source, model, backends, read_seconds(seconds), rounds)
    show_whole("transcribe", rows, source, model, record, as_json)


def show_enhance(source: str, model: str, seconds: str, rounds: int, record: bool, as_json: bool) -> None:
    from .whole import bench_enhance

    show_whole("enhance", bench_enhance(source, model, read_seconds(seconds), rounds), source, model, record, as_json)


def show_whole(verb: str, rows: Sequence[WholeRow], source: str, model: str, record: bool, as_json: bool) -> None:
    from .whole import whole_table

    if record:
        for row in rows:
            figures = {k: v for k, v in asdict(row).items() if isinstance(v, int | float)}
            records.write("bench", what=f"{verb}, {row.backend}", model=model, data=source, figures=figures)
    show({"rows": [asdict(row) for row in rows]}, [whole_table(rows)], as_json)


def show_peers(
    data: str, limit: int | None, folders: Sequence[str], models: Sequence[str], record: bool, as_json: bool
) -> None:
    from .peers import bench_peers, peer_table

    rows, absent = bench_peers(data, limit, folders, models)
    if record:
        for row in rows:
            figures = {k: v for k, v in asdict(row).items() if k != "model"}
            records.write("bench", what="peers", model=row.model, data=data, figures=figures)
    for line in absent:
        print(f"lpa: {line}", file=sys.stderr)
    show({"rows": [asdict(row) for row in rows], "absent": absent}, [peer_table(rows)], as_json)


def show_roofline(frames: int, dim: int, heads: int, rounds: int, record: bool, as_json: bool) -> None:
    from .roofline import bench_roofline, memory_rows, roofline_tables

    machine, rows = bench_roofline(frames, dim, heads, rounds)
    memory = memory_rows(heads=heads)
    limits = {"gb_per_second": round(machine.bandwidth / 1e9, 2), "gflop_per_second": round(machine.flops / 1e9, 1)}
    if record:
        what = f"roofline, {frames} frames, width {dim}, float32, cpu"
        for row in rows:
            figures = {k: v for k, v in asdict(row).items() if isinstance(v, int | float)}
            records.write("bench", what=what, model=row.model, part=row.part, figures={**figures, **limits}, seed=0)
    found = {**limits, "rows": [asdict(row) for row in rows], "memory": memory}
    show(found, roofline_tables(machine, rows), as_json)


def show(found: dict[str, Any], tables: Sequence[Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables:
        console.print(table)
