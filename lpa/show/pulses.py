"""A layer's pulses in one recording: where each lies, how wide it is, how much is taken through it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .legend import PULSES

FEW = 5  # lines of pulses that have room for text under each
LANES = 6  # lines of pulses of one kind that are drawn; the paper's layers have twelve pulses in every head


@dataclass(frozen=True, eq=False)  # each is itself: tensors have no one answer to whether they are equal
class Pulse:
    """One window: over the recording, the same for every moment, or going along with the moment."""

    kind: str  # one of legend.PULSES
    used: Tensor  # (T,): how much frame t takes through it
    runs: list[tuple[float, float]]  # frames [start, end) where its gate is more than half open; empty if it goes along
    edges: Tensor | None = None  # (T, 2): where it starts and ends for frame t, if it goes along

    def at(self, frame: int) -> list[tuple[float, float]]:
        """Where it lies for a frame."""
        if self.edges is None:
            return self.runs
        start, end = self.edges[frame].tolist()
        return [(start, end)] if start < end else []

    @property
    def width(self) -> float:
        """Frames of its longest run; of one that goes along, where it is widest."""
        if self.edges is None:
            return max((end - start for start, end in self.runs), default=0.0)
        return max(0.0, float(self.edges.diff(dim=1).max()))

    @property
    def pace(self) -> float | None:
        """Frames from one start to the next, of one that repeats."""
        if self.kind != "periodic" or len(self.runs) < 3:
            return None
        return (self.runs[-1][0] - self.runs[1][0]) / (len(self.runs) - 2)  # the first may be cut by the start

    def apart(self, other: Pulse) -> bool:
        """Whether the two never overlap, so that one line holds both. They are of one kind."""
        if self.edges is None or other.edges is None:
            return all(b <= c or d <= a for a, b in self.runs for c, d in other.runs)
        (a, b), (c, d) = self.edges.unbind(1), other.edges.unbind(1)
        return bool(((b <= c) | (d <= a) | (a >= b) | (c >= d)).all())


def lay_out(pulses: list[Pulse]) -> list[list[Pulse]]:
    """Lines to draw, kind by kind, narrow ones first. Those that never overlap share one; the strongest find room."""
    lines: list[list[Pulse]] = []
    for kind in PULSES:
        of_kind = [pulse for pulse in pulses if pulse.kind == kind and pulse.width > 0]
        made: list[list[Pulse]] = []
        for pulse in sorted(of_kind, key=lambda p: -float(p.used.mean())):
            line = next((line for line in made if all(map(pulse.apart, line))), None)
            if line is not None:
                line.append(pulse)
            elif len(made) < LANES:
                made.append([pulse])
        lines += sorted(made, key=lambda line: max(pulse.width for pulse in line))
    return lines


def text_rows(lines: list[list[Pulse]]) -> list[bool]:
    """Of every line, whether a row of text is under it: of few lines under each, of more under the last of a kind."""
    kinds = [line[0].kind for line in lines]
    return [len(kinds) <= FEW or kind not in kinds[i + 1 :] for i, kind in enumerate(kinds)]


def whole_reach(reach: tuple[int, int], frames: int) -> Pulse:
    """All that a layer of one bounded window sees, as a pulse."""
    t = torch.arange(frames)
    return Pulse("window", torch.ones(frames), [], within(t - reach[0], t + reach[1] + 1))


def going_along(kind: str, lo: Tensor, hi: Tensor, weight: Tensor) -> list[Pulse]:
    """Pulses anchored to the frame: edges (1, T or 1, H or 1, P) counted from it, weight (1, T, H, P)."""
    _, frames, heads, count = weight.shape
    t = torch.arange(frames)
    used = weight[0].abs() / heads  # (T, H, P)
    if lo.shape[2] == 1:
        used, heads = used.sum(1, keepdim=True), 1
    low, high = (edge[0].expand(frames, heads, count) for edge in (lo, hi))
    return [
        Pulse(kind, used[:, h, p], [], within(t + low[:, h, p], t + high[:, h, p]))
        for h in range(heads)
        for p in range(count)
    ]


def over_recording(kinds: list[str], gate: Tensor, weight: Tensor) -> list[Pulse]:
    """Every head's pulses anchored to the recording: gates and weights (T, H, P), a kind for each of P."""
    heads = gate.shape[1]
    return [
        Pulse(kind, weight[:, h, p].abs() / heads, runs(gate[:, h, p] > 0.5))
        for h in range(heads)
        for p, kind in enumerate(kinds)
    ]


def within(start: Tensor, end: Tensor) -> Tensor:
    """Starts and ends (T,) as (T, 2) of what is in the recording."""
    return torch.stack([start, end], -1).float().clamp(0, len(start))


def runs(on: Tensor) -> list[tuple[float, float]]:
    """[start, end) of every stretch of true."""
    edges = torch.diff(on.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))
