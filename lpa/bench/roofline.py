"""`lpa bench roofline`: what one layer must cost on this machine, from its memory bandwidth and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .clock import measure, milliseconds

FRAME_RATE = 50
FLOAT = 4  # bytes
PULSES = (12, 36)  # a head's, in equal shares of the three families
LPA_HEADS, KERNEL = 4, 5  # of the lpa layer's defaults
PARTS = ("linear projections", "scores, or gates", "softmax, or element-wise", "weighted sum, or accumulation")
WHOLE = "whole layer"


@dataclass(frozen=True)
class Machine:
    """What was measured: bytes moved, and float32 operations done, a second."""

    bandwidth: float
    flops: float

    def microseconds(self, work: tuple[float, float]) -> float:
        """The roofline: operations or bytes, whichever takes longer."""
        flop, moved = work
        return 1e6 * max(flop / self.flops, moved / self.bandwidth)


@dataclass(frozen=True)
class RooflineRow:
    model: str
    part: str
    us: float  # by the roofline; for `whole layer` the sum of the parts
    measured_us: float | None = None  # of whole layers, in turn
    mflop: float = 0.0
    mb: float = 0.0


Work = dict[str, tuple[float, float]]  # part -> (operations, bytes)


def attention_work(frames: int, dim: int, heads: int, fused: bool) -> Work:
    """Scores are written and read back, as the paper counts them, unless the kernel is fused."""
    x, scores = FLOAT * frames * dim, FLOAT * heads * frames**2
    stored = 0 if fused else scores
    return {
        PARTS[0]: (8 * frames * dim * dim, 8 * x + 4 * FLOAT * dim * dim),
        PARTS[1]: (2 * dim * frames**2, 2 * x + stored),
        PARTS[2]: (5 * heads * frames**2, 2 * stored),
        PARTS[3]: (2 * dim * frames**2, 2 * x + stored),
    }


def lpa_work(frames: int, dim: int, pulses: int) -> Work:
    """The folded layer: its two projections act on pulses, so what is left of them is the gates' own network."""
    count = LPA_HEADS * pulses  # N
    x, gates = FLOAT * frames * dim, FLOAT * frames * count
    hidden = dim // 2
    network = 2 * frames * (dim * hidden + hidden * hidden)
    predict = 2 * frames * (dim * count + dim * LPA_HEADS + KERNEL * dim + hidden * count / 3)
    return {
        PARTS[0]: (network + 4 * count * dim * dim / LPA_HEADS, 2 * x + FLOAT * (2.75 * dim * dim)),
        PARTS[1]: (predict, 3 * x + 2 * gates),
        PARTS[2]: (30 * frames * count, 6 * gates),  # softmax, two sigmoids a gate, tilt, coverage
        PARTS[3]: (4 * frames * count * dim, 2 * x + 2 * gates),
    }


def bench_roofline(
    frames: int = 6000, dim: int = 768, heads: int = 12, rounds: int = 15
) -> tuple[Machine, list[RooflineRow]]:
    """The paper's table for this machine: each part by the roofline, and whole layers measured beside it."""
    import torch

    from .. import mixers
    from .layer import random_attention

    torch.manual_seed(0)
    source = random_attention(dim, heads)
    layers: dict[str, Any] = {"attention": mixers.Attention.from_attention(source)}
    for pulses in PULSES:
        share = pulses // 3
        config = {"aperiodic": share, "periodic": share, "positional": share}
        layers[f"lpa, {pulses} pulses"] = mixers.build("lpa", source, config)
    x = torch.randn(1, frames, dim)
    big = torch.randn(1 << 25)  # 128 MB: beyond any cache
    into = torch.empty_like(big)
    square = torch.randn(2048, 2048)
    runs: dict[str, Callable[[], Any]] = {
        "bandwidth": partial(torch.mul, big, 2.0, out=into),
        "flops": partial(torch.mm, square, square),
        **{name: partial(layer.eval(), x) for name, layer in layers.items()},
    }
    with torch.inference_mode():
        times = measure(runs, rounds)
    # The best round: a limit is what the machine can do.
    machine = Machine(2 * FLOAT * big.numel() / min(times["bandwidth"]), 2 * 2048**3 / min(times["flops"]))
    work = {f"lpa, {p} pulses": lpa_work(frames, dim, p) for p in PULSES}
    rows = roofline_rows(machine, {"attention, scores stored": attention_work(frames, dim, heads, fused=False)}, times)
    rows += roofline_rows(machine, {"attention": attention_work(frames, dim, heads, fused=True), **work}, times)
    return machine, rows


def roofline_rows(machine: Machine, work: dict[str, Work], times: dict[str, list[float]]) -> list[RooflineRow]:
    rows = []
    for model, parts in work.items():
        each = {part: round(machine.microseconds(done), 1) for part, done in parts.items()}
        rows += [
            RooflineRow(model, part, us, None, round(parts[part][0] / 1e6, 1), round(parts[part][1] / 1e6, 2))
            for part, us in each.items()
        ]
        found = None if model not in times else round(1e3 * milliseconds(times[model])[1], 1)
        total = [sum(column) / 1e6 for column in zip(*parts.values(), strict=True)]
        rows.append(
            RooflineRow(model, WHOLE, round(sum(each.values()), 1), found, round(total[0], 1), round(total[1], 2))
        )
    return rows


def memory_rows(
    seconds: tuple[int, ...] = (10, 30, 60, 120, 300, 600, 3600), heads: int = 12
) -> list[dict[str, float]]:
    """The paper's memory figure: MB in one layer of float32 scores (all heads) and of gates, by arithmetic."""
    rows = []
    for s in seconds:
        frames = s * FRAME_RATE
        gates = {f"gates_{p}_mb": round(FLOAT * frames * LPA_HEADS * p / 1e6, 3) for p in PULSES}
        rows.append({"seconds": s, "frames": frames, "scores_mb": round(FLOAT * heads * frames**2 / 1e6, 2), **gates})
    return rows


def roofline_tables(machine: Machine, rows: list[RooflineRow]) -> list[Any]:
    from rich.table import Table

    limits = f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s, measured"
    table = Table(title=f"One layer by the roofline, µs ({limits})")
    models = list(dict.fromkeys(row.model for row in rows))
    table.add_column("part")
    for model in models:
        table.add_column(model, justify="right")
    found = {(row.model, row.part): row for row in rows}
    for part in (*PARTS, WHOLE):
        if part == WHOLE:
            table.add_section()
        table.add_row(part, *(f"{found[model, part].us:,.0f}" for model in models))
    measured = [found[model, WHOLE].measured_us for model in models]
    table.add_row("measured", *("" if us is None else f"{us:,.0f}" for us in measured))
    memory = Table(title="Memory in one layer, MB")
    entries = memory_rows()
    for name in entries[0]:
        memory.add_column(name.removesuffix("_mb").replace("_", ", "), justify="right")
    for entry in entries:
        memory.add_row(*(f"{value:,g}" for value in entry.values()))
    return [table, memory]
