"""`lpa show`: one recording through one model, as a picture: waveform, words, where every layer looks and how wide."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import align
from ..audio import RATE, read
from ..errors import LpaError, choose
from ..families import load
from ..families.base import SpeechModel
from ..run import find_model
from .looks import Layer, study

LONGEST = 30.0  # seconds: the matrices are square


@dataclass(frozen=True)
class Scene:
    """All there is to draw."""

    name: str
    model: str
    samples: np.ndarray  # (S,)
    rate: int
    frames: int
    seconds: float  # that the frames last
    words: tuple[align.Word, ...]
    layers: list[Layer]
    swept: dict[int, float]  # by layer: share of attention's output a sweep left unexplained

    @property
    def focus(self) -> int:
        """The frame to look from at first: the middle of the longest word, or of the recording."""
        if not self.words:
            return self.frames // 2
        word = max(self.words, key=lambda w: w.end - w.start)
        return min(self.frames - 1, round((word.start + word.end) / 2 / self.seconds * self.frames))


def show(
    file: str, model: str, out: Path, *, start: float = 0.0, seconds: float = 12.0, sweep: Path | None = None
) -> Path:
    """Write the picture of a recording's first seconds: HTML with audio, or PNG, as the name of `out` ends."""
    write = choose(out.suffix.lower(), WRITERS, "picture; name -o FILE with one of these endings")
    if start < 0 or not 0 < seconds <= LONGEST:
        raise LpaError(f"start must be 0 or more and seconds above 0, up to {LONGEST:g}; the matrices are square")
    network = load(find_model(model))
    if not isinstance(network, SpeechModel) or getattr(network, "task", "transcribe") != "transcribe":
        raise LpaError(f"{model} is no model that hears words; show takes one that does")
    samples = read(file)[round(start * RATE) : round((start + seconds) * RATE)]
    if not len(samples):
        raise LpaError(f"{file} ends before {start:g} s; give a smaller --start")
    scene = look_at(network, samples, Path(file).name, model, swept(sweep))
    out.parent.mkdir(parents=True, exist_ok=True)
    write(scene, out)
    return out


def look_at(network: SpeechModel, samples: np.ndarray, name: str, model: str, swept: dict[int, float]) -> Scene:
    """Run the model and see what each layer did."""
    audio = torch.from_numpy(np.ascontiguousarray(samples, np.float32)).unsqueeze(0)
    logits, layers = study(network.float().eval(), audio)
    frames = len(layers[0].weight) if layers else network.frames(len(samples))
    words = () if logits is None else align.words(logits.numpy(), network.tokens, network.frame_rate)
    kept = len(layers) - len(network.swaps)
    about = f"{Path(model).name or model}: {network.family}, {len(layers)} layers, {kept} with attention"
    length = frames / network.frame_rate
    return Scene(name, about, samples, network.sample_rate, frames, length, words, layers, swept)


def swept(path: Path | None) -> dict[int, float]:
    """What a sweep left unexplained of each layer."""
    if path is None:
        return {}
    from ..convert.sweep import read as read_sweep

    return {index: row["relative"] for index, row in read_sweep(path).items()}


def write_html(scene: Scene, out: Path) -> None:
    from .page import render

    out.write_text(render(scene), encoding="utf-8")


def write_png(scene: Scene, out: Path) -> None:
    from .picture import draw

    draw(scene, out)


WRITERS: dict[str, Any] = {".html": write_html, ".png": write_png}
