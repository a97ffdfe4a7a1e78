"""The cumulative ablation: a recipe with everything switched off, then one more switch a row, up to the whole."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import LpaError
from ..score import MEASURES
from .config import ConvertConfig, read_json, write_json
from .loop import convert

# what a row adds -> the recipe without it
SWITCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("selective init, layer norms", {"mixer_config": {"selective_init": False}, "norms": 0.0}),
    ("alignment", {"align_epochs": 0.0}),
    ("FFN co-adaptation", {"ffn": 0.0}),
    ("temperature curriculum", {"tau": None}),  # the end's, all the time
    (
        "periodic and positional gates",
        {"mixer_config": {"aperiodic": 12, "periodic": 0, "positional": 0}},  # as many pulses, all of one type
    ),
    ("skips, heads", {"mixer_config": {"skip": False, "heads": 1}}),
    ("sweep order", {"order": "depth"}),
)


def rows(config: ConvertConfig) -> list[tuple[str, ConvertConfig]]:
    """(what the row adds, its settings), from naive to the config itself."""
    names = ["naive", *(f"+ {name}" for name, _ in SWITCHES)]
    return [(name, without(config, SWITCHES[row:])) for row, name in enumerate(names)]


def without(config: ConvertConfig, switches: tuple[tuple[str, dict[str, Any]], ...]) -> ConvertConfig:
    """The config with these switched off."""
    for _, off in switches:
        changes = dict(off)
        if "mixer_config" in changes:
            changes["mixer_config"] = {**config.mixer_config, **changes["mixer_config"]}
        if "tau" in changes:
            changes["tau"] = (config.tau[1], config.tau[1])
        config = replace(config, **changes)
    return config


def ablate(
    config: ConvertConfig, out: Path, record: Path | None = None, only: int | None = None
) -> dict[str, Any] | None:
    """Convert a row after another into OUT/row-N, then OUT/ablate.json; None where time was up first.

    `only` one row: several processes can share the table, and one that is given none makes it of what they did.
    """
    out, began = Path(out), time.monotonic()
    found: list[dict[str, Any]] = []
    if config.mixer != "lpa":
        raise LpaError(
            f"the table takes the paper's pulses apart, the mixer lpa, and not {config.mixer}; "
            "start from --recipe paper, or add --set mixer=lpa"
        )
    table_rows = rows(config)
    if only is not None and only >= len(table_rows):
        raise LpaError(f"the table has rows 0 to {len(table_rows) - 1}, and no row {only}")
    for number, (name, row) in enumerate(table_rows):
        if only not in (None, number):
            continue
        folder = out / f"row-{number}"
        if config.max_minutes:  # of all rows together
            row = replace(row, max_minutes=max(1e-9, config.max_minutes - (time.monotonic() - began) / 60))
        try:
            made = convert(row, folder, record)
        except LpaError:
            with suppress(OSError):  # it is not empty
                out.rmdir()
            raise
        if made == folder or only is not None:
            return None
        result = read_json(folder / "result.json")
        measure = result["measure"]
        before = found[-1][measure] if found else None
        points = None if before is None else result[measure] - before
        found.append({"row": name, measure: result[measure], "points": points})
    table = {"measure": measure, "model": config.model, "layers": config.layers, "seed": config.seed, "rows": found}
    write_json(out / "ablate.json", table)
    return table


def render(found: dict[str, Any]):
    """The table for a terminal."""
    from rich.table import Table

    table = Table(title="each row adds one technique")
    table.add_column("configuration")
    table.add_column(MEASURES[found["measure"]].label, justify="right")
    table.add_column("points", justify="right")
    for row in found["rows"]:
        points = "" if row["points"] is None else f"{row['points']:+.2f}"
        table.add_row(row["row"], f"{row[found['measure']]:.2f}", points)
    return table
