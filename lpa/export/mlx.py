"""`lpa export --to mlx`: a model folder whose weights MLX multiplies with as they are, in half the space or in float32.

It stays a model folder: torch loads it too. One that holds int8 comes out unpacked. Without torch, unless the model is
in Hugging Face's format.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import LpaError
from ..plan import Plan
from ..run.field import limit_ahead
from ..run.mlx import MlxListener
from ..run.mlx.weights import PRECISIONS, in_precision, read_tensors, write_tensors


def export_mlx(source: str, out: str | Path, weights: str = "float16", latency: float | None = None) -> Path:
    """Write plan.json, processor.json and weights.safetensors; latency: look no more than so many seconds ahead."""
    out = Path(out)
    if weights not in PRECISIONS:
        raise LpaError(f"no weights {weights!r} in MLX; have {', '.join(PRECISIONS)}")
    if out.exists() and (Path(source).exists() and out.samefile(source)):
        raise LpaError(f"{source} runs in MLX as it is; to export it, name another folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LpaError(f"{out} exists and is not empty; export somewhere else")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as work:
        fresh = Path(work) / "model"
        fresh.mkdir()
        write(model_folder(source, Path(work)), fresh, weights, latency)
        check_sound(MlxListener(fresh))
        os.replace(fresh, out)  # it only ever appears whole
    return out


def model_folder(source: str, work: Path) -> Path:
    """The source where it is a model folder of ours, else one made of it in `work`."""
    if (Path(source) / "plan.json").is_file():
        return Path(source)
    from ..families import load  # torch comes in here
    from ..surgery import save

    return save(load(source), work / "source")


def write(source: Path, folder: Path, weights: str, latency: float | None) -> None:
    plan = Plan.read(source)
    if latency is not None:
        plan = replace(plan, swaps=tuple(limit_ahead(plan.family, plan.base, plan.swaps, latency)))
    tensors = in_precision(read_tensors(source), weights)
    write_tensors(tensors, folder)
    (folder / "plan.json").write_text(replace(plan, weights=weights).to_json())
    shutil.copyfile(source / "processor.json", folder / "processor.json")


def check_sound(listener: MlxListener) -> None:
    """No folder is written that does not load, or whose numbers outgrow float16."""
    seconds = min(2.0, listener.facts.longest or 2.0)
    samples = 0.1 * np.random.default_rng(0).normal(size=int(seconds * listener.sample_rate))
    if not np.isfinite(listener.hear(samples.astype(np.float32))).all():
        raise LpaError(
            f"in {listener.precision} this model gives numbers that are none; export it with float32 weights"
        )
