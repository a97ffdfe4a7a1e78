"""Learnable Pulse Accumulation in MLX: lpa, anchored and ladder, in the folded form, for one recording.

The numbers of lpa.mixers.lpa, pulses and frames in torch. One number a pulse (centre, width, period, phase) is float64
here too; graphics processors have none, so that arithmetic is the CPU's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from ...windows import rungs
from .layers import Conv, Flow, Linear, Mixer, gelu, key_blocks, product, query_blocks
from .weights import Weights

EPS = 1e-6
BLOCK = 64  # frames of a band computed together
AT_ONCE = 32  # blocks whose rows are laid out together: memory that does not grow with the recording


# --- gates anchored to the recording, each (T, N)


class Aperiodic:
    """A window at the place the pulse's query finds."""

    def __init__(self, weights: Weights, dim: int, pulses: int, kernel: int, context: int):
        inner = dim // 2
        taps = weights.matrix("kernel", dim, kernel)
        self.convolution = Conv(taps[:, None], None, groups=dim)
        self.first, self.second = Linear(weights, "mlp.0", inner, dim), Linear(weights, "mlp.2", inner, inner)
        self.query, self.width = weights.exact("query", pulses, inner), weights.exact("width", pulses, inner)
        self.width_bias = weights.exact("width_bias", pulses)
        self.context = weights.matrix("context.weight", inner, context) if context else None
        self.before = kernel - 1  # frames the convolution sees before each

    def describe(self, x: mx.array, passed: mx.array | None) -> mx.array:
        """(T, D/2): causal convolution, MLP, and what the layer before passed on."""
        h = self.second(gelu(self.first(self.convolution(mx.pad(x, [(self.before, 0), (0, 0)])))))
        if self.context is not None and passed is not None:
            wanted = self.context.shape[1]  # layers may differ in their number of pulses
            passed = mx.pad(passed, (0, max(0, wanted - len(passed))))[:wanted]
            h = h + product(passed, self.context.T)
        return h

    def gates(self, x: mx.array, passed: mx.array | None, tau: float | None) -> tuple[mx.array, mx.array]:
        """Gates, and where in its window each frame lies: −1 at the start, 1 at the end."""
        h = self.describe(x, passed)
        scores = h @ self.query.T  # (T, N)
        anchor = mx.argmax(scores, axis=0).astype(mx.int32)
        offset = mx.arange(len(x), dtype=mx.int32)[:, None] - anchor
        shift: mx.array | float = 0.0
        if tau is None:
            found = h[anchor]  # (N, D/2)
        else:
            share = mx.softmax(scores / tau, axis=0, precise=True)
            found = share.T @ h
            with mx.stream(mx.cpu):
                exact = share.astype(mx.float64)
                shift = ((exact * offset).sum(0) / exact.sum(0)).astype(mx.float32)
        with mx.stream(mx.cpu):
            width = (found.astype(mx.float64) * self.width).sum(-1) + self.width_bias
            half = softplus(width).astype(mx.float32)
        away = offset.astype(mx.float32) - shift
        place = mx.clip(away / half, -1, 1)
        if tau is None:
            return (mx.abs(away) <= half).astype(mx.float32), place
        return mx.sigmoid((away + half) / tau) * mx.sigmoid((half - away) / tau), place


class Periodic:
    """A window that repeats: period, phase and duty cycle from the recording's mean frame."""

    def __init__(self, weights: Weights, dim: int, pulses: int):
        self.weight = weights.exact("shape.weight", 3 * pulses, dim)
        self.bias = weights.exact("shape.bias", 3 * pulses)

    def gates(self, x: mx.array, tau: float | None) -> mx.array:
        with mx.stream(mx.cpu):
            mean = x.sum(0).astype(mx.float64) / len(x)
            raw = (self.weight * mean).sum(1) + self.bias
            period, phase, duty = mx.split(raw, 3)
            period, duty = 2 ** (softplus(period) + 2), mx.sigmoid(duty)
            t = mx.arange(len(x), dtype=mx.int32).astype(mx.float64)[:, None]
            cycles = t / period - phase / (2 * math.pi)  # (T, N)
            cycles = cycles - mx.round(cycles)  # in [−½, ½]
            if tau is None:
                return (mx.abs(cycles) <= duty / 2).astype(mx.float32)
            cycles, level = cycles.astype(mx.float32), mx.cos(math.pi * duty).astype(mx.float32)
        return mx.sigmoid((mx.cos(2 * math.pi * cycles) - level) / tau)


class Positional:
    """A window at a fixed place of the recording: a sum of sines and cosines of t / (n − 1)."""

    def __init__(self, weights: Weights, pulses: int, bases: int):
        self.weight = weights.exact("waves.weight", pulses, 2 * bases)
        self.bias = weights.exact("waves.bias", pulses)
        self.bases = bases

    def gates(self, frames: int, tau: float | None) -> mx.array:
        t = mx.arange(frames).astype(mx.float32) / max(1, frames - 1)
        angle = (2 * math.pi * t)[:, None] * mx.arange(1, self.bases + 1)
        level = mx.concatenate([mx.sin(angle), mx.cos(angle)], 1) @ self.weight.T + self.bias  # (T, N)
        return (level >= 0).astype(mx.float32) if tau is None else mx.sigmoid(level / tau)


def softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, mx.zeros_like(x))


# --- windows anchored to the frame: each frame's weights over its neighbourhood, as rows of a band


def sizes(frames: int, lo: mx.array, hi: mx.array) -> mx.array:
    """How many of the recording's frames each window [t + lo, t + hi) holds, at least one: (T, H, P)."""
    t = mx.arange(frames).astype(mx.float32)[:, None, None]
    return mx.maximum(mx.clip(hi, -t, frames - t) - mx.clip(lo, -t, frames - t), 1)


def ladder_rows(weight: mx.array, windows: list[tuple[int, int]], reach: int) -> mx.array:
    """weight (n, BLOCK, H, P) of fixed windows → rows (n, H, BLOCK, taps): one product with the windows' indicators."""
    lo, hi = (mx.array(edge)[:, None] for edge in zip(*windows, strict=True))
    tap = mx.arange(BLOCK + 2 * reach) - mx.arange(BLOCK)[:, None, None] - reach
    boxes = ((tap >= lo) & (tap < hi)).astype(mx.float32)  # (BLOCK, P, taps)
    n, _, heads, pulses = weight.shape
    rows = weight.swapaxes(0, 1).reshape(BLOCK, n * heads, pulses) @ boxes
    return rows.reshape(BLOCK, n, heads, -1).transpose(1, 2, 0, 3)


def anchored_rows(weight: mx.array, lo: mx.array, hi: mx.array, reach: int) -> mx.array:
    """weight, lo, hi (n, BLOCK, H, P) → rows (n, H, BLOCK, taps): how much of each tap's frame lies in each window."""
    weight, lo, hi = (a[..., None] for a in (weight, lo, hi))
    start = (mx.arange(BLOCK + 2 * reach) - mx.arange(BLOCK)[:, None] - reach).astype(mx.float32)[:, None]
    rows = mx.zeros((*weight.shape[:3], BLOCK + 2 * reach))  # (n, BLOCK, H, taps)
    for p in range(weight.shape[3]):  # one by one: all at once would be P times the memory
        inside = mx.minimum(hi[..., p, :], start + 1) - mx.maximum(lo[..., p, :], start)
        rows = rows + weight[..., p, :] * mx.maximum(inside, 0)
    return rows.swapaxes(1, 2)


def band(v: mx.array, heads: int, reach: int, dtype: mx.Dtype, rows: Callable[[slice], mx.array]) -> mx.array:
    """v (T, D) under a band → (T, D), each head's share of D by its own rows: rows(blocks) is (n', H, BLOCK, taps)."""
    frames, dim = v.shape
    values = key_blocks(v.astype(dtype), BLOCK, reach)  # (n, taps, D)
    pieces = []
    for at in range(0, len(values), AT_ONCE):
        some = slice(at, at + AT_ONCE)
        split = values[some].reshape(-1, BLOCK + 2 * reach, heads, dim // heads).swapaxes(1, 2)  # (n', H, taps, E)
        pieces.append(product(rows(some), split).swapaxes(1, 2).reshape(-1, dim))
        mx.eval(pieces)
    return mx.concatenate(pieces)[:frames]


# --- the layer


class LPA(Mixer):
    settings = frozenset(
        (
            *("heads", "aperiodic", "periodic", "positional", "anchored", "ladder", "reach", "right", "kernel"),
            *("bases", "weights", "amplitudes", "output_gate", "modulation", "coordination", "skip"),
            *("selective_init", "tau", "hard"),
        )
    )

    def __init__(self, weights: Weights, dim: int, heads: int, config: dict[str, Any]):
        self.config = c = SimpleNamespace(**config)
        self.in_recording, self.in_frame = c.aperiodic + c.periodic + c.positional, c.anchored + c.ladder
        pulses, recording = self.in_recording + self.in_frame, c.heads * self.in_recording
        self.tau = None if c.hard else c.tau
        self.right = c.reach if c.right is None else min(c.reach, c.right)
        self.value, self.out = Linear(weights, "value", dim, dim), Linear(weights, "out", dim, dim)
        self.aperiodic = self.periodic = self.positional = self.place = None
        if c.aperiodic:
            context = recording if c.coordination else 0
            self.aperiodic = Aperiodic(weights.at("aperiodic"), dim, c.heads * c.aperiodic, c.kernel, context)
        if c.periodic:
            self.periodic = Periodic(weights.at("periodic"), dim, c.heads * c.periodic)
        if c.positional:
            self.positional = Positional(weights.at("positional"), c.heads * c.positional, c.bases)
        if c.anchored:
            places = 2 * c.heads * c.anchored
            self.place = (
                weights.exact("anchored.place.weight", places, dim),
                weights.exact("anchored.place.bias", places),
            )
        self.weight = weights.matrix("weight", c.heads * pulses, dim) if c.weights != "static" else None
        self.weight_bias = weights.exact("weight_bias", c.heads * pulses)
        self.amplitude = weights.exact("amplitude", c.heads, pulses) if c.amplitudes else mx.ones((c.heads, pulses))
        self.gate = Linear(weights, "gate", c.heads, dim) if c.output_gate else None
        self.tilt = weights.exact("tilt", c.heads * c.aperiodic) if c.modulation and c.aperiodic else None
        self.skip = weights.exact("skip") if c.skip else None

    def __call__(self, x: mx.array, flow: Flow) -> mx.array:
        weight = self.pulse_weights(x)  # (T, H, P)
        w_recording, w_frame = weight[..., : self.in_recording], weight[..., self.in_recording :]
        a_recording, a_frame = self.amplitude[:, : self.in_recording], self.amplitude[:, self.in_recording :]
        total, cover = w_frame.sum(-1), mx.full(weight.shape[:2], float(self.in_frame))  # (T, H)
        gates = None
        if self.in_recording:
            gate, tilted = gates = self.recording_gates(x, flow.gates)  # (T, H, P) each
            total, cover = total + (w_recording * gate).sum(-1), cover + gate.sum(-1)
            flow.gates = gate.mean(0).flatten()
        scale = -mx.expm1(-cover) / mx.maximum(total, EPS)
        if self.gate is not None:
            scale = scale * mx.sigmoid(self.gate(x))
        y = self.out.bias
        if gates is not None:
            y = y + self.fold(x, gate, w_recording * tilted * a_recording * scale[..., None])
        if self.in_frame:
            y = y + self.frame_pulses(x, w_frame * scale[..., None] * a_frame)
        if self.skip is not None and flow.skip is not None:
            y = y + self.skip * flow.skip
        return y

    def pulse_weights(self, x: mx.array) -> mx.array:
        """Softmax over a head's pulses: (T, H, P)."""
        if self.weight is None:
            logits = self.weight_bias[None]
        else:
            seen = x.mean(0, keepdims=True) if self.config.weights == "utterance" else x
            logits = product(seen, self.weight.T) + self.weight_bias
        heads = logits.reshape(len(logits), self.config.heads, -1)
        return mx.broadcast_to(mx.softmax(heads, axis=-1, precise=True), (len(x), *heads.shape[1:]))

    def recording_gates(self, x: mx.array, passed: mx.array | None) -> tuple[mx.array, mx.array]:
        """Gates of the pulses anchored to the recording, and the same with each window's tilt: (T, H, P)."""
        gates, tilted = [], []
        if self.aperiodic is not None:
            gate, place = self.aperiodic.gates(x, passed, self.tau)
            gates.append(gate)
            tilted.append(gate if self.tilt is None else gate * (1 + self.tilt * place))
        if self.periodic is not None:
            gates.append(self.periodic.gates(x, self.tau))
        if self.positional is not None:
            gates.append(self.positional.gates(len(x), self.tau))
        tilted += gates[len(tilted) :]

        def join(family: list[mx.array]) -> mx.array:
            return mx.concatenate([gate.reshape(len(x), self.config.heads, -1) for gate in family], -1)

        return join(gates), join(tilted)

    def fold(self, x: mx.array, gate: mx.array, spread: mx.array) -> mx.array:
        """Pulse means, projected in pulse space, handed back to the frames: (T, D), without the output's bias."""
        heads, dim = self.config.heads, x.shape[1]
        share = gate / mx.maximum(gate.sum(0), EPS)
        mean = (share.reshape(len(x), -1).T @ x).reshape(heads, -1, dim)  # (H, P, D)
        value = self.value.weight.reshape(heads, -1, dim)  # (H, E, D)
        pulses = product(mean, value.swapaxes(1, 2)) + self.value.bias.reshape(heads, 1, -1)  # (H, P, E)
        pulses = product(pulses, self.out.weight.T.reshape(heads, -1, dim))  # (H, P, D)
        return spread.reshape(len(x), -1) @ pulses.reshape(-1, dim)

    def frame_pulses(self, x: mx.array, weight: mx.array) -> mx.array:
        """Σ_p weight · window mean of the values, projected: (T, D), without the output's bias."""
        c, frames = self.config, len(x)
        families: list[Callable[[slice], mx.array]] = []
        if self.place is not None:
            lo, hi = self.anchored_edges(x, *self.place)
            share = weight[..., : c.anchored] / sizes(frames, lo, hi)
            moved, first, last = (query_blocks(a, BLOCK) for a in (share, lo, hi))
            families.append(lambda some: anchored_rows(moved[some], first[some], last[some], c.reach))
        if c.ladder:
            windows = [(min(lo, self.right + 1), min(hi, self.right + 1)) for lo, hi in rungs(c.ladder, c.reach)]
            lo, hi = (mx.array(edge).astype(mx.float32) for edge in zip(*windows, strict=True))
            fixed = query_blocks(weight[..., c.anchored :] / sizes(frames, lo, hi), BLOCK)
            families.append(lambda some: ladder_rows(fixed[some], windows, c.reach))

        def rows(some: slice) -> mx.array:
            found = [family(some) for family in families]
            return found[0] if len(found) == 1 else found[0] + found[1]

        y = band(self.value(x), c.heads, c.reach, self.value.weight.dtype, rows)
        return product(y, self.out.weight.T)

    def anchored_edges(self, x: mx.array, weight: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
        """lo, hi (T, H, P), counted from the frame itself; −reach ≤ lo ≤ hi ≤ right + 1."""
        reach = self.config.reach
        raw = (x @ weight.T + bias).reshape(len(x), 2, self.config.heads, -1)
        half = reach * mx.sigmoid(raw[:, 1])
        offset = (reach - half) * mx.tanh(raw[:, 0])
        return mx.minimum(offset - half, self.right + 1), mx.minimum(offset + half + 1, self.right + 1)
