"""Mixers that run beside the attention they are to replace: same input, their outputs compared, the model unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..families.base import SKIP, Output, SpeechModel, own_frames
from ..losses import Part
from ..mixers import Mixer
from ..surgery import find_site, mixer_at, swap
from ..task import Objective


@dataclass
class Compared(Output):
    """An output with what mixers beside their attention made of the same input. Part of it, so that DDP sees it."""

    mixed: dict[int, Tensor] = field(default_factory=dict)  # (B, T, D), by layer
    attended: dict[int, Tensor] = field(default_factory=dict)


def fresh_mixer(model: SpeechModel, index: int, mixer: str, config: dict[str, Any] | None, seed: int) -> Mixer:
    """A mixer built from a layer's attention, its random weights those of the seed; the layer keeps its attention."""
    torch.manual_seed(seed)
    undo = swap(model, index, mixer, config)
    built = mixer_at(model, index)
    undo()
    return built


@contextmanager
def beside(model: SpeechModel, mixers: Mapping[int, Mixer]) -> Iterator[None]:
    """Inside, `encode` gives Compared outputs. No gradient reaches the model itself through the mixers' input."""
    mixed: dict[int, Tensor] = {}
    attended: dict[int, Tensor] = {}

    def listen(index: int, mixer: Mixer):
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            x = (args[0] if args else kwargs["hidden_states"]).detach()
            flow = model.flow
            mixed[index] = mixer(x, flow.mask, gates=flow.gates, skip=flow.outputs.get(index - SKIP)).y
            attended[index] = output[0].detach()

        return hook

    def encode(features: Tensor, lengths: Tensor, hidden: bool = False) -> Compared:
        mixed.clear()
        attended.clear()
        output = type(model).encode(model, features, lengths, hidden)
        plain = {f.name: getattr(output, f.name) for f in fields(Output)}
        return Compared(**plain, mixed=dict(mixed), attended=dict(attended))

    # A member of the model, but not of `net`: it is trained and kept in checkpoints, and never saved with the model.
    model.beside = nn.ModuleDict({str(index): mixer for index, mixer in mixers.items()})
    model.encode = encode  # type: ignore[method-assign]
    hooks = [
        model.net.get_submodule(find_site(model, index).path).register_forward_hook(
            listen(index, mixer), with_kwargs=True
        )
        for index, mixer in mixers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        del model.encode, model.beside


def without_dropout(model: nn.Module) -> Callable[[int], None]:
    """Called before a step: what mixers imitate is the attention as it is in use."""

    def on_step(_: int) -> None:
        model.eval()

    return on_step


def layer_error(output: Compared, index: int, weights: Tensor) -> Part:
    """Mean squared error of a mixer against its attention, over every own frame."""
    mixed, attended = output.mixed[index].float(), output.attended[index].float()
    mask = counted(output, index) * weights.repeat_interleave(len(mixed) // len(weights)).unsqueeze(1)  # (B, T)
    return Part(((mixed - attended).square().mean(-1) * mask).sum(), mask.sum())


def counted(output: Compared, index: int) -> Tensor:
    """(B, T) bool, the frames that count; all do where a layer hears a recording as many sequences, its chunks."""
    rows, frames = output.mixed[index].shape[:2]
    own = own_frames(output.lengths, frames)
    return own if len(own) == rows else own.new_ones(rows, frames)


def layer_objective(layers: Mapping[int, Mixer], l1: float = 0.0, l2: float = 0.0) -> Objective:
    """Every layer's MSE, and an elastic net on the amplitudes of the mixers that have any."""

    def parts(student: Output, teacher: Output | None, batch: Any) -> dict[str, tuple[float, Part]]:
        assert isinstance(student, Compared)
        found = {f"mse {i}": (1.0, layer_error(student, i, batch.weights)) for i in layers}
        if l1 or l2:
            for index, mixer in layers.items():
                amplitude = getattr(mixer, "amplitude", None)
                if amplitude is not None:
                    found[f"net {index}"] = (1.0, elastic_net(amplitude, l1, l2))
        return found

    return parts


def elastic_net(amplitude: Tensor, l1: float, l2: float) -> Part:
    """Means over the pulses: summed, the paper's weights outdo an MSE of 0.01 to 0.4 and leave no pulse anywhere."""
    a = amplitude.float()
    return Part(l1 * a.abs().mean() + l2 * a.square().mean(), torch.ones((), device=a.device))


class Unexplained:
    """What a mixer leaves unexplained of its attention's output, gathered over batches."""

    def __init__(self) -> None:
        self.error = self.square = 0.0
        self.total: Tensor | float = 0.0  # (D,)
        self.frames, self.width = 0, 1

    def add(self, output: Compared, index: int) -> None:
        own = counted(output, index)
        mixed, attended = output.mixed[index][own].double(), output.attended[index][own].double()  # (N, D)
        self.error += float((mixed - attended).square().sum())
        self.square += float(attended.square().sum())
        self.total = self.total + attended.sum(0)
        self.frames, self.width = self.frames + len(mixed), mixed.shape[1]

    @property
    def mse(self) -> float:
        return self.error / max(1, self.frames * self.width)

    @property
    def relative(self) -> float:
        """As a share of the output's variance over all frames."""
        mean = float(torch.as_tensor(self.total).square().sum()) / max(1, self.frames)
        return self.error / max(self.square - mean, 1e-12)
