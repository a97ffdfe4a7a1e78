"""Several conversions side by side: what each came to, by the number of layers it had replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import LpaError
from ..score import MEASURES
from .config import read_json

CONTROL = "attention (control)"


def make_table(
    runs: list[Path],
    data: str | None,
    *,
    limit: int | None = None,
    device: str = "cpu",
    record: Path | None = None,
) -> dict[str, Any]:
    """A row for every number of layers, a column a run: the figures of its steps, or those of its models on `data`."""
    results = [read_result(Path(run)) for run in runs]
    measures = {result["measure"] for result in results}
    if len(measures) > 1:
        raise LpaError(f"the runs are judged by {' and '.join(sorted(measures))}; they have no table in common")
    columns: dict[str, dict[int, float]] = {}
    for run, result in zip(map(Path, runs), results, strict=True):
        name = unused(name_of(run, result), columns)
        models = models_of(run, result)
        columns[name] = {n: value for n, (value, _) in models.items()}
        if data is not None:
            columns[name] = measure(
                run, result, {n: model for n, (_, model) in models.items()}, data, limit, device, record
            )
    counts = sorted({n for column in columns.values() for n in column})
    rows = [{"layers": n, **{name: column.get(n) for name, column in columns.items()}} for n in counts]
    return {"measure": measures.pop(), "data": data, "rows": rows}


def read_result(run: Path) -> dict[str, Any]:
    if not (run / "result.json").is_file():
        raise LpaError(f"{run} is no finished conversion; finish it with the command that began it")
    result = read_json(run / "result.json")
    return {"measure": "wer", **result}


def name_of(run: Path, result: dict[str, Any]) -> str:
    if result["attention_kept"]:
        return CONTROL
    swaps = read_json(run / "order.json")["swaps"]
    return " and ".join(sorted({swap["mixer"] for swap in swaps}))


def unused(name: str, taken: dict[str, Any]) -> str:
    number = 2
    while f"{name} {number}" in taken:
        number += 1
    return f"{name} {number}" if name in taken else name


def models_of(run: Path, result: dict[str, Any]) -> dict[int, tuple[float, str]]:
    """(figure, model folder) by layers replaced; of the last step the model is the one after the final tuning."""
    key, config = result["measure"], read_json(run / "config.json")
    before = len(result["steps"][0].get("replaced", ()))  # by an earlier conversion
    found = {before: (result[f"{key}_before"], config["model"])}
    for step in result["steps"][1:]:
        found[len(step["replaced"])] = (step[key], str(run / f"step-{step['step']:02d}" / "model"))
    found[len(result["replaced"])] = (result[key], str(run / "model"))
    return found


def measure(
    run: Path, result: dict[str, Any], models: dict[int, str], data: str, limit: int | None, device: str, record
) -> dict[int, float]:
    """The figures of models on some data, recorded with the run's settings and the layers that are replaced."""
    from .. import evaluate, judge, records

    if result["measure"] == "si_snri":
        found = judge.evaluate_folders(list(models.values()), data, limit=limit, device=device, heard=0)
    else:
        found = evaluate.evaluate_folders(list(models.values()), data, limit=limit, device=device)
    key = result["measure"]
    for layers, row in zip(models, found, strict=True):
        if record is not None:
            records.write(
                "evaluate",
                what=key,
                model=row["model"],
                data=data,
                figures={key: row[key], "layers": layers, "utterances": row["utterances"]},
                interval=row[f"{key}_interval"],
                folder=record,
                config=read_json(run / "config.json"),
                device=device,
            )
    return {layers: row[key] for layers, row in zip(models, found, strict=True)}


def render(found: dict[str, Any]):
    """The table for a terminal."""
    from rich.table import Table

    label = MEASURES[found["measure"]].label
    table = Table(
        title=f"{label} by layers replaced" + (f", {found['data']}" if found["data"] else ", held-out speakers")
    )
    for name in found["rows"][0]:
        table.add_column(name, justify="right")
    for row in found["rows"]:
        table.add_row(*("" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    return table
