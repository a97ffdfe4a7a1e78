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
from .legend import NEAR
from .pulses import Pulse, going_along, lay_out, over_recording, whole_reach

IN_RECORDING = ("aperiodic", "periodic", "positional")  # kinds of pulses, in the order a head has them


@dataclass(frozen=True)
class Layer:
    """What one layer does in one recording."""

    index: int
    mixer: str
    reach: tuple[int, int] | None  # frames it can look back and ahead; None: all
    weight: Tensor  # (T, T): how much frame t takes from frame s, mean over heads
    pulses: int  # how many it has
    lines: list[list[Pulse]]  # those that are drawn, line by line
    away: float  # frames from where it is that a frame looks, on average
    worth: float  # share of the model's output that is lost if this layer mixes nothing
    difficulty: float | None  # share of the layer's own output that is lost if it looks no further than NEAR seconds


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
        weight, pulses, difficulty = look(module, args, kwargs, gave, round(NEAR * model.frame_rate))
        swap = model.swaps.get(site.index)
        layers.append(
            Layer(
                site.index,
                swap.mixer if swap else "attention",
                getattr(module, "reach", None) if swap else None,
                weight,
                len(pulses),
                lay_out(pulses),
                distance(weight),
                without_mixing(model, site.path, audio, output.last),
                difficulty,
            )
        )
    return None if output.logits is None else output.logits[0].float(), layers


def look(
    module: nn.Module, args: tuple, kwargs: dict, output: Any, near: int
) -> tuple[Tensor, list[Pulse], float | None]:
    """(T, T) mean over heads of |what a frame takes from each|, the pulses if it has any, and its difficulty."""
    x = (args[0] if args else kwargs["hidden_states"]).float()
    pulses: list[Pulse] = []
    if isinstance(module, LPA):
        heads, pulses = lpa_looks(module, x, kwargs.get("gates"))
    elif isinstance(module, Pyramid):
        heads, pulses = pyramid_looks(module, x)
    elif isinstance(module, Window | Conv | DynConv):
        assert module.reach is not None
        function: Any = {Window: window_looks, Conv: conv_looks, DynConv: dynconv_looks}[type(module)]
        heads, pulses = function(module, x), [whole_reach(module.reach, x.shape[1])]
    elif isinstance(module, Summary):
        heads = summary_looks(module, x)
    elif isinstance(module, NoMixer):
        heads = torch.zeros(1, x.shape[1], x.shape[1])  # it looks nowhere
    elif hasattr(module, "q_proj"):
        given = output[1] if isinstance(output, tuple) and len(output) > 1 else None  # wavlm gives its own
        heads = attention_looks(module, x) if given is None else given[0]
    else:
        raise LpaError(f"how {type(module).__name__} looks cannot be drawn; show takes models without it")
    return heads.abs().mean(0), pulses, difficulty_of(module, x, heads, near)


def difficulty_of(module: Any, x: Tensor, heads: Tensor, near: int) -> float | None:
    """Share of a layer's output that is lost if it looks no further than `near` frames, with weights as large in all.

    Of attention this is just what a window put in its place would miss. None: what this mixer does is no such product.
    """
    if getattr(module, "reach", None) is not None and max(module.reach) <= near:
        return 0.0
    if isinstance(module, Window | Pyramid):
        values, out = module.project(x)[1].chunk(2, -1)[1][0], module.out
    elif isinstance(module, LPA | DynConv):
        values, out = module.value(x)[0], module.out
    elif hasattr(module, "q_proj"):
        values, out = projections(module).v(x[0]), projections(module).out
    else:
        return None
    t = torch.arange(len(values))
    cut = heads * ((t - t[:, None]).abs() <= near)
    cut = cut * (heads.abs().sum(-1, keepdim=True) / cut.abs().sum(-1, keepdim=True).clamp(min=EPS))
    values = values.unflatten(-1, (len(heads), -1))
    whole, short = ((torch.einsum("hts,she->the", h, values).flatten(1)) @ out.weight.T for h in (heads, cut))
    return lost(whole, short)


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


def pyramid_looks(mixer: Pyramid, x: Tensor) -> tuple[Tensor, list[Pulse]]:
    """A window's weight is shared equally by the frames it holds; its score is that of their mean key."""
    scores = query_scores(mixer, x)  # the mean of scores is the score of the mean key
    frames, c = x.shape[1], mixer.config
    block = c.block
    sides = 2 * (["piece"] * len(c.pieces) + ["wide"] * len(c.steps))
    lo, hi = (edge.tolist() for edge in mixer.windows())
    heads = torch.zeros_like(scores)
    used = torch.zeros(len(sides) + 1, frames)  # the block's own frames are one pulse, the first
    edges = torch.zeros(len(sides) + 1, frames, 2)
    for start in range(0, frames, block):
        rows = slice(start, min(start + block, frames))
        spans = []
        means = []
        for window, (a, b) in enumerate(zip(lo, hi, strict=True)):
            first, end = max(0, start + a), min(frames, start + b)
            if first < end and b <= block + mixer.right:
                spans.append((max(0, window - block + 1), first, end))
                place = 0.0 if mixer.places is None else PACE * mixer.places[:, : rows.stop - start, window]
                means.append(scores[:, rows, first:end].mean(-1) + math.log(end - first) + place)
        for (pulse, a, b), share in zip(spans, torch.stack(means, -1).softmax(-1).unbind(-1), strict=True):
            heads[:, rows, a:b] += share.unsqueeze(-1) / (b - a)
            used[pulse, rows] += share.mean(0)
            edges[pulse, rows] = torch.tensor([rows.start, rows.stop] if pulse == 0 else [a, b]).float()
    return heads, [Pulse(kind, used[i], [], edges[i]) for i, kind in enumerate(["block", *sides])]


def lpa_looks(mixer: LPA, x: Tensor, passed: Tensor | None) -> tuple[Tensor, list[Pulse]]:
    """(H, T, T), and every head's pulses; those of the ladder, which all heads share, once."""
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
    pulses: list[Pulse] = []
    if gate is not None:
        spread = w_recording * tilted * a_recording * scale.unsqueeze(-1)
        share = gate / gate.sum(1, keepdim=True).clamp(min=EPS)
        heads += torch.einsum("thp,shp->hts", spread[0], share[0])
        kinds = [kind for kind in IN_RECORDING for _ in range(getattr(mixer.config, kind))]
        pulses = over_recording(kinds, gate[0], spread[0])
    if mixer.in_frame:
        weights = (w_frame * a_frame * scale.unsqueeze(-1)).split([mixer.config.anchored, mixer.config.ladder], -1)
        for family, w in zip((mixer.anchored, mixer.ladder), weights, strict=True):
            if family is not None:
                lo, hi = family.edges(x)
                heads += boxes(lo, hi, w / family.sizes(x, None, lo, hi))
                pulses += going_along("anchored" if family is mixer.anchored else "ladder", lo, hi, w)
    return heads, pulses


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
    return lost(last[0], changed[0])


def lost(whole: Tensor, left: Tensor) -> float:
    """Share of what varies over time in (T, D) that is not in another such, however scaled: 1 − ρ², in float64."""
    a, b = (y.double() - y.double().mean(0) for y in (whole, left))
    both = float(a.square().sum() * b.square().sum())
    if both == 0.0:
        return float(bool(a.any()))  # nothing varies: nothing is lost, or all is
    return min(1.0, max(0.0, 1 - float((a * b).sum()) ** 2 / both))
