"""What networks and mixers in MLX are made of, for one recording: x is (T, C), in float32 between the products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx

from .weights import Weights


@dataclass
class Flow:
    """What the layers of one pass hand on."""

    gates: mx.array | None = None  # (N,) time-mean of the gates of the last layer that had any
    outputs: dict[int, mx.array] = field(default_factory=dict)  # mixers' outputs by layer
    skip: mx.array | None = None  # the one that the mixer at work may add


class Mixer(ABC):
    """Mixes frames over time: x (T, D) → (T, D)."""

    settings: ClassVar[frozenset[str]] = frozenset()  # the fields of its config in a plan

    @abstractmethod
    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]): ...

    @abstractmethod
    def __call__(self, x: mx.array, flow: Flow) -> mx.array: ...


def product(x: mx.array, matrix: mx.array) -> mx.array:
    """x @ matrix in the matrix's precision (float16 products add up in float32), given back in float32."""
    return (x.astype(matrix.dtype) @ matrix).astype(mx.float32)


def gelu(x: mx.array) -> mx.array:
    return x * (1 + mx.erf(x * 0.5**0.5)) / 2


class Linear:
    def __init__(self, weights: Weights, name: str, rows: int, columns: int, bias: bool = True):
        self.weight = weights.matrix(f"{name}.weight", rows, columns)
        self.bias = weights.exact(f"{name}.bias", rows) if bias else mx.zeros(rows)

    def __call__(self, x: mx.array) -> mx.array:
        return product(x, self.weight.T) + self.bias


class LayerNorm:
    def __init__(self, weights: Weights, name: str, dim: int, eps: float = 1e-5):
        self.weight, self.bias = weights.exact(f"{name}.weight", dim), weights.exact(f"{name}.bias", dim)
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)


class Conv:
    """A convolution over time, (T, C) → (T', C'); kernel (C', C / groups, taps) as torch stores it."""

    def __init__(self, kernel: mx.array, bias: mx.array | None, *, stride: int = 1, padding: int = 0, groups: int = 1):
        self.kernel, self.bias = mx.contiguous(kernel.swapaxes(1, 2)), bias  # (C', taps, C / groups)
        self.stride, self.padding, self.groups = stride, padding, groups

    def __call__(self, x: mx.array) -> mx.array:
        x = x[None].astype(self.kernel.dtype)
        y = mx.conv1d(x, self.kernel, self.stride, self.padding, groups=self.groups)[0].astype(mx.float32)
        return y if self.bias is None else y + self.bias


# --- blocks of frames: with them bounded reach is a few dense products


def block_count(frames: int, block: int) -> int:
    return -(-frames // block)


def query_blocks(x: mx.array, block: int) -> mx.array:
    """x (T, …) → (n, block, …), blank at the end."""
    blocks = block_count(x.shape[0], block)
    padding = [(0, blocks * block - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return mx.pad(x, padding).reshape(blocks, block, *x.shape[1:])


def key_blocks(x: mx.array, block: int, reach: int) -> mx.array:
    """x (T, C) → (n, block + 2·reach, C): blocks with `reach` frames either side, blank outside the recording."""
    frames, width = x.shape
    blocks = block_count(frames, block)
    padded = mx.pad(x, [(reach, blocks * block + reach - frames), (0, 0)])
    return mx.as_strided(padded, (blocks, block + 2 * reach, width), (block * width, width, 1))
