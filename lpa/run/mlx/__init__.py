"""A model folder in MLX: numpy prepares the audio, and neither torch nor ONNX Runtime is ever imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import LpaError
from ...plan import Plan
from .. import Facts, Listener
from ..field import Field, limit_ahead
from ..front import Processor

try:
    import mlx.core as mx
except ImportError as error:  # it is not there, or its library is not
    raise LpaError(f"this needs MLX ({error}); type: pip install 'lpa[mlx]'") from None

from .network import build_network, check_plan
from .weights import Weights, in_precision, read_tensors


class MlxListener(Listener):
    """Products in the precision of the folder's weights (float32 for int8), or in the one asked for."""

    backend = "mlx"

    def __init__(self, folder: Path, precision: str | None = None):
        self.plan = plan = Plan.read(folder)
        check_plan(plan)
        self.processor = Processor.read(folder)
        self.tokens, self.sample_rate = self.processor.tokens, self.processor.sample_rate
        self.frame_rate = self.processor.frame_rate
        self.facts = Facts.of(plan.family, plan.base, len(plan.swaps))
        self.precision = precision or ("float16" if plan.weights == "float16" else "float32")
        self.tensors = in_precision(read_tensors(folder), self.precision)
        self.build()

    def build(self) -> None:
        self.network = build_network(self.plan, Weights(self.tensors), len(self.tokens))
        self.field = Field.of(self.plan.family, self.plan.base, self.plan.swaps)

    def limit(self, seconds: float) -> None:
        swaps = limit_ahead(self.plan.family, self.plan.base, self.plan.swaps, seconds)
        self.plan = replace(self.plan, swaps=tuple(swaps))
        self.build()

    def run(self, samples: np.ndarray) -> np.ndarray:
        features = mx.array(self.processor.prepare(samples)[0])
        return np.array(self.network(features), np.float32)

    def attention_bytes(self, frames: int) -> int:
        if not self.facts.attention or mx.default_device() == mx.Device(mx.gpu):
            return 0  # the fused kernel never writes the scores down; on the CPU there is none
        return (2 if self.precision == "float16" else 4) * self.facts.heads * frames**2  # measured
