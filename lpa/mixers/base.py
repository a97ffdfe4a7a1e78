"""What every mixer is: built from the attention it replaces, called with (x, mask), gives y."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import LpaError


@dataclass(frozen=True)
class MixerConfig:
    """Frozen, and the same after a trip through JSON. Every mixer's config derives from this."""

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))  # tuples become lists here, not on the disk

    @classmethod
    def from_dict(cls, data: dict[str, Any]):
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - set(fields))
        if unknown:
            raise LpaError(f"{cls.__name__} has no field {', '.join(unknown)}; have {', '.join(fields)}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


class Mixed(NamedTuple):
    """A mixer's output, and what it passes on."""

    y: Tensor  # (B, T, D)
    gates: Tensor | None = None  # (B, N) time-mean of the gates, for the next layer that has any


class Projections(NamedTuple):
    """The four linear layers of an attention, whatever its family calls them."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    out: nn.Linear
    heads: int

    @property
    def dim(self) -> int:
        return self.out.out_features


def projections(attention: nn.Module) -> Projections:
    """The projections of any attention module of the families we know (they all name them alike)."""
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    found = [getattr(attention, n, None) for n in names]
    if not all(isinstance(p, nn.Linear) for p in found) or not hasattr(attention, "num_heads"):
        raise LpaError(
            f"{type(attention).__name__} is no attention to build a mixer from: it needs {', '.join(names)}, num_heads"
        )
    q, k, v, out = found
    return Projections(q, k, v, out, attention.num_heads)  # type: ignore[arg-type]


class Mixer(nn.Module, ABC):
    """Mixes frames over time.

    forward(x, mask, gates, skip) -> Mixed
        x      (B, T, D)
        mask   (B, T) bool, True where a frame is the sample's own; None where nothing is padded
        gates  what the previous LPA layer passed on; skip: the output of the mixer four layers below. Most ignore both.
    Output at a padded frame is zero, and no padded frame has any influence.
    """

    Config: ClassVar[type[MixerConfig]]
    reach: tuple[int, int] | None = None  # frames it looks back and ahead; None: the whole recording

    @classmethod
    @abstractmethod
    def from_attention(cls, attention: nn.Module, config) -> Mixer:
        """A mixer of its own parameters, started from the attention's where it can be."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, gates: Tensor | None = None, skip: Tensor | None = None
    ) -> Mixed:
        if x.shape[1] == 0:
            raise LpaError("a recording of no frames has nothing to mix; leave it out")
        return self.mix(x, mask, gates, skip)

    @abstractmethod
    def mix(self, x: Tensor, mask: Tensor | None, gates: Tensor | None, skip: Tensor | None) -> Mixed:
        """The fast form of what `forward` promises."""

    def look_ahead(self, frames: int) -> None:
        """From now on see at most so many frames ahead, as if the recording ended there."""
        raise LpaError(f"what {type(self).__name__} sees ahead is fixed; it cannot be limited")

    @abstractmethod
    def mflop_per_frame(self) -> float:
        """Million floating-point operations a frame, multiply and add counted as two."""


def blank_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with every padded frame set to zero; a fill and not a product, so that NaN in the padding stays there."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)


def exactly(x: Tensor) -> torch.autocast:
    """No autocast inside: positions, phases and gates stay float32 whatever the training precision."""
    return torch.autocast(x.device.type, enabled=False)


def frames_ahead(frames: int, most: int) -> int:
    """How far a mixer that could see `most` frames ahead sees, once limited."""
    if frames < 0:
        raise LpaError(f"a layer cannot look {frames} frames ahead; `right` must be 0 or more")
    return min(frames, most)


def split_heads(dim: int, heads: int) -> int:
    """Width of one head, or an error if the heads do not divide the model's width."""
    if heads < 1 or dim % heads:
        raise LpaError(f"{heads} heads do not divide a width of {dim}; choose heads that do")
    return dim // heads


def copy_linear(source: nn.Linear, *, bias: bool = True) -> nn.Linear:
    """A linear layer of our own that starts as a copy of the attention's (with a zero bias where that has none)."""
    layer = nn.Linear(source.in_features, source.out_features, bias=bias)
    layer.to(source.weight.device, source.weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(source.weight)
        if bias:
            layer.bias.zero_() if source.bias is None else layer.bias.copy_(source.bias)
    return layer
