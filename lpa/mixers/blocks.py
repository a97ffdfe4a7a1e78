"""Overlapping blocks of frames as views: with them bounded reach is a few dense products, and no n×n matrix."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def block_count(frames: int, block: int, reach: int) -> int:
    """Blocks laid down for each sample: enough that `reach` blank frames part it from the next sample."""
    return -(-(frames + reach) // block)


def query_blocks(x: Tensor, block: int, reach: int) -> Tensor:
    """x (B, T, C) → (B·n, block, C): its own frames, block by block, blank at the end."""
    blocks = block_count(x.shape[1], block, reach)
    return F.pad(x, (0, 0, 0, blocks * block - x.shape[1])).reshape(-1, block, x.shape[2])


def key_blocks(x: Tensor, block: int, reach: int) -> Tensor:
    """x (B, T, C) → (B·n, block + 2·reach, C): blocks with `reach` frames either side, views of one copy of x.

    Samples lie one behind the other, `reach` blank frames before each, so that all blocks of a batch have one stride.
    """
    frames, width = x.shape[1:]
    blank = x.new_zeros(block_count(frames, block, reach) * block - frames, width)  # what parts two samples
    pieces = [blank[:reach]]
    for sample in x:
        pieces += [sample, blank]
    flat = torch.cat([*pieces, blank[:reach]])  # one copy, nothing written twice
    return flat.unfold(0, block + 2 * reach, block).transpose(1, 2)


def unblock(y: Tensor, batch: int, frames: int) -> Tensor:
    """(B·n, block, C) → (B, T, C): the way back from query_blocks."""
    return y.reshape(batch, -1, y.shape[-1])[:, :frames]


def prefix_sum(x: Tensor) -> Tensor:
    """(B, T, C) → (B, T + 1, C) in float64 (float32 is percents off at an hour): sum of the frames before."""
    return F.pad(x.double().cumsum(1), (0, 0, 1, 0))


def window_means(x: Tensor, valid: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Means over the frames [lo, hi) of each window, by definition: two reads of a prefix sum.

    x (B, T, C), blank where padded; valid (B, T); lo, hi (T, P) whole frames, possibly outside the recording.
    Returns means (B, T, P, C) in float64 and how many frames each is the mean of (B, T, P).
    """
    lo, hi = lo.clamp(0, x.shape[1]), hi.clamp(0, x.shape[1])
    sums, counted = prefix_sum(x), prefix_sum(valid.unsqueeze(-1))
    counts = (counted[:, hi] - counted[:, lo]).squeeze(-1)
    return (sums[:, hi] - sums[:, lo]) / counts.clamp(min=1).unsqueeze(-1), counts


def valid_frames(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T) bool: the mask, or all true where there is none."""
    return x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask


def remember(store: dict, key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` gives, made once for a key: for what depends on a recording's length alone. Two lengths are kept."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return make()  # in a graph the length is not a number yet
    if key not in store:
        if len(store) >= 2:
            store.clear()
        with torch.inference_mode(False), torch.no_grad():  # of use in training too, whoever asked first
            store[key] = make()
    return store[key]
