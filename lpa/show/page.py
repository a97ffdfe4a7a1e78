"""The picture as one HTML file with the audio in it: move over it, or play it, and see where that moment looks."""

from __future__ import annotations

import base64
import io
import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch.nn.functional as F
from torch import Tensor

from . import Scene
from .looks import Layer

ROWS, COLUMNS, PEAKS = 240, 480, 1200  # what is kept of a matrix, and of the waveform


def render(scene: Scene) -> str:
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    data = json.dumps(describe(scene), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    fill = {"NAME": escape(scene.name), "MODEL": escape(scene.model), "AUDIO": audio(scene), "DATA": data}
    for key, value in fill.items():
        template = template.replace(f"{{{{{key}}}}}", value)
    return template


def describe(scene: Scene) -> dict[str, Any]:
    return {
        "seconds": scene.seconds,
        "focus": (scene.focus + 0.5) / scene.frames,
        "peaks": peaks(scene.samples),
        "words": [[w.word, w.start, w.end, round(w.confidence, 2)] for w in scene.words],
        "layers": [describe_layer(layer, scene) for layer in scene.layers],
    }


def describe_layer(layer: Layer, scene: Scene) -> dict[str, Any]:
    rate = scene.frames / scene.seconds
    rows, columns = min(ROWS, scene.frames), min(COLUMNS, scene.frames)
    reach = "all of it" if layer.reach is None else "−{:.1f} to +{:.1f} s".format(*(r / rate for r in layer.reach))
    return {
        "name": f"Layer {layer.index}",
        "mixer": layer.mixer,
        "reach": reach,
        "away": layer.away / rate,
        "worth": layer.worth,
        "swept": scene.swept.get(layer.index),
        "rows": rows,
        "columns": columns,
        "map": quantise(layer.weight, rows, columns),
        "pulses": [[p.family, [[a / scene.frames, b / scene.frames] for a, b in p.runs]] for p in layer.pulses],
    }


def quantise(weight: Tensor, rows: int, columns: int) -> str:
    """(T, T) → rows × columns bytes in base64: square roots, each row's largest 255, so that the faint is seen."""
    small = F.adaptive_avg_pool2d(weight[None, None], (rows, columns))[0, 0]
    share = (small / small.amax(1, keepdim=True).clamp(min=1e-12)).sqrt()
    return base64.b64encode((255 * share).round().byte().numpy().tobytes()).decode()


def peaks(samples: np.ndarray) -> list[float]:
    """The loudest of every stretch, of the loudest of all."""
    parts = np.array_split(np.abs(samples), min(PEAKS, len(samples)))
    loud = np.array([part.max() for part in parts])
    return (loud / max(float(loud.max()), 1e-9)).round(3).tolist()


def audio(scene: Scene) -> str:
    """A data URL of the samples, 16 bit."""
    file = io.BytesIO()
    soundfile.write(file, scene.samples, scene.rate, format="WAV", subtype="PCM_16")
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()
