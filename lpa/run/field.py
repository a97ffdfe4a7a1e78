"""How far a model hears: which frames one frame of its output depends on, from the plan alone. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import LpaError
from ..plan import Swap
from ..windows import pyramid_widths

RATE = 16000  # samples a second, in every family


@dataclass(frozen=True)
class Layer:
    """Frames a layer sees before and after a frame; with a grid, before and after the frame's block of so many."""

    left: int
    right: int
    grid: int = 1

    def needs(self, first: int, last: int) -> tuple[int, int]:
        """The frames [first, last) of the layer's output come from these frames of its input."""
        return first // self.grid * self.grid - self.left, -(-last // self.grid) * self.grid + self.right


@dataclass(frozen=True)
class Field:
    """A model's receptive field. Where it is all of the recording, `whole` says why."""

    stride: int  # samples from one frame to the next
    tail: int  # samples that its last frame needs beyond that
    layers: tuple[Layer, ...]  # what looks beside a frame, from the input on
    whole: str = ""

    @property
    def grid(self) -> int:
        """What is cut off the start of a recording must be a multiple of so many frames."""
        return math.lcm(*(layer.grid for layer in self.layers))

    def needs(self, first: int, last: int) -> tuple[int, int]:
        """The frames that frames [first, last) of the output depend on; they may lie outside the recording."""
        for layer in reversed(self.layers):
            first, last = layer.needs(first, last)
        return first // self.grid * self.grid, last

    @property
    def overlap(self) -> int:
        """Frames that are computed for a block beside those that it gives."""
        first, last = self.needs(0, self.grid)
        return last - first - self.grid

    @property
    def ahead(self) -> int:
        """Samples that must have been heard after a frame before it is known, at worst."""
        return max(self.needs(t, t + 1)[1] - (t + 1) for t in range(self.grid)) * self.stride + self.tail

    def refuse(self) -> None:
        if self.whole:
            raise LpaError(f"this model cannot stream: it takes whole recordings ({self.whole}); use transcribe")

    @classmethod
    def of(cls, family: str, base: dict[str, Any], swaps: Sequence[Swap]) -> Field:
        """From what a plan holds: the family's configuration and what has been swapped."""
        stride, tail, layers, why = whisper_front(base) if family == "whisper" else wave_front(family, base)
        by_layer = {swap.index: swap for swap in swaps}
        attention = []
        for index in range(base["encoder_layers" if family == "whisper" else "num_hidden_layers"]):
            found = mixer_layer(by_layer[index]) if index in by_layer else None
            if index not in by_layer:
                attention.append(index)
            elif found is None:
                why.append(f"{by_layer[index].mixer} in layer {index}")
            else:
                layers.append(found)
        if attention:
            one = len(attention) == 1
            why.insert(0, f"attention in layer {attention[0]}" if one else f"{len(attention)} attention layers")
        return cls(stride, tail, tuple(layers), ", ".join(why))


# --- the parts of a model


def whisper_front(base: dict[str, Any]) -> tuple[int, int, list[Layer], list[str]]:
    """Frame t comes from mel frames 2t - 2 to 2t + 2 (two convolutions of 3, one of stride 2), each of 400 samples."""
    why = []
    if base["positions"]:
        why.append("positions from the start")
    if base["mel_floor"] == "recording":
        why.append("mel floor from the loudest part")
    return 320, 0, [Layer(2, 1)], why


def wave_front(family: str, base: dict[str, Any]) -> tuple[int, int, list[Layer], list[str]]:
    """Unpadded convolutions over samples, then one or more over frames, padded to keep their number."""
    why = []
    if base["normalise"]:
        why.append("input normalisation")
    if base.get("feat_extract_norm", "layer") == "group":
        why.append("group norm")
    stride = math.prod(base["conv_stride"])
    taps, depth = base["num_conv_pos_embeddings"], 1
    if family == "data2vec-audio":
        taps, depth = base["conv_pos_kernel_size"], base["num_conv_pos_embeddings"]
    positions = Layer(taps // 2, taps - 1 - taps // 2)
    return stride, samples_of_a_frame(base) - stride, [positions] * depth, why


def samples_of_a_frame(base: dict[str, Any]) -> int:
    samples = 1
    for kernel, stride in zip(reversed(base["conv_kernel"]), reversed(base["conv_stride"]), strict=True):
        samples = (samples - 1) * stride + kernel
    return samples


def mixer_layer(swap: Swap) -> Layer | None:
    """What a mixer sees; None: the whole recording, or a mixer not known here."""
    c = swap.config
    if swap.mixer == "none":
        return Layer(0, 0)
    if swap.mixer in ("conv", "dynconv"):
        return Layer(c["taps"] // 2, c["taps"] // 2)
    ahead = choices_ahead(swap)
    if not ahead:
        return None
    left = {"window": "side", "pyramid": ""}.get(swap.mixer, "reach")
    right = ahead[-1]
    return Layer(c[left], right) if left else Layer(pyramid_widths(c)[-1], right, c["block"])


def choices_ahead(swap: Swap) -> list[int]:
    """How far ahead a mixer can be made to look, in frames, up to what it does now; empty where that is fixed."""
    c = swap.config
    found: Sequence[int]
    if swap.mixer == "window":
        found = range(c["side"] + 1)
    elif swap.mixer == "pyramid":
        found = pyramid_widths(c)
    elif swap.mixer in ("lpa", "anchored", "ladder"):
        recording = c["aperiodic"] + c["periodic"] + c["positional"] or c["weights"] == "utterance"
        found = range(0 if recording else c["reach"] + 1)
    else:
        return []
    limit = c.get("right")
    return [frames for frames in found if limit is None or frames <= limit]


# --- looking less far ahead


def limit_ahead(family: str, base: dict[str, Any], swaps: Sequence[Swap], seconds: float) -> list[Swap]:
    """The swaps with what they see ahead cut (`right`), evenly, until the model's lookahead fits in `seconds`."""
    field = Field.of(family, base, swaps)
    if field.whole:
        raise LpaError(f"the lookahead cannot be limited: this model takes whole recordings ({field.whole})")
    if field.ahead <= seconds * RATE:
        return list(swaps)
    choices = [choices_ahead(swap) for swap in swaps]
    level = [0] * len(swaps)  # which choice each has

    def cut() -> list[Swap]:
        return [
            replace(swap, config={**swap.config, "right": have[at]}) if have else swap
            for swap, have, at in zip(swaps, choices, level, strict=True)
        ]

    least = math.ceil(100 * Field.of(family, base, cut()).ahead / RATE) / 100
    if least > seconds:
        raise LpaError(f"this model looks ahead {least:.2f} s at least; ask for --latency {least:.2f} or more")
    grown = True
    while grown:  # a step more for every layer in turn, as long as any fits; those next to the output first
        grown = False
        for at in reversed(range(len(swaps))):
            if level[at] + 1 < len(choices[at]):
                level[at] += 1
                if Field.of(family, base, cut()).ahead <= seconds * RATE:
                    grown = True
                else:
                    level[at] -= 1
    return cut()
