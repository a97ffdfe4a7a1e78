"""`lpa show`: one recording through one model, as a picture: waveform, words, where every layer looks and how wide."""

from __future__ import annotations

import math
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
from .looks import study
from .scene import Scene

LONGEST = 30.0  # seconds: the matrices are square
SHORTEST = 0.1
SILENT = 1e-4  # of full scale: quieter, and a waveform drawn as high as the picture would be noise


def show(
    file: str, model: str, out: Path, *, start: float = 0.0, seconds: float = 12.0, sweep: Path | None = None
) -> Path:
    """Write the picture of a recording's first seconds: HTML with audio, or PNG, as the name of `out` ends."""
    write = choose(out.suffix.lower(), WRITERS, "picture; name -o FILE with one of these endings")
    if not 0 <= start < math.inf or not SHORTEST <= seconds <= LONGEST:
        raise LpaError(f"start must be 0 or more, and seconds from {SHORTEST:g} up to {LONGEST:g}: matrices are square")
    samples, name = piece(file, start, seconds)
    unexplained = swept(sweep)
    network = load(find_model(model))
    if not isinstance(network, SpeechModel) or getattr(network, "task", "transcribe") != "transcribe":
        raise LpaError(f"{model} is no model that hears words; show takes one that does")
    scene = look_at(network, samples, name, model, unexplained)
    if out.is_dir():
        raise LpaError(f"{out} is a folder; name a file with -o")
    out.parent.mkdir(parents=True, exist_ok=True)
    write(scene, out)
    if scene.words == ():
        raise LpaError(f"no words are heard in {name}; {out} shows it without")
    return out


def piece(file: str, start: float, seconds: float) -> tuple[np.ndarray, str]:
    """The samples to look at, and how they are called."""
    whole = read(file)
    samples = whole[round(start * RATE) : round((start + seconds) * RATE)]
    if len(samples) < SHORTEST * RATE:
        advice = "give a smaller --start" if start else "there is nothing to show"
        raise LpaError(f"{file} has less than {SHORTEST:g} s after {start:g} s; {advice}")
    name = Path(file).name
    if len(samples) < len(whole):
        name += f", {start:g} to {start + len(samples) / RATE:.4g} s of {len(whole) / RATE:,.0f} s"
    if float(np.abs(samples).max()) < SILENT:
        raise LpaError(f"{name} is silent; there is nothing to show")
    return samples, name


def look_at(network: SpeechModel, samples: np.ndarray, name: str, model: str, swept: dict[int, float]) -> Scene:
    """Run the model and see what each layer did."""
    unknown = swept.keys() - {site.index for site in network.sites()}
    if unknown:
        raise LpaError(f"the sweep is of another model: {model} has no layer {min(unknown)}")
    audio = torch.from_numpy(np.ascontiguousarray(samples, np.float32)).unsqueeze(0)
    logits, layers = study(network.float().eval(), audio)
    frames = len(layers[0].weight)
    words = None if logits is None else align.words(logits.numpy(), network.tokens, network.frame_rate)
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
