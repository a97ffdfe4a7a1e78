"""Attention and its stand-ins in MLX, for one recording: x (T, D) → (T, D), the numbers of lpa.mixers in torch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...errors import LpaError, choose
from ...windows import PACE, pyramid_widths
from .layers import Conv, Flow, Linear, Mixer, gelu, key_blocks, product, query_blocks
from .pulses import BLOCK, LPA, band, ladder_rows
from .weights import Weights

NEVER = -3e4  # a score no softmax will ever choose; finite in float16 too
AT_ONCE = 256  # blocks whose keys are laid out together: memory that does not grow with the recording


def attend(q: mx.array, k: mx.array, v: mx.array, heads: int, dtype: mx.Dtype, mask: mx.array | None) -> mx.array:
    """q (N, L, D), k and v (N, S, D), mask broadcastable to (N, H, L, S) → (N, L, D), by the fused kernel."""
    width = q.shape[2] // heads

    def split(a: mx.array) -> mx.array:
        return a.astype(dtype).reshape(*a.shape[:2], heads, width).swapaxes(1, 2)

    if mask is not None and mask.dtype != mx.bool_:
        mask = mask.astype(dtype)
    y = mx.fast.scaled_dot_product_attention(split(q), split(k), split(v), scale=width**-0.5, mask=mask)
    return y.swapaxes(1, 2).reshape(q.shape).astype(mx.float32)


class Attention(Mixer):
    """Full attention, where it was left in."""

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        self.heads = heads
        self.q, self.v = Linear(weights, "q_proj", dim, dim), Linear(weights, "v_proj", dim, dim)
        self.k = Linear(weights, "k_proj", dim, dim, bias=weights.has("k_proj.bias"))  # Whisper's has none
        self.out = Linear(weights, "out_proj", dim, dim)

    def __call__(self, x: mx.array, flow: Flow) -> mx.array:
        q, k, v = (layer(x)[None] for layer in (self.q, self.k, self.v))
        return self.out(attend(q, k, v, self.heads, self.q.weight.dtype, None)[0])


class QueryMixer(Mixer):
    """What the bounded forms of attention share: queries, keys and values side by side, no bias but the queries'."""

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        self.heads, self.config = heads, config
        self.qkv, self.q_bias = weights.matrix("qkv", 3 * dim, dim), weights.exact("q_bias", dim)
        self.out = Linear(weights, "out", dim, dim)

    def project(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x (T, D) → queries (T, D), keys and values (T, 2D)."""
        dim = x.shape[1]
        return product(x, self.qkv[:dim].T) + self.q_bias, product(x, self.qkv[dim:].T)

    def attend(self, q: mx.array, kv: mx.array, mask: mx.array) -> mx.array:
        """q (n, L, D), kv (n, S, 2D), mask (n, 1, ·, S) → (n, L, D)."""
        k, v = mx.split(kv, 2, -1)
        return attend(q, k, v, self.heads, self.qkv.dtype, mask)

    def gather(self, pieces: list[mx.array], frames: int) -> mx.array:
        """Blocks (n, block, D) → (T, D), projected."""
        y = mx.concatenate(pieces)
        return self.out(y.reshape(-1, y.shape[-1])[:frames])


class Window(QueryMixer):
    """Sliding-window attention."""

    settings = frozenset({"side", "block", "right", "places"})

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        super().__init__(weights, dim, heads, config)
        self.places = PACE * weights.exact("places", heads, 2 * config["side"] + 1) if config["places"] else None

    def __call__(self, x: mx.array, flow: Flow) -> mx.array:
        side, block = self.config["side"], self.config["block"]
        q, kv = self.project(x)
        q, kv = query_blocks(q, block), key_blocks(kv, block, side)
        offset = mx.arange(block + 2 * side) - mx.arange(block)[:, None]
        right = side if self.config["right"] is None else min(side, self.config["right"])
        near = (offset >= 0) & (offset <= side + right)  # (block, block + 2·side)
        own = key_blocks(mx.ones((len(x), 1)), block, side)[..., 0] > 0  # (n, block + 2·side)
        seen = near & own[:, None, None]  # (n, 1, block, block + 2·side)
        if self.places is not None:
            seen = mx.where(seen, self.places[:, mx.clip(offset, 0, 2 * side)], NEVER)
        pieces = []
        for at in range(0, len(q), AT_ONCE):
            some = slice(at, at + AT_ONCE)
            pieces.append(self.attend(q[some], kv[some], seen[some]))
            mx.eval(pieces)
        return self.gather(pieces, len(x))


class Pyramid(QueryMixer):
    """Queries against the pooled keys of windows: fine near the frame, coarse further out."""

    settings = frozenset({"block", "pieces", "steps", "right", "places"})

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        super().__init__(weights, dim, heads, config)
        self.block, self.pieces, self.steps = config["block"], list(config["pieces"]), list(config["steps"])
        far = self.pieces + [self.block * step for step in self.steps]
        self.widths = mx.array([1.0] * self.block + [float(width) for width in far + far])
        rows, edge = [], 0
        for width in self.pieces:
            rows.append([1 / width if edge <= j < edge + width else 0.0 for j in range(self.block)])
            edge += width
        self.cut = mx.array([row[::-1] for row in rows] + rows)  # (2·count, block): the block before, the block after
        ends = pyramid_widths(config)[1:]  # of the windows after a block, counted from its end
        right = ends[-1] if config["right"] is None else config["right"]
        places = (heads, self.block, len(self.widths))
        self.places = PACE * weights.exact("places", *places) if config["places"] else 0.0
        self.seen = mx.array([True] * (self.block + len(far)) + [end <= right for end in ends])  # (P,)

    def __call__(self, x: mx.array, flow: Flow) -> mx.array:
        q, kv = self.project(x)
        q, near = query_blocks(q, self.block), query_blocks(kv, self.block)  # (n, block, ·D)
        own = query_blocks(mx.ones((len(x), 1)), self.block)
        cover = self.far_means(own)  # (n, far, 1): the share of each window that is in the recording
        counts = mx.concatenate([own, cover], 1)[..., 0] * self.widths  # (n, P)
        bias = mx.where((counts > 0.5) & self.seen, mx.log(mx.maximum(counts, 1)), NEVER)[:, None, None]
        far = self.far_means(near) / mx.maximum(cover, 1e-6)
        pieces = []
        for at in range(0, len(q), AT_ONCE):
            some = slice(at, at + AT_ONCE)
            keys = mx.concatenate([near[some], far[some]], 1)  # (n', P, 2D)
            pieces.append(self.attend(q[some], keys, bias[some] + self.places))
            mx.eval(pieces)
        return self.gather(pieces, len(x))

    def far_means(self, blocks: mx.array) -> mx.array:
        """blocks (n, block, C) → means of every block's far windows (n, far, C), those before it and those after."""
        n, count, span = len(blocks), len(self.pieces), sum(self.steps)
        pieces = mx.pad(self.cut @ blocks, [(1, 1), (0, 0), (0, 0)])  # (n + 2, 2·count, C)
        slid = {1: mx.pad(blocks.mean(1), [(span + 1, span + 1), (0, 0)])}  # (n + 2·span + 2, C)
        left, right = [pieces[:n, :count]], [pieces[2:, count:]]
        edge, start = 1, span + 1  # blocks up to the next window; where block 0 lies in the padded ones
        for step in self.steps:
            means = sliding_means(slid, step)[:, None]
            left.append(means[start - edge - step :][:n])
            right.append(means[start + 1 + edge :][:n])
            edge += step
        return mx.concatenate(left + right, 1)


def sliding_means(known: dict[int, mx.array], width: int) -> mx.array:
    """Mean over `width` neighbours of known[1] (n, C), from means over about half as many: no long sums to round."""
    if width not in known:
        half = width // 2
        a, b = sliding_means(known, half), sliding_means(known, width - half)
        a, b = a[: len(b) - half], b[half:]
        known[width] = a + (b - a) * ((width - half) / width)
    return known[width]


class FixedConv(Mixer):
    """Values, a depthwise convolution over time, the output projection."""

    settings = frozenset({"taps"})

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        taps = config["taps"]
        self.v, self.out = Linear(weights, "v", dim, dim), Linear(weights, "out", dim, dim)
        self.convolution = Conv(weights.matrix("kernel", dim, taps)[:, None], None, padding=taps // 2, groups=dim)

    def __call__(self, x: mx.array, flow: Flow) -> mx.array:
        return self.out(self.convolution(self.v(x)))


class DynConv(Mixer):
    """A convolution whose taps are a softmax predicted from the frame in their middle."""

    settings = frozenset({"heads", "taps"})

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        self.heads, self.side = config["heads"], config["taps"] // 2
        self.value, self.out = Linear(weights, "value", dim, dim), Linear(weights, "out", dim, dim)
        self.taps = Linear(weights, "taps", config["heads"] * config["taps"], dim)

    def __call__(self, x: mx.array, flow: Flow) -> mx.array:
        weight = mx.softmax(self.taps(x).reshape(len(x), self.heads, -1), axis=-1, precise=True)  # (T, H, taps)
        windows = [(j, j + 1) for j in range(-self.side, self.side + 1)]
        blocks = query_blocks(weight, BLOCK)

        def rows(some: slice) -> mx.array:
            return ladder_rows(blocks[some], windows, self.side)

        return self.out(band(self.value(x), self.heads, self.side, self.value.weight.dtype, rows))


class Summary(Mixer):
    """SummaryMixing: what a frame says, and the mean of what all say."""

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        self.local, self.summary = Linear(weights, "local", dim, dim), Linear(weights, "summary", dim, dim)
        self.out = Linear(weights, "out", dim, dim)
        self.out_summary = Linear(weights, "out_summary", dim, dim, bias=False)

    def __call__(self, x: mx.array, flow: Flow) -> mx.array:
        return self.out(gelu(self.local(x))) + self.out_summary(gelu(self.summary(x)).mean(0))


class NoMixer(Mixer):
    """One vector for every frame."""

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        self.bias = weights.exact("bias", dim)

    def __call__(self, x: mx.array, flow: Flow) -> mx.array:
        return mx.broadcast_to(self.bias, x.shape)


MIXERS: dict[str, type[Mixer]] = {
    "anchored": LPA,
    "conv": FixedConv,
    "dynconv": DynConv,
    "ladder": LPA,
    "lpa": LPA,
    "none": NoMixer,
    "pyramid": Pyramid,
    "summary": Summary,
    "window": Window,
}


def build(name: str, weights: Weights, dim: int, heads: int, config: dict[str, Any]) -> Mixer:
    """A mixer of a plan, which spells out every setting."""
    kind = choose(name, MIXERS, "mixer in MLX")
    config = {**dict.fromkeys(kind.settings & {"right", "places"}), **config}  # some plans are older than these
    odd = sorted(set(config) ^ kind.settings)
    if odd:
        raise LpaError(f"plan.json: {name} is missing a setting or has one that MLX does not know: {', '.join(odd)}")
    return kind(weights, dim, heads, config)
