"""`lpa bench layer`: one layer of every mixer against attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import LpaError, choose
from .clock import measure, milliseconds, speedup


@dataclass(frozen=True)
class LayerRow:
    frames: int
    mixer: str
    median_ms: float
    low_ms: float  # quartiles: the spread
    high_ms: float
    speedup: float  # median over the rounds of attention's time / this one's, round by round
    mflop_per_frame: float


# the rows of the layer table: name -> (mixer, what differs from its defaults)
LAYER_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "lpa": ("lpa", {}),
    "lpa-hard": ("lpa", {"hard": True}),
    "anchored": ("anchored", {}),
    "ladder": ("ladder", {}),
    "pyramid": ("pyramid", {}),
    "window": ("window", {}),
    "dynconv": ("dynconv", {}),
    "conv": ("conv", {}),
    "summary": ("summary", {}),
}


def bench_layer(
    frames: tuple[int, ...] = (500, 6000),
    dim: int = 768,
    heads: int = 12,
    rounds: int = 15,
    mixers: tuple[str, ...] = (),
    device: str = "cpu",
    dtype: str = "float32",
    plain: bool = False,
) -> list[LayerRow]:
    """One layer of every mixer against attention on the framework's best kernel, projections included, forward only."""
    import torch

    from .. import mixers as registry
    from ..inspect import attention_mflop

    names = mixers or tuple(LAYER_ROWS)
    for name in names:
        choose(name, LAYER_ROWS, "row")
    if min(frames, default=0) < 1:
        raise LpaError("frames must be positive; try --frames 500 --frames 6000")
    torch.manual_seed(0)
    source = random_attention(dim, heads)
    layers: dict[str, registry.Mixer] = {"attention": registry.Attention.from_attention(source)}
    for name in names:
        mixer, config = LAYER_ROWS[name]
        layers[name] = registry.build(mixer, source, config)
    kind = choose(dtype, {k: getattr(torch, k) for k in ("float32", "bfloat16", "float16")}, "dtype")
    for layer in layers.values():
        layer.to(device, kind).eval()
    sync = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    rows = []
    with torch.inference_mode():
        for count in frames:
            x = torch.randn(1, count, dim, device=device, dtype=kind)
            runs: dict[str, Callable[[], Any]] = {name: partial(layer, x) for name, layer in layers.items()}
            cost = {name: layer.mflop_per_frame() for name, layer in layers.items()}
            cost["attention"] = attention_mflop(dim, count)
            if plain and isinstance(lpa := layers.get("lpa"), registry.LPA):
                runs["lpa-plain"] = partial(lpa.definition, x)
                cost["lpa-plain"] = cost["lpa"] + 4 * dim * dim / 1e6
            seconds = measure(runs, rounds, sync)
            for name, times in seconds.items():
                ratio = speedup(seconds["attention"], times)
                low, median, high = milliseconds(times)
                rows.append(LayerRow(count, name, median, low, high, ratio, round(cost[name], 2)))
    return rows


def random_attention(dim: int, heads: int):
    """An attention with fresh weights, in the shape every family has it."""
    from torch import nn

    attention = nn.Module()
    attention.num_heads = heads  # type: ignore[assignment]
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        attention.add_module(name, nn.Linear(dim, dim))
    return attention


def layer_table(rows: list[LayerRow]):
    from rich.table import Table

    table = Table(title="One layer, forward, against attention in the same run")
    for name in ("frames", "mixer", "median ms", "quartiles", "speed-up", "MFLOP a frame"):
        table.add_column(name, justify="left" if name == "mixer" else "right")
    for last, row in zip([None, *rows], rows, strict=False):
        if last and last.frames != row.frames:
            table.add_section()
        spread = f"{row.low_ms:.1f}–{row.high_ms:.1f}"
        table.add_row(
            str(row.frames),
            row.mixer,
            f"{row.median_ms:.1f}",
            spread,
            f"{row.speedup:.2f}×",
            f"{row.mflop_per_frame:.2f}",
        )
    return table
