"""The picture as one HTML file with the audio in it: move over it, or play it, and see where that moment looks."""

from __future__ import annotations

import base64
import io
import json
import re
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from .legend import INTRO, PULSES, guide, percent, ticks
from .looks import Layer
from .pulses import Pulse, text_rows
from .scene import Scene, shown

ROWS, COLUMNS = 240, 480  # what is kept of a matrix


def render(scene: Scene) -> str:
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    data = json.dumps(describe(scene), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    told = guide(bool(scene.kinds), bool(scene.swept))
    fill = {
        "NAME": escape(scene.name),
        "MODEL": escape(scene.model),
        "INTRO": INTRO,
        "LIGHT": colours(scene, "light"),
        "DARK": colours(scene, "dark"),
        "KINDS": "".join(
            f'<li style="color: var(--{kind})"><b>{kind}</b> <span>{PULSES[kind].about}</span></li>'
            for kind in scene.kinds
        ),
        "GUIDE": "".join(f"<div><dt>{name}</dt><dd>{marked(text)}</dd></div>" for name, text in told.items()),
        "AUDIO": audio(scene),
        "DATA": data,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)


def marked(text: str) -> str:
    """As HTML, with commands set as code."""
    return re.sub(r"`(.+?)`", r"<code>\1</code>", escape(text))


def colours(scene: Scene, ground: str) -> str:
    """A style property for every kind of pulse."""
    return " ".join(f"--{kind}: {getattr(PULSES[kind], ground)};" for kind in scene.kinds)


def describe(scene: Scene) -> dict[str, Any]:
    return {
        "seconds": scene.seconds,
        "focus": (scene.focus + 0.5) / scene.frames,
        "peaks": scene.peaks().round(3).tolist(),
        "words": [[w.word, w.start, w.end] for w in scene.words or ()],
        "wordless": scene.wordless,
        "ticks": ticks(scene.seconds),
        "layers": [describe_layer(layer, scene) for layer in scene.layers],
    }


def describe_layer(layer: Layer, scene: Scene) -> dict[str, Any]:
    rows, columns = min(ROWS, scene.frames), min(COLUMNS, scene.frames)
    most = max((float(pulse.used.max()) for line in layer.lines for pulse in line), default=0.0)
    return {
        "name": f"Layer {layer.index}",
        "mixer": layer.mixer,
        "shares": [[name, share, percent(share)] for name, share in scene.shares(layer).items()],
        "facts": scene.facts(layer),
        "rows": rows,
        "columns": columns,
        "map": packed(255 * shown(layer.weight, rows, columns), "u1"),
        "texts": text_rows(layer.lines),
        "lines": [[describe_pulse(pulse, scene, rows, most) for pulse in line] for line in layer.lines],
    }


def describe_pulse(pulse: Pulse, scene: Scene, rows: int, most: float) -> dict[str, Any]:
    """Shares of the recording's length; for every row of the map how much is taken, as square roots."""
    at = ((torch.arange(rows) + 0.5) * scene.frames / rows).long()
    used = packed(255 * (pulse.used[at] / max(most, 1e-12)).sqrt().numpy(), "u1")
    if pulse.edges is not None:
        edges = packed(65535 * (pulse.edges[at] / scene.frames).numpy(), "<u2")
        return {"kind": pulse.kind, "used": used, "edges": edges}
    runs = [[a / scene.frames, b / scene.frames] for a, b in pulse.runs]
    return {"kind": pulse.kind, "used": used, "runs": runs, "width": scene.width(pulse)}


def packed(numbers: np.ndarray, kind: str) -> str:
    """As whole numbers in base64."""
    return base64.b64encode(numbers.round().astype(kind).tobytes()).decode()


def audio(scene: Scene) -> str:
    """A data URL of the samples, 16 bit."""
    file = io.BytesIO()
    soundfile.write(file, scene.samples, scene.rate, format="WAV", subtype="PCM_16")
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()
