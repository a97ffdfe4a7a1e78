"""Models in other runtimes' formats, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def to_onnx(source: str, out: Path, weights: str = "float32") -> Path:
    from .onnx import export_onnx  # torch comes in here

    return export_onnx(source, out, weights)


TARGETS: dict[str, Callable[..., Path]] = {"onnx": to_onnx}
