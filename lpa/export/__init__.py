"""Models in other runtimes' formats, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def to_onnx(source: str, out: Path, weights: str | None = None, latency: float | None = None) -> Path:
    from .onnx import export_onnx  # torch comes in here

    return export_onnx(source, out, weights or "float32", latency)


def to_mlx(source: str, out: Path, weights: str | None = None, latency: float | None = None) -> Path:
    from .mlx import export_mlx

    return export_mlx(source, out, weights or "float16", latency)


TARGETS: dict[str, Callable[..., Path]] = {"mlx": to_mlx, "onnx": to_onnx}
