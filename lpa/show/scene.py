"""All there is to draw of one recording and one model, the same for both forms of the picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from .. import align
from .legend import PULSES
from .looks import Layer
from .pulses import Pulse

PEAKS = 1200  # of the waveform


@dataclass(frozen=True)
class Scene:
    name: str
    model: str
    samples: np.ndarray  # (S,)
    rate: int
    frames: int
    seconds: float  # that the frames last
    words: tuple[align.Word, ...] | None  # None: the model has no head to read words with
    layers: list[Layer]
    swept: dict[int, float]  # by layer: share of attention's output a sweep left unexplained

    @property
    def step(self) -> float:
        """Seconds of a frame."""
        return self.seconds / self.frames

    @property
    def focus(self) -> int:
        """The frame to look from at first: the middle of the longest word, or of the recording."""
        if not self.words:
            return self.frames // 2
        word = max(self.words, key=lambda w: w.end - w.start)
        return min(self.frames - 1, round((word.start + word.end) / 2 / self.step))

    @property
    def kinds(self) -> list[str]:
        """The kinds of pulses that are in the picture, in the order of the legend."""
        here = {pulse.kind for layer in self.layers for line in layer.lines for pulse in line}
        return [kind for kind in PULSES if kind in here]

    @property
    def wordless(self) -> str:
        """What stands where words would, if there are none."""
        return "this model has no head to read words with" if self.words is None else "no words heard"

    def peaks(self) -> np.ndarray:
        """The loudest of every stretch, of the loudest of all."""
        parts = np.array_split(np.abs(self.samples), min(PEAKS, len(self.samples)))
        loud = np.array([part.max() for part in parts])
        return loud / max(float(loud.max()), 1e-9)

    def width(self, pulse: Pulse, frame: int | None = None) -> str:
        """How wide a pulse is, for a frame where it goes along, and how often it comes."""
        frames = pulse.width if frame is None or pulse.edges is None else float(pulse.edges[frame].diff())
        every = "" if pulse.pace is None else f", every {pulse.pace * self.step:.2f} s"
        return f"{frames * self.step:.2f} s{every}"

    def shares(self, layer: Layer) -> dict[str, float]:
        """What is told of a layer as a bar."""
        told = {"difficulty": layer.difficulty, "importance": layer.worth, "swept": self.swept.get(layer.index)}
        return {name: share for name, share in told.items() if share is not None}

    def facts(self, layer: Layer) -> list[str]:
        """What is told of a layer in words."""
        if layer.reach == (0, 0):
            return ["gathers nothing"]
        back, ahead = (frames * self.step for frames in layer.reach or (0, 0))
        sees = "sees all of it" if layer.reach is None else f"sees −{back:.2f} to +{ahead:.2f} s"
        told = [f"looks {layer.away * self.step:.2f} s away on average", sees]
        drawn = [pulse for line in layer.lines for pulse in line]
        if len(drawn) > 1:
            count = f"{len(drawn)} pulses" if len(drawn) == layer.pulses else f"{len(drawn)} of {layer.pulses} pulses"
            widths = [pulse.width * self.step for pulse in drawn]
            told.append(f"{count}, {min(widths):.2f} to {max(widths):.2f} s wide")
        if layer.difficulty is None:
            told.append("its difficulty cannot be told")
        return told


def shown(weight: Tensor, rows: int, columns: int) -> np.ndarray:
    """(T, T) → (rows, columns) in [0, 1]: square roots, each row's largest 1, so that the faint is seen."""
    small = F.adaptive_avg_pool2d(weight[None, None], (rows, columns))[0, 0]
    return (small / small.amax(1, keepdim=True).clamp(min=1e-12)).sqrt().numpy()
