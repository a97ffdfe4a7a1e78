"""What was measured: the records of results/, checked and numbered, drawn together into figures. Knows no torch."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import records
from ..convert.config import ConvertConfig
from ..errors import LpaError
from .items import Figure

Record = dict[str, Any]
DEFAULTS = ConvertConfig(model="any", held_out=("any",)).to_dict()
SPREADS = {  # figures that come with their spread: where it is, and what
    "median_ms": ("low_ms", "high_ms", "quartiles"),
    "real_time_factor": ("low_factor", "high_factor", "quartiles"),
    "wer": ("wer_low", "wer_high", "95 %"),
}
SPLITS = ("dev-clean", "dev-other", "test-clean", "test-other")


def load(folder: Path | str) -> list[Record]:
    """Every record of FOLDER/*.jsonl with an `id`, file and line: bench-12. One that lacks what it takes is refused."""
    folder = Path(folder)
    if not folder.is_dir():
        raise LpaError(f"{folder} is not there; run this in a clone of the repository, or name --results")
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, record in enumerate(records.read(path), 1):
            if not isinstance(record["figures"], dict):
                raise LpaError(f"{path}:{number}: figures must be numbers by name; remove the line")
            found.append({**record, **whole_config(record), "id": f"{path.stem}-{number}"})
    return found


def lost(found: Iterable[Record], folder: Path | str) -> frozenset[str]:
    """The commits of records that no branch or tag of FOLDER's repository holds.

    None where that cannot be told: without git, outside a repository, in a clone of part of the history.
    """

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
        except OSError:  # no git here
            return ""
        return "" if done.returncode else done.stdout.strip()

    if git("rev-parse", "--is-shallow-repository") != "false":
        return frozenset()
    held = git("rev-list", "--all", "HEAD").split()
    named = {record["commit"] for record in found}
    return frozenset(c for c in named if not any(h.startswith(c.partition("+")[0]) for h in held))


def whole_config(record: Record) -> dict[str, Any]:
    """The config of a conversion or its control, with the defaults of what was no setting yet when it was written."""
    config = record.get("config")
    return {"config": {**DEFAULTS, **config}} if record["kind"] in ("convert", "control", "evaluate") and config else {}


def figure(found: Iterable[Record], name: str, digits: int = 2) -> Figure | None:
    """One figure from records of one thing: of each seed the latest; of several seeds their mean and range.

    What a clock says differs from run to run, so a benchmark that was made again gives the latest and the range of all.
    """
    rows = [r for r in found if isinstance(r["figures"].get(name), int | float)]
    rows.sort(key=lambda r: r["date"])
    if not rows:
        return None
    if len(rows) > 1 and name != "wer" and all(r.get("kind") == "bench" for r in rows):
        values = [r["figures"][name] for r in rows]
        ids = tuple(r["id"] for r in reversed(rows))
        return Figure(values[-1], ids, min(values), max(values), f"{len(rows)} runs", digits)
    latest: dict[Any, Record] = {r.get("seed"): r for r in rows}
    values = [r["figures"][name] for r in latest.values()]
    ids = tuple(r["id"] for r in latest.values())
    if len(values) > 1:
        return Figure(fmean(values), ids, min(values), max(values), f"{len(values)} seeds", digits)
    (record,) = latest.values()
    made = Figure(values[0], ids, digits=digits)
    if record.get("interval") and next(iter(record["figures"])) == name:
        low, high = record["interval"]
        return replace(made, low=low, high=high, spread="95 %")
    first, last, spread = SPREADS.get(name, ("", "", ""))
    low, high = (record["figures"].get(end) for end in (first, last))
    return made if low is None or high is None else replace(made, low=low, high=high, spread=spread)


def grouped(found: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Records by key, those without one left out, in the order they come."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in found:
        if (name := key(record)) is not None:
            groups[name].append(record)
    return dict(groups)


# --- what a record is of


def of_paper_model(record: Record) -> bool:
    """Whether a record is of a 12-layer wav2vec2, the shape of model the paper converts."""
    network = record.get("network") or {}
    return network.get("layers", 12) == 12 and "wav2vec2" in f"{network.get('family', '')} {record['model']}"


def split_of(record: Record) -> str | None:
    """The part of LibriSpeech that the data's path names."""
    return next((split for split in SPLITS if split in record.get("data", "")), None)


def base_name(record: Record) -> str:
    """The name of the model that was converted, or of the model itself: its folder's, or its run's."""
    source = (record.get("config") or {}).get("model") or record["model"]
    return source.removesuffix("/model") if source.endswith("/model") else Path(source).name or source


def as_it_is(record: Record) -> bool:
    """Utterances one by one, gates as they were trained, as far ahead as it looks."""
    return "seconds" not in record["figures"] and record.get("tau") is None and record.get("latency") is None


def is_evaluation(record: Record) -> bool:
    return record["kind"] == "evaluate" and "wer" in record["figures"]
