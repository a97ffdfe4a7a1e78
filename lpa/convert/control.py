"""The control of a conversion: same steps, data, losses and unfrozen parameters, with attention left in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import LpaError
from .config import ConvertConfig, build, read_json
from .loop import convert


def control_config(run: Path) -> ConvertConfig:
    """The settings of a conversion's control: its layers, in its order, as far as it came within its budget."""
    run = Path(run)
    if not (run / "order.json").is_file():
        raise LpaError(f"{run} is no conversion; give the --out of an `lpa convert`")
    config = build(ConvertConfig, read_json(run / "config.json"), str(run / "config.json"))
    layers = [swap["index"] for swap in read_json(run / "order.json")["swaps"]]
    if config.budget:
        if not (run / "result.json").is_file():
            raise LpaError(f"{run} has a budget and is not finished, so how far it will come is open; finish it first")
        kept = set(read_json(run / "result.json")["replaced"])
        layers = [i for i in layers if i in kept]
    if not layers:
        raise LpaError(f"{run} replaced nothing; there is nothing to control for")
    chosen = ",".join(map(str, layers))
    unused: dict[str, Any] = {"layers": 0, "budget": 0.0, "plan": "", "sweep": "", "allocate": False, "positions": True}
    return replace(config, keep_attention=True, order=chosen, max_minutes=0.0, **unused)


def control(run: Path, out: Path, record: Path | None = None, max_minutes: float = 0.0) -> Path:
    """Train the control of the conversion in `run`; its model folder."""
    return convert(replace(control_config(run), max_minutes=max_minutes), out, record)


def compare(run: Path, out: Path) -> dict[str, Any] | None:
    """Both results side by side; None while one of them is not finished."""
    paths = [Path(folder) / "result.json" for folder in (run, out)]
    if not all(path.is_file() for path in paths):
        return None
    results = [read_json(path) for path in paths]
    measure = results[0].get("measure", "wer")
    converted, attention = (result[measure] for result in results)
    points = None if converted is None or attention is None else converted - attention
    return {"measure": measure, measure: converted, f"control_{measure}": attention, "points": points}
