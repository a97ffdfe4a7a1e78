"""A model folder in ONNX Runtime: numpy prepares the audio, and torch is never imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

from ..errors import LpaError
from ..plan import Plan
from . import Facts, Listener
from .field import Field
from .front import Processor

MODEL = "model.onnx"


class OnnxListener(Listener):
    backend = "onnx"
    room = 600e6

    def __init__(self, folder: Path):
        path = folder / MODEL
        if not path.is_file():
            raise LpaError(f"{folder} has no {MODEL}; make one with: lpa export {folder} --to onnx --out FOLDER")
        plan = Plan.read(folder)
        self.processor = Processor.read(folder)
        self.tokens, self.sample_rate = self.processor.tokens, self.processor.sample_rate
        self.frame_rate = self.processor.frame_rate
        self.facts = Facts.of(plan.family, plan.base, len(plan.swaps))
        self.field = Field.of(plan.family, plan.base, plan.swaps)
        self.score_bytes = 8 if plan.family == "wavlm" else 5  # peak memory over heads times frames squared, measured
        self.session = open_session(path)
        symbols = self.session.get_outputs()[0].shape[-1]
        if symbols != len(self.tokens):
            raise LpaError(f"{path} has {symbols} outputs for an alphabet of {len(self.tokens)}; export it again")

    def run(self, samples: np.ndarray) -> np.ndarray:
        (logits,) = self.session.run(None, {"features": self.processor.prepare(samples)})
        return logits[0]

    def attention_bytes(self, frames: int) -> int:
        return self.score_bytes * self.facts.heads * frames**2 if self.facts.attention else 0


def open_session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False  # a second plan of all memory for every length that comes twice
    options.log_severity_level = 3  # errors are raised; warnings are about shapes that our time axis leaves open
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own kinds have no common ancestor below this
        raise LpaError(f"{path} cannot be loaded ({' '.join(str(error).split())[:200]}); export it again") from error
