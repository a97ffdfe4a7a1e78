"""Records: one JSON line a figure, with all it takes to make the figure again. Tables are made from these alone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .errors import LpaError
from .plan import Plan

RESULTS = Path("results")
REQUIRED = ("kind", "what", "commit", "machine", "command", "date", "figures")


def write(
    kind: str,
    *,
    what: str,
    figures: dict[str, Any],
    model: str = "",
    data: str = "",
    seed: int | None = None,
    interval: tuple[float, float] | None = None,
    machine: str = "",
    code: str = "",
    folder: Path | str = RESULTS,
    **more: Any,
) -> dict[str, Any]:
    """Append a record to FOLDER/KIND.jsonl and return it.

    `figures`: numbers by name; `interval`: the first one's; `code`: the commit that made them, where not this one.
    """
    record = {
        "kind": kind,
        "what": what,
        "model": model,
        "data": data,
        "seed": seed,
        "figures": figures,
        "interval": interval,
        "network": network(model),
        **more,
        "commit": code or commit(),
        "machine": machine or describe_machine(),
        "command": " ".join([Path(sys.argv[0]).name.replace("__main__.py", "lpa"), *map(seen_from_here, sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    check(record, "this record")
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        raise LpaError(f"{what}: one of {figures} is not a number; nothing was recorded") from None
    path = Path(folder) / f"{kind}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())  # one write at the end of the file: lines of several processes do not mix
    finally:
        os.close(descriptor)
    return json.loads(line)


def seen_from_here(argument: str) -> str:
    """A path from the root as one from this folder: what a record names is no machine's own."""
    return os.path.relpath(argument) if os.path.isabs(argument) else argument


def network(model: str) -> dict[str, Any] | None:
    """What a model folder's plan says of its layers; None where the model is no folder of ours."""
    if not model or not (Path(model) / "plan.json").is_file():
        return None
    plan = Plan.read(Path(model))
    base = plan.base
    layers = base.get("encoder_layers") or base.get("num_hidden_layers")
    if layers is None and "intra_layers" in base:
        layers = base["blocks"] * (base["intra_layers"] + base["inter_layers"])
    mixers = sorted({swap.mixer for swap in plan.swaps})
    return {"family": plan.family, "layers": layers, "replaced": len(plan.swaps), "mixers": mixers}


def read(path: Path | str) -> list[dict[str, Any]]:
    """The records of a file. One that cannot be made again (no commit, no command …) is refused."""
    path = Path(path)
    if not path.is_file():
        raise LpaError(f"{path} is not there; nothing has been recorded yet")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            raise LpaError(f"{where} is not JSON; remove the line") from None
        check(record, where)
        found.append(record)
    return found


def check(record: Any, where: str) -> None:
    """Raise unless a record says what it is of, and how and where it was made."""
    if not isinstance(record, dict):
        raise LpaError(f"{where} is not a record but {type(record).__name__}; remove the line")
    missing = [name for name in REQUIRED if not record.get(name)]
    if missing:
        raise LpaError(f"{where} lacks {', '.join(missing)}; a figure that cannot be made again is no record")


def commit(folder: Path | str | None = None) -> str:
    """The commit of the code that runs, +dirty where code differs from it; LPA_COMMIT, where that is set, knows better.

    Records, and what is written from them, are no code: a second measurement is as clean as the first.
    """
    if told := os.environ.get("LPA_COMMIT"):
        return told
    folder = Path(folder or Path(__file__).parent)
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return ""
    code = (":/", ":(top,exclude)*.jsonl", ":(top,exclude)*.md")
    changes = ("status", "--porcelain", "--untracked-files=no", "--", *code)
    return f"{head}+dirty" if _git(folder, *changes) else head


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    except OSError:  # no git here
        return ""
    return "" if done.returncode else done.stdout.strip()


def describe_machine() -> str:
    """Processor, cores and, where torch is in use and sees them, GPUs."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    parts = [f"{name}, {os.cpu_count()} cores"]
    torch = sys.modules.get("torch")  # not imported for this: a record must not cost seconds
    if torch is not None and torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    return ", ".join([*parts, platform.system()])
