"""A model folder in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..errors import LpaError
from ..families import load
from ..families.base import SpeechModel
from ..surgery import mixer_at
from . import Facts, Listener, is_export
from .field import Field, limit_ahead


class TorchListener(Listener):
    backend = "torch"

    def __init__(self, model: SpeechModel):
        if not model.settings.head:
            raise LpaError("this model has no CTC head, so it cannot transcribe; train one first")
        self.model = model.eval()
        self.tokens, self.sample_rate, self.frame_rate = model.tokens, model.sample_rate, model.frame_rate
        self.facts = Facts.of(model.family, model.base(), len(model.swaps))
        self.field = model_field(model)

    def limit(self, seconds: float) -> None:
        limit_lookahead(self.model, seconds)
        self.field = model_field(self.model)

    def settle(self, device: str, compiled: bool) -> None:
        try:
            self.model.to(device)
        except (RuntimeError, AssertionError) as error:  # no such device, no driver for it, no build for it
            raise LpaError(f"--device {device}: {str(error).splitlines()[0]}; use cpu") from None
        if compiled:
            for index in self.model.swaps:  # a whole layer tells the model what it did, which no compiled code can
                mixer_at(self.model, index).compile(dynamic=True)

    @classmethod
    def load(cls, source: str | Path) -> TorchListener:
        folder = Path(source)
        if is_export(folder):
            raise LpaError(f"{folder} is an ONNX export; use --backend onnx, or the folder it was made from")
        return cls(load(source, dtype=torch.float32))

    @torch.inference_mode()
    def run(self, samples: np.ndarray) -> np.ndarray:
        device = next(self.model.parameters()).device
        logits = self.model(torch.from_numpy(samples).to(device).unsqueeze(0)).logits
        assert logits is not None  # it has a head
        return logits[0].float().cpu().numpy()

    def attention_bytes(self, frames: int) -> int:
        if not self.facts.attention or self.model.family != "wavlm":
            return 0  # the fused kernel never writes the scores down; wavlm's, with its position bias, does
        return 8 * self.facts.heads * frames**2


def model_field(model: SpeechModel) -> Field:
    return Field.of(model.family, model.base(), tuple(model.swaps.values()))


def limit_lookahead(model: SpeechModel, seconds: float) -> None:
    """Change a model's mixers so that no frame depends on audio more than so many seconds after it."""
    for swap in limit_ahead(model.family, model.base(), tuple(model.swaps.values()), seconds):
        if swap != model.swaps[swap.index]:
            mixer_at(model, swap.index).look_ahead(swap.config["right"])
            model.swaps[swap.index] = swap
