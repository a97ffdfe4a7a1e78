"""Where each layer of a model looks, for one recording: how much every frame takes from every other.

What is computed here is what the mixers compute, written as one matrix a head: `looks(...) @ values` is their output. A
recording of a few seconds at a time, for the matrices are square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LpaError
from ..families.base import SpeechModel
from ..mixers import LPA, projections
from ..mixers.attention import NEVER, Pyramid, Window
from ..mixers.blocks import valid_frames
from ..mixers.lpa import EPS
from ..mixers.plain import Conv, DynConv, NoMixer, Summary
from ..surgery import mixer_at
from ..windows import PACE

FAMILIES = ("aperiodic", "periodic", "positional")  # pulses anchored to the recording, in the order a head has them


@dataclass(frozen=True)
class Pulse:
    """One window over the recording, the same for every frame that uses it."""

    family: str
    runs: list[tuple[int, int]]  # frames [start, end) where its gate is more than half open


@dataclass(frozen=True)
class Layer:
    """What one layer does in one recording."""

    index: int
    mixer: str
    reach: tuple[int, int] | None  # frames it can look back and ahead; None: all
    weight: Tensor  # (T, T): how much frame t takes from frame s, mean over heads
    pulses: list[Pulse]
    away: float  # frames from where it is that a frame looks, on average
    worth: float  # share of the model's output that is lost if this layer mixes nothing


@torch.inference_mode()
def study(model: SpeechModel, audio: Tensor) -> tuple[Tensor | None, list[Layer]]:
    """Logits (T, V) of audio (1, S), where the model has a head, and what each of its layers did."""
    heard: dict[int, tuple[tuple, dict, Any]] = {}
    sites = model.sites()
    hooks = []
    for site in sites:
        module = mixer_at(model, site.index)

        def keep(_, args, kwargs, output, index=site.index):
            heard[index] = (args, kwargs, output)

        hooks.append(module.register_forward_hook(keep, with_kwargs=True))
    try:
        output = model(audio)
    finally:
        for hook in hooks:
            hook.remove()
    layers = []
    for site in sites:
        module = mixer_at(model, site.index)
        args, kwargs, gave = heard[site.index]
        weight, pulses = look(module, args, kwargs, gave)
        swap = model.swaps.get(site.index)
        layers.append(
            Layer(
                site.index,
                swap.mixer if swap else "attention",
                getattr(module, "reach", None) if swap else None,
                weight,
                pulses,
                distance(weight),
                without_mixing(model, site.path, audio, output.last),
            )
        )
    return None if output.logits is None else output.logits[0].float(), layers


def look(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> tuple[Tensor, list[Pulse]]:
    """(T, T) mean over heads of |what a frame takes from each|, and the pulses over the recording if it has any."""
    x = (args[0] if args else kwargs["hidden_states"]).float()
    if isinstance(module, LPA):
        heads, gates = lpa_looks(module, x, kwargs.get("gates"))
        return heads.abs().mean(0), pulses_of(module, gates)
    known = {
        Window: window_looks,
        Pyramid: pyramid_looks,
        DynConv: dynconv_looks,
        Conv: conv_looks,
        Summary: summary_looks,
    }
    for kind, function in known.items():
        if isinstance(module, kind):
            return function(module, x).abs().mean(0), []  # type: ignore[operator]
    if hasattr(module, "q_proj"):
        given = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        return (given[0] if given is not None else attention_looks(module, x)).mean(0), []  # wavlm gives its own
    if isinstance(module, NoMixer):
        return torch.zeros(x.shape[1], x.shape[1]), []  # it looks nowhere
    raise LpaError(f"how {type(module).__name__} looks cannot be drawn; show takes models without it")


def attention_looks(module: nn.Module, x: Tensor) -> Tensor:
    """x (1, T, D) → (H, T, T)."""
    p = projections(module)
    q, k = (f(x[0]).unflatten(-1, (p.heads, -1)).transpose(0, 1) for f in (p.q, p.k))  # (H, T, E)
    return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)


def window_looks(mixer: Window, x: Tensor) -> Tensor:
    scores = query_scores(mixer, x)
    t = torch.arange(x.shape[1])
    offset = t - t[:, None]
    assert mixer.reach is not None
    back, ahead = mixer.reach
    if mixer.places is not None:
        scores = scores + PACE * mixer.places[:, (offset + back).clamp(0, 2 * back)]
    return scores.masked_fill((offset < -back) | (offset > ahead), NEVER).softmax(-1)


def query_scores(mixer: Any, x: Tensor) -> Tensor:
    """Every query with every key: (H, T, T)."""
    q, kv = mixer.project(x)
    q, k = (a[0].unflatten(-1, (mixer.heads, -1)).transpose(0, 1) for a in (q, kv.chunk(2, -1)[0]))
    return q @ k.transpose(1, 2) * mixer.scale


def pyramid_looks(mixer: Pyramid, x: Tensor) -> Tensor:
    """A window's weight is shared equally by the frames it holds; its score is that of their mean key."""
    scores = query_scores(mixer, x)  # the mean of scores is the score of the mean key
    frames, block = x.shape[1], mixer.config.block
    lo, hi = (edge.tolist() for edge in mixer.windows())
    heads = torch.zeros_like(scores)
    for start in range(0, frames, block):
        rows = slice(start, min(start + block, frames))
        spans = []
        means = []
        for window, (a, b) in enumerate(zip(lo, hi, strict=True)):
            first, end = max(0, start + a), min(frames, start + b)
            if first < end and b <= block + mixer.right:
                spans.append((first, end))
                place = 0.0 if mixer.places is None else PACE * mixer.places[:, : rows.stop - start, window]
                means.append(scores[:, rows, first:end].mean(-1) + math.log(end - first) + place)
        for (a, b), share in zip(spans, torch.stack(means, -1).softmax(-1).unbind(-1), strict=True):
            heads[:, rows, a:b] += share.unsqueeze(-1) / (b - a)
    return heads


def lpa_looks(mixer: LPA, x: Tensor, passed: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(H, T, T), and the gates (T, H, P) of the pulses anchored to the recording."""
    valid = valid_frames(x, None)
    tau = None if mixer.hard else mixer.tau
    split = [mixer.in_recording, mixer.in_frame]
    weight = mixer._pulse_weights(x, valid)  # (1, T, H, P)
    amplitude = torch.ones(mixer.heads, sum(split)) if mixer.amplitude is None else mixer.amplitude.float()
    w_recording, w_frame = weight.split(split, -1)
    a_recording, a_frame = amplitude.split(split, -1)
    cover = torch.full_like(weight[..., 0], mixer.in_frame)
    total = w_frame.sum(-1)
    gate = None
    if mixer.in_recording:
        gate, tilted = mixer._recording_gates(x, None, passed, tau)
        total, cover = total + (w_recording * gate).sum(-1), cover + gate.sum(-1)
    scale = -torch.expm1(-cover) / total.clamp(min=EPS)  # (1, T, H)
    if mixer.gate is not None:
        scale = scale * mixer.gate(x).float().sigmoid()
    heads = torch.zeros(mixer.heads, x.shape[1], x.shape[1])
    if gate is not None:
        spread = w_recording * tilted * a_recording * scale.unsqueeze(-1)
        share = gate / gate.sum(1, keepdim=True).clamp(min=EPS)
        heads += torch.einsum("thp,shp->hts", spread[0], share[0])
    if mixer.in_frame:
        weights = (w_frame * a_frame * scale.unsqueeze(-1)).split([mixer.config.anchored, mixer.config.ladder], -1)
        for family, w in zip((mixer.anchored, mixer.ladder), weights, strict=True):
            if family is not None:
                lo, hi = family.edges(x)
                heads += boxes(lo, hi, w / family.sizes(x, None, lo, hi))
    return heads, None if gate is None else gate[0]


def boxes(lo: Tensor, hi: Tensor, weight: Tensor) -> Tensor:
    """Σ_p weight · (how much of frame s lies in [t + lo, t + hi)): weight (1, T, H, P) → (H, T, T)."""
    frames = weight.shape[1]
    t = torch.arange(frames)
    made = torch.zeros(weight.shape[2], frames, frames)
    for p in range(weight.shape[3]):
        low, high, w = (edge.expand(weight.shape)[0, ..., p].T.unsqueeze(-1) for edge in (lo, hi, weight))  # (H, T, 1)
        low, high = low + t[:, None], high + t[:, None]
        made += w * (torch.minimum(high, t + 1.0) - torch.maximum(low, t * 1.0)).clamp(0, 1)
    return made


def dynconv_looks(mixer: DynConv, x: Tensor) -> Tensor:
    weight = mixer.taps(x).float().unflatten(-1, (mixer.heads, -1)).softmax(-1)
    lo, hi = mixer.frames.edges(x)
    return boxes(lo, hi, weight)


def conv_looks(mixer: Conv, x: Tensor) -> Tensor:
    """Its taps, mean over channels: one head."""
    taps = mixer.kernel.float().abs().mean(0)
    side, frames = len(taps) // 2, x.shape[1]
    offset = torch.arange(frames) - torch.arange(frames)[:, None] + side
    inside = (offset >= 0) & (offset < len(taps))
    return torch.where(inside, taps[offset.clamp(0, len(taps) - 1)], 0.0).unsqueeze(0)


def summary_looks(mixer: Summary, x: Tensor) -> Tensor:
    """Half itself, half the mean of all: what it says of where it looks, though both pass a nonlinearity."""
    frames = x.shape[1]
    return ((torch.eye(frames) + 1 / frames) / 2).unsqueeze(0)


def pulses_of(mixer: LPA, gates: Tensor | None) -> list[Pulse]:
    """The runs of every pulse over the recording; gates (T, H, P)."""
    if gates is None:
        return []
    counts = [getattr(mixer.config, name) for name in FAMILIES]
    names = [name for name, count in zip(FAMILIES, counts, strict=True) for _ in range(count)]
    return [Pulse(names[p], runs(gates[:, h, p] > 0.5)) for h in range(gates.shape[1]) for p in range(gates.shape[2])]


def runs(on: Tensor) -> list[tuple[int, int]]:
    """[start, end) of every stretch of true."""
    edges = torch.diff(on.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def distance(weight: Tensor) -> float:
    """Mean |t − s| over what is looked at."""
    t = torch.arange(len(weight))
    return float((weight * (t - t[:, None]).abs()).sum() / weight.sum().clamp(min=EPS))


def without_mixing(model: SpeechModel, path: str, audio: Tensor, last: Tensor) -> float:
    """Share of the output lost when the layer at `path` gives every frame the same, its mean over time: 1 − ρ²."""

    def flatten(module: nn.Module, args: tuple, output: Any) -> Any:
        y, *rest = output if isinstance(output, tuple) else (output,)
        y = y.mean(1, keepdim=True).expand_as(y)
        return (y, *rest) if isinstance(output, tuple) else y

    hook = model.net.get_submodule(path).register_forward_hook(flatten)
    try:
        changed = model(audio).last
    finally:
        hook.remove()
    a, b = (y - y.mean(1, keepdim=True) for y in (last, changed))
    return 1 - float((a * b).sum() ** 2 / (a.square().sum() * b.square().sum()).clamp(min=EPS))
