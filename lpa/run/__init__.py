"""The runtimes: each hears audio with a model folder's network, and none needs another's framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LpaError, choose
from ..tokens import Tokens


@dataclass(frozen=True)
class Facts:
    """What a plan says about running its network: no weights needed."""

    shortest: int  # samples that make one frame
    longest: float | None  # seconds it has positions for; None: any length
    heads: int
    attention: int  # layers that keep their attention

    @classmethod
    def of(cls, family: str, base: dict[str, Any], swapped: int) -> Facts:
        if family == "whisper":
            longest = base["max_source_positions"] / 50 if base["positions"] else None
            return cls(1, longest, base["encoder_attention_heads"], base["encoder_layers"] - swapped)
        samples = 1
        for kernel, stride in zip(reversed(base["conv_kernel"]), reversed(base["conv_stride"]), strict=True):
            samples = (samples - 1) * stride + kernel
        return cls(samples, None, base["num_attention_heads"], base["num_hidden_layers"] - swapped)


class Listener(ABC):
    """A model ready to hear one recording at a time."""

    backend: str
    tokens: Tokens
    sample_rate: int
    frame_rate: float
    facts: Facts

    @abstractmethod
    def run(self, samples: np.ndarray) -> np.ndarray:
        """Samples (S,) float32 in [-1, 1] → CTC logits (T, V) float32, in one pass."""

    @property
    def stride(self) -> int:
        """Samples from one frame to the next."""
        return round(self.sample_rate / self.frame_rate)

    @abstractmethod
    def attention_bytes(self, frames: int) -> int:
        """Memory that attention alone takes at its peak in one pass over so many frames; 0 where it has no square."""

    def hear(self, samples: np.ndarray) -> np.ndarray:
        """`run`, once the model is seen to take audio of this length."""
        seconds, longest = len(samples) / self.sample_rate, self.facts.longest
        if len(samples) < self.facts.shortest:
            raise LpaError(f"{len(samples)} samples are too short for one frame; it takes {self.facts.shortest}")
        if longest is not None and len(samples) > longest * self.sample_rate:
            raise LpaError(
                f"{seconds:.0f} s of audio, but this model hears {longest:g} s at once; cut it with --chunk {longest:g}"
            )
        return self.run(samples)


def open_onnx(source: str | Path) -> Listener:
    from .onnx import OnnxListener

    return OnnxListener(Path(source))


def open_torch(source: str | Path) -> Listener:
    from .torch import TorchListener

    return TorchListener.load(source)


BACKENDS = {"onnx": open_onnx, "torch": open_torch}


def open_model(source: str | Path, backend: str | None = None) -> Listener:
    """A model folder in a backend; in ONNX Runtime where nothing is said and the folder has model.onnx."""
    backend = backend or ("onnx" if (Path(source) / "model.onnx").is_file() else "torch")
    return choose(backend, BACKENDS, "backend")(source)
