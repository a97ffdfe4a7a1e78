"""The picture as a PNG: one moment of the recording, and where it looks in every layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.nn.functional as F

from . import Scene
from .looks import Layer

INK, MUTED, ACCENT, PULSE, WAVE = "#1d2126", "#667079", "#0a6c8f", "#d5d9db", "#9aa3aa"
MAP = 300  # rows and columns of a matrix that are drawn


def draw(scene: Scene, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tall = [1.5 if layer.pulses else 1.0 for layer in scene.layers]
    figure, axes = pyplot.subplots(
        len(scene.layers) + 1,
        3,
        figsize=(13, 1.6 + 1.05 * sum(tall)),
        gridspec_kw={"width_ratios": (1.5, 8, 1), "height_ratios": (1.2, *tall)},
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        axis.set_facecolor("none")
    moment = (scene.focus + 0.5) / scene.frames * scene.seconds
    draw_wave(axes[0, 1], scene)
    axes[0, 0].text(0, 0.5, f"looking from\n{moment:.2f} s", color=MUTED, fontsize=9, va="center")
    axes[0, 2].text(0.5, 0, "every moment (down)\nlooks at (across)", color=MUTED, fontsize=7, ha="center")
    for row, layer in zip(axes[1:], scene.layers, strict=True):
        draw_label(row[0], layer, scene)
        draw_strip(row[1], layer, scene)
        small = F.adaptive_avg_pool2d(layer.weight[None, None], (min(MAP, scene.frames),) * 2)[0, 0]
        share = (small / small.amax(1, keepdim=True).clamp(min=1e-12)).sqrt()
        row[2].imshow(share.numpy(), cmap=shades(), aspect="equal")
        row[2].axhline(scene.focus / scene.frames * len(share), color=INK, linewidth=0.6)
    for axis in axes[:, 1]:
        axis.axvline(moment, color=INK, linewidth=0.8)
        axis.set_xlim(0, scene.seconds)
    last = axes[-1, 1]
    last.set_xticks(np.linspace(0, scene.seconds, 5), [f"{t:.1f} s" for t in np.linspace(0, scene.seconds, 5)])
    last.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    figure.suptitle(f"{scene.name}  ·  {scene.model}", fontsize=12, color=INK, x=0.01, ha="left")
    figure.savefig(out, dpi=130, facecolor="#fcfcfa", metadata={"Software": None})
    pyplot.close(figure)


def shades():
    """White to the accent."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("accent", ["#f3f4f2", ACCENT])


def draw_wave(axis, scene: Scene) -> None:
    parts = np.array_split(np.abs(scene.samples), min(1200, len(scene.samples)))
    loud = np.array([part.max() for part in parts])
    loud = loud / max(float(loud.max()), 1e-9)
    times = np.linspace(0, scene.seconds, len(loud))
    axis.fill_between(times, -loud, loud, color=WAVE, linewidth=0)
    axis.set_ylim(-1.9, 1)
    for word in scene.words:
        axis.text((word.start + word.end) / 2, -1.8, word.word, fontsize=8, color=MUTED, ha="center")
    if not scene.words:
        axis.text(0, -1.8, "no words heard", fontsize=8, color=MUTED)


def draw_label(axis, layer: Layer, scene: Scene) -> None:
    rate = scene.frames / scene.seconds
    axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.text(0, 0.9, f"layer {layer.index}", fontsize=10, color=INK, weight="bold", va="top")
    axis.text(0.42, 0.9, layer.mixer, fontsize=10, color=ACCENT, weight="bold", va="top")
    axis.plot([0, 0.9], [0.5, 0.5], color=PULSE, linewidth=3, solid_capstyle="butt")
    axis.plot([0, 0.9 * min(1.0, layer.worth)], [0.5, 0.5], color=ACCENT, linewidth=3, solid_capstyle="butt")
    axis.text(0, 0.4, f"without it {layer.worth:.0%} is lost", fontsize=7.5, color=MUTED, va="top")
    lines = [f"looks {layer.away / rate:.2f} s away"]
    if layer.index in scene.swept:
        lines.append(f"sweep: {scene.swept[layer.index]:.1%} left unexplained")
    axis.text(0, 0.2, "\n".join(lines), fontsize=7.5, color=MUTED, va="top")


def draw_strip(axis, layer: Layer, scene: Scene) -> None:
    step = scene.seconds / scene.frames
    for number, pulse in enumerate(layer.pulses):
        bars = [(a * step, (b - a) * step) for a, b in pulse.runs]
        axis.broken_barh(
            bars, (1 - (number + 0.8) / len(layer.pulses), 0.6 / len(layer.pulses)), color=PULSE, linewidth=0
        )
    row = layer.weight[scene.focus].numpy()
    row = np.sqrt(row / max(float(row.max()), 1e-12))
    alpha = 0.72 if layer.pulses else 1.0
    axis.stairs(row, np.arange(scene.frames + 1) * step, fill=True, color=ACCENT, alpha=alpha, linewidth=0)
    axis.set_ylim(0, 1.02)
