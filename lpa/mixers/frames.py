"""The gate families anchored to the frame: anchored pulses (offset and width predicted) and the ladder (both fixed).

Around frame t pulse p averages the values in [t + lo, t + hi), where frame s fills [s, s + 1). The definition reads an
interpolated prefix sum at both edges. The band form writes the same weights as rows over the bounded neighbourhood and
multiplies block by block: dense products, no gathers of values, no loop over pulses.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import block_count, key_blocks, prefix_sum


def rungs(count: int, reach: int) -> list[tuple[int, int]]:
    """`count` windows [lo, hi) around a frame: the frame itself, then ever wider ones on both sides, up to the reach.

    An even count adds the whole reach as its last window.
    """
    sides = (count - 1) // 2
    growth = reach ** (1 / max(1, sides))
    edges = [1]
    for i in range(1, sides + 1):
        edges.append(max(edges[-1] + 1, round(growth**i) + 1))
    windows = [(0, 1)]
    for near, far in pairwise(edges):
        windows += [(near, min(far, reach + 1)), (1 - min(far, reach + 1), 1 - near)]
    if count % 2 == 0:
        windows.append((-reach, reach + 1))
    return windows[:count]


class Anchored(nn.Module):
    """Windows whose offset and half-width follow from the frame they belong to, never outside the reach."""

    def __init__(self, dim: int, heads: int, count: int, reach: int):
        super().__init__()
        self.heads, self.count, self.reach = heads, count, reach
        self.place = nn.Linear(dim, 2 * heads * count)
        lo, hi = torch.tensor(rungs(count, reach), dtype=torch.float32).T
        half = ((hi - lo - 1) / 2).clamp(0.02 * reach, 0.9 * reach)
        offset = ((lo + hi - 1) / 2 / (reach - half)).clamp(-0.98, 0.98)
        start = torch.stack([torch.atanh(offset), torch.logit(half / reach)])  # (2, P)
        with torch.no_grad():
            self.place.weight.zero_()
            self.place.bias.copy_(start[:, None].expand(-1, heads, -1).flatten())

    def edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """lo, hi (B, T, H, P) in float32, counted from the frame itself; −reach ≤ lo < hi ≤ reach + 1."""
        raw = self.place(x).float().unflatten(-1, (2, self.heads, self.count))
        half = self.reach * raw[..., 1, :, :].sigmoid()
        offset = (self.reach - half) * raw[..., 0, :, :].tanh()
        return offset - half, offset + half + 1


class Ladder(nn.Module):
    """Windows of fixed offset and width. Only their weights follow the content."""

    lo: Tensor
    hi: Tensor

    def __init__(self, windows: list[tuple[int, int]]):
        super().__init__()
        lo, hi = torch.tensor(windows).T
        self.register_buffer("lo", lo.contiguous(), persistent=False)
        self.register_buffer("hi", hi.contiguous(), persistent=False)

    def edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As whole numbers in float32, (1, 1, 1, P): the same for every frame and head."""
        return self.lo.float().view(1, 1, 1, -1), self.hi.float().view(1, 1, 1, -1)


def read_prefix(total: Tensor, edge: Tensor) -> Tensor:
    """An interpolated prefix sum (B, T + 1, …) at t + edge (B, T, …, P), by linear interpolation between frames.

    The whole part of an edge moves the index and only its fraction is rounded, so that length costs no precision.
    total (B, T + 1) gives (B, T, H, P); total (B, T + 1, H, E) gives (B, T, H, P, E).
    """
    batch, frames = edge.shape[:2]
    whole = edge.floor()
    t = torch.arange(frames, device=edge.device).view(1, -1, 1, 1)
    index = whole.long() + t
    part = (edge - whole).to(total.dtype)
    inside = (index >= 0) & (index < frames)  # beyond the ends the sum is flat: nothing to interpolate
    low, high = index.clamp(0, frames), (index + 1).clamp(0, frames)
    row = torch.arange(batch, device=edge.device).view(-1, 1, 1, 1)
    part = torch.where(inside, part, 0)
    if total.dim() == 2:
        a, b = total[row, low], total[row, high]
        return a + part * (b - a)
    head = torch.arange(total.shape[2], device=edge.device).view(1, 1, -1, 1)
    a, b = total[row, low, head], total[row, high, head]
    return a + part.unsqueeze(-1) * (b - a)


def covered(valid: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """How many of the sample's own frames each window holds, at least one: (B, T, H, P)."""
    counted = F.pad(valid.double().cumsum(1), (1, 0))
    shape = (valid.shape[0], valid.shape[1], *lo.shape[2:])
    count = read_prefix(counted, hi.expand(shape)) - read_prefix(counted, lo.expand(shape))
    return count.clamp(min=1).float()


def pool_frames(v: Tensor, lo: Tensor, hi: Tensor, weight: Tensor) -> Tensor:
    """Σ_p weight · (sum of v over the window), by definition. v (B, T, H, E), weight (B, T, H, P) → (B, T, H, E)."""
    total = prefix_sum(v.flatten(2)).unflatten(2, v.shape[2:])
    lo, hi = (edge.expand(weight.shape) for edge in (lo, hi))
    sums = read_prefix(total, hi) - read_prefix(total, lo)  # (B, T, H, P, E)
    return (weight.unsqueeze(-1) * sums).sum(3).to(v.dtype)


def pool_band(
    v: Tensor, windows: list[tuple[Anchored | Ladder, Tensor, Tensor, Tensor]], reach: int, block: int
) -> Tensor:
    """The same numbers block by block. windows: (family, lo, hi, weight) for each family present."""
    batch, frames, heads, _ = v.shape
    values = key_blocks(v.transpose(1, 2).flatten(0, 1), block, reach)  # (B·H·n, block + 2·reach, E)
    taps = block + 2 * reach
    band = None
    for family, lo, hi, weight in windows:
        rows = spread_fixed if isinstance(family, Ladder) else spread_edges
        part = rows(lo, hi, weight, reach, block, taps)  # (B·H·n, block, taps)
        band = part if band is None else band + part
    assert band is not None
    y = torch.bmm(band.to(v.dtype), values)  # (B·H·n, block, E)
    return y.reshape(batch, heads, -1, y.shape[-1])[:, :, :frames].transpose(1, 2)


def head_blocks(x: Tensor, block: int, reach: int) -> Tensor:
    """(B, T, H, P) → (B·H, n, block, P), blank at the end, to match key_blocks of (B·H, T, E)."""
    x = x.transpose(1, 2).flatten(0, 1)
    rows = block_count(x.shape[1], block, reach) * block
    return F.pad(x, (0, 0, 0, rows - x.shape[1])).unflatten(1, (-1, block))


def spread_fixed(lo: Tensor, hi: Tensor, weight: Tensor, reach: int, block: int, taps: int) -> Tensor:
    """Rows of a band of fixed windows: a product with their indicators, shifted by the frame's place in its block."""
    weight = head_blocks(weight, block, reach).flatten(0, 1).transpose(0, 1)  # (block, B·H·n, P)
    j = torch.arange(taps, device=weight.device).view(1, 1, -1)
    i = torch.arange(block, device=weight.device).view(-1, 1, 1) + reach
    boxes = ((j >= i + lo.view(1, -1, 1)) & (j < i + hi.view(1, -1, 1))).to(weight.dtype)  # (block, P, taps)
    return torch.bmm(weight, boxes).transpose(0, 1)


def spread_edges(lo: Tensor, hi: Tensor, weight: Tensor, reach: int, block: int, taps: int) -> Tensor:
    """Rows of a band of moving windows: a step up and one down at each window's edges, then a running sum over taps."""
    lo, hi, weight = (head_blocks(a, block, reach) for a in (lo, hi, weight))  # (B·H, n, block, P)
    at = torch.arange(block, device=lo.device).view(1, 1, -1, 1) + reach
    steps = lo.new_zeros(*lo.shape[:3], taps + 2)
    for edge, sign in ((lo, 1.0), (hi, -1.0)):
        whole = edge.floor()
        index, part = whole.long() + at, edge - whole
        steps = steps.scatter_add(3, index, sign * weight * (1 - part))
        steps = steps.scatter_add(3, index + 1, sign * weight * part)
    tap = torch.arange(taps, device=lo.device) - torch.arange(block, device=lo.device).unsqueeze(1)
    inside = (tap >= 0) & (tap <= 2 * reach)  # past the last edge a running sum leaves its rounding; it may not leak
    return (steps.cumsum(3)[..., :taps] * inside).flatten(0, 1)
