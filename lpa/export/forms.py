"""The mixers in forms that a graph of a dynamic length can hold: no strides, no loops over blocks, no look at a value.

Each stands for what FORMS names, for recordings without padding, and is tested equal to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..families import wav2vec2, whisper
from ..mixers import attention, blocks, frames
from ..mixers.attention import Pyramid
from ..mixers.base import Mixed
from ..mixers.pulses import Positional


def block_count(frames: int, block: int, reach: int) -> int:
    """Rounded up without a negative number: ONNX divides those towards zero."""
    return (frames + reach + block - 1) // block


def key_blocks(x: Tensor, block: int, reach: int) -> Tensor:
    """x (B, T, C) → (B·n, block + 2·reach, C): a gather, since there are no overlapping views."""
    frames = x.shape[1]
    blocks, taps = block_count(frames, block, reach), block + 2 * reach
    padded = F.pad(x, (0, 0, reach, blocks * block + reach - frames))
    index = torch.arange(blocks, device=x.device).unsqueeze(1) * block + torch.arange(taps, device=x.device)
    return padded.index_select(1, index.flatten()).reshape(-1, taps, x.shape[2])


def mix_pyramid(self: Pyramid, x: Tensor, mask: Tensor | None = None, gates=None, skip=None) -> Mixed:
    """All blocks at once: how many there are is not known before the recording is.

    Keys and values apart: side by side, as the layer has them, ONNX Runtime would copy them to cut them.
    """
    frames, block, dim = x.shape[1], self.config.block, x.shape[2]
    blocks = (frames + block - 1) // block
    pad = blocks * block - frames
    cover, bias = self._cover(x.new_ones(1, frames, dtype=torch.bool), pad)
    x = F.pad(x, (0, 0, 0, pad))
    q = F.linear(x, self.qkv[:dim], self.q_bias).reshape(blocks, block, self.heads, -1).transpose(1, 2)
    lists = []
    for weight in self.qkv[dim:].chunk(2):
        near = F.linear(x, weight).reshape(1, blocks, block, dim)  # (1, n, block, D)
        far = [mean / share for mean, share in zip(self._far_means(near), cover, strict=True)]
        lists.append(torch.cat([near, *far], 2).reshape(blocks, len(self.widths), self.heads, -1).transpose(1, 2))
    k, v = lists  # (n, H, P, E) each
    bias = self.scores(bias.reshape(blocks, 1, 1, len(self.widths))).expand(-1, -1, block, -1)
    y = F.scaled_dot_product_attention(q, k, v, bias, scale=self.scale).transpose(1, 2)
    return Mixed(self.out(y.reshape(1, blocks * block, dim)[:, :frames]))


def far_means(self: Pyramid, blocks: Tensor) -> list[Tensor]:
    """All far windows in one tensor (1, n, ·, C): a gather of block means, and one product with constants."""
    n, c = blocks.shape[1], self.config
    side = sum(c.steps) + 1  # blocks either side, those cut in pieces among them
    weights = torch.zeros(2, len(c.steps), 2 * side + 1)
    edge = 1
    for row, step in enumerate(c.steps):
        weights[0, row, side - edge - step : side - edge] = 1 / step
        weights[1, row, side + edge + 1 : side + edge + 1 + step] = 1 / step
        edge += step
    means = F.pad(blocks.mean(2), (0, 0, side, side))  # (1, n + 2·side, C)
    index = torch.arange(n, device=blocks.device).unsqueeze(1) + torch.arange(2 * side + 1, device=blocks.device)
    near = means.index_select(1, index.flatten()).reshape(1, n, 2 * side + 1, means.shape[2])
    before, after = (weights.flatten(0, 1) @ near).split(len(c.steps), 2)
    pieces = F.pad(self.piece_means @ blocks, (0, 0, 0, 0, 1, 1))  # (1, n + 2, 2·count, C)
    count = len(c.pieces)
    return [torch.cat([pieces[:, :n, :count], before, pieces[:, 2:, count:], after], 2)]


def positional_gates(
    self: Positional, frames: int, lengths: Tensor | None, tau: float | None, device: torch.device
) -> Tensor:
    """Computed each time: a kept mask would be one length's."""
    level = self.level(frames, torch.ones(1, frames, device=device).sum(1), device)
    return (level >= 0).float() if tau is None else torch.sigmoid(level / tau)


def no_padding(lengths: Tensor | None, frames: int) -> None:
    """The mask of one recording on its own."""


FORMS: list[tuple[Any, str, Any]] = [  # where, what it is called there, what stands for it
    (wav2vec2, "padding_mask", no_padding),
    (whisper, "padding_mask", no_padding),
    (Pyramid, "_far_means", far_means),
    (Pyramid, "mix", mix_pyramid),
    (attention, "key_blocks", key_blocks),
    (blocks, "block_count", block_count),  # as query_blocks has it
    (frames, "key_blocks", key_blocks),
    (Positional, "gates", positional_gates),
]


@contextmanager
def onnx_forms() -> Iterator[None]:
    """Inside, the mixers compute in these forms, for one recording at a time."""
    kept = [getattr(place, name) for place, name, _ in FORMS]
    try:
        for place, name, form in FORMS:
            setattr(place, name, form)
        yield
    finally:
        for (place, name, _), was in zip(FORMS, kept, strict=True):
            setattr(place, name, was)
