"""What every speech model is to the rest of the package, and how mixers hang in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import LpaError
from ..mixers import Mixer
from ..plan import Site, Swap
from ..tokens import Tokens

SKIP = 4  # a mixer is handed the output of the mixer this many layers below it
ATTENTION = "lpa"  # the name our attention and mask functions have inside transformers


@dataclass
class Output:
    """What a model says about a batch."""

    logits: Tensor | None  # (B, T, V); None where the model has no CTC head
    lengths: Tensor  # (B,) int64: the frames that are each sample's own
    last: Tensor  # (B, T, D) what the head reads
    hidden: list[Tensor]  # (B, T, D) after every layer; empty unless asked for


def own_frames(lengths: Tensor, frames: int) -> Tensor:
    """(B, T) bool, True where a frame is the sample's own."""
    return torch.arange(frames, device=lengths.device) < lengths.unsqueeze(1)


def padding_mask(lengths: Tensor | None, frames: int) -> Tensor | None:
    """own_frames, or None where nothing is padded: without a mask SDPA can take its fastest kernel."""
    if lengths is None:
        return None
    if may_look(lengths) and bool((lengths >= frames).all()):
        return None
    return own_frames(lengths, frames)


def may_look(values: Tensor) -> bool:
    """Whether values may be read: not while a graph is recorded, nor in training off the CPU, where it would wait."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return values.device.type == "cpu" or not torch.is_grad_enabled()


def attendable(mask: Tensor) -> Tensor:
    """The mask attention gets: a row of nothing but padding keeps itself, as a softmax over nothing is NaN."""
    return mask | ~mask.any(dim=1, keepdim=True)


def broadcast_mask(attention_mask: Tensor | None = None, **_) -> Tensor | None:
    """A (B, T) mask as (B, 1, 1, T), for SDPA to broadcast; transformers' own would be (B, 1, T, T)."""
    return None if attention_mask is None else attendable(attention_mask)[:, None, None, :]


AttentionInterface.register(ATTENTION, sdpa_attention_forward)
AttentionMaskInterface.register(ATTENTION, broadcast_mask)


class Flow:
    """What the layers of one model pass on during one forward pass. One pass at a time: not for several threads."""

    samples: Tensor | None  # (B,) samples that are each row's own; None: all of them
    mask: Tensor | None  # (B, T)
    gates: Tensor | None  # of the last layer that gave any
    outputs: dict[int, Tensor]  # mixers' outputs by layer, those that may still be asked for
    running: bool

    def __init__(self) -> None:
        self.end()

    def begin(self, mask: Tensor | None) -> None:
        """A pass through the layers starts: mask (B, T) bool or None."""
        self.end()  # the last pass may have failed halfway
        self.mask, self.running = mask, True

    def end(self) -> None:
        """The pass is over; hold on to no tensor of it."""
        self.samples = self.mask = self.gates = None
        self.outputs = {}
        self.running = False

    def __reduce__(self):
        return (Flow, ())  # a copy of a model starts with nothing under way

    # Hooks, for those who call the Hugging Face modules themselves. Bound methods, so that a deep copy gets its own.
    def enter_trunk(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        mask = kwargs.get("attention_mask")
        self.samples = None if mask is None else mask.sum(1)

    def enter_encoder(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        mask = kwargs.get("attention_mask")
        self.begin(None if mask is None else mask.bool())

    def enter_unmasked(self, module: nn.Module, args: tuple) -> None:
        self.begin(None)

    def leave_encoder(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.end()

    def blank_input(self, module: nn.Module, args: tuple) -> tuple:
        """Input (B, C, T) of a convolution with its padded frames set to zero, as a single sample's edge would be."""
        return args if self.mask is None else (args[0].masked_fill(~self.mask.unsqueeze(1), 0),)


class MixerSite(nn.Module):
    """Sits where an attention sat: takes what the layer hands to attention, gives the mixer what mixers get."""

    def __init__(self, mixer: Mixer, index: int, flow: Flow):
        super().__init__()
        self.mixer, self.index, self.flow = mixer, index, flow

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor, None]:
        return self.mix(hidden_states), None

    def mix(self, x: Tensor) -> Tensor:
        flow = self.flow
        if not flow.running:
            raise LpaError(
                f"layer {self.index} was called outside its model's forward pass; "
                "run the whole model, without gradient checkpointing"
            )
        skip = flow.outputs.pop(self.index - SKIP, None)
        y, gates = self.mixer(x, flow.mask, gates=flow.gates, skip=skip)
        flow.outputs[self.index] = y
        if gates is not None:
            flow.gates = gates
        return y


class SpeechModel(nn.Module, ABC):
    """A speech encoder, with or without a CTC head. Families fill in what is abstract here."""

    task: ClassVar[str] = "transcribe"  # what it is trained for and judged by; or "enhance": audio in, clean audio out
    Settings: ClassVar[Any]  # the frozen dataclass of what we configure beside Hugging Face's own configuration
    attention_name: ClassVar[str] = "attention"  # what a layer calls its attention
    sample_rate = 16000
    frame_rate = 50.0
    net: Any  # Hugging Face's modules; what hangs in them is theirs to say
    config: Any  # Hugging Face's configuration, or the family's own

    def __init__(self, family: str, net: nn.Module, config: Any, settings: Any, tokens: Tokens):
        super().__init__()
        self.family, self.net, self.config, self.settings, self.tokens = family, net, config, settings, tokens
        self.swaps: dict[int, Swap] = {}
        self.flow = Flow()

    @abstractmethod
    def front(self, audio: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Audio (B, S) in [-1, 1], own samples (B,) → features (B, T', C), own feature frames (B,)."""

    @abstractmethod
    def encode(self, features: Tensor, lengths: Tensor, hidden: bool = False) -> Output:
        """Features and own feature frames, as `front` gives them → logits; with `hidden`, what every layer gave too."""

    @abstractmethod
    def frames(self, samples: int) -> int:
        """Output frames for that many samples."""

    def forward(self, audio: Tensor, lengths: Tensor | None = None, hidden: bool = False) -> Output:
        return self.encode(*self.front(audio, lengths), hidden=hidden)

    def transcribe(self, source: Any, **options: Any) -> Any:
        """What is said in a file, a file's bytes or an array of samples: see `lpa.transcribe.transcribe`."""
        from ..transcribe import transcribe  # what runs models is built on them

        return transcribe(self, source, **options)

    def stream(self, chunks: Any, **options: Any) -> Any:
        """Words as soon as they are sure, while audio comes in: see `lpa.stream.stream`."""
        from ..run.torch import TorchListener

        return TorchListener(self).stream(chunks, **options)

    @property
    @abstractmethod
    def encoder(self) -> Any:
        """The Hugging Face encoder, whose `layers` hold the attention."""

    @property
    @abstractmethod
    def width(self) -> tuple[int, int]:
        """(hidden size, attention heads)."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    def sites(self) -> list[Site]:
        """Every place where attention sits, or sat, from the input on."""
        prefix = next(name for name, module in self.net.named_modules() if module is self.encoder)
        dim, heads = self.width
        path = f"{prefix}.layers" if prefix else "layers"
        return [Site(i, f"{path}.{i}.{self.attention_name}", dim, heads) for i in range(len(self.encoder.layers))]

    def sequence(self, site: Site, samples: int) -> tuple[int, float]:
        """In a recording of so many samples: the frames that a site mixes at once, and those it mixes a second."""
        return self.frames(samples), self.frame_rate

    def adapter(self, mixer: Mixer, index: int) -> nn.Module:
        """The module that puts a mixer in the place of layer `index`'s attention."""
        return MixerSite(mixer, index, self.flow)

    def base(self) -> dict[str, Any]:
        """The configuration that `create` rebuilds the unconverted network from: JSON-able, defaults spelt out."""
        full = self.config.to_dict()
        return {**{k: full[k] for k in network_fields(type(self.config))}, **asdict(self.settings)}

    @abstractmethod
    def preparation(self) -> dict[str, Any]:
        """What a runtime without torch needs to know to prepare audio."""


def network_fields(config: type[PreTrainedConfig]) -> list[str]:
    """The fields of a family's configuration that are its own, less those that say nothing about the network."""
    general = {*PreTrainedConfig().to_dict(), "num_feat_extract_layers"}  # the last follows from conv_dim
    return [k for k in config().to_dict() if k not in general]


def split_settings(family: str, data: dict[str, Any], config: type[PreTrainedConfig], settings: type) -> tuple:
    """(Hugging Face configuration, our settings) from one flat dict; an unknown or wrong field raises."""
    ours = {f.name for f in fields(settings)}
    unknown = sorted(set(data) - ours - set(network_fields(config)))
    if unknown:
        raise LpaError(
            f"{family} has no setting {', '.join(unknown)}; see {config.__name__} and {', '.join(sorted(ours))}"
        )
    try:
        hf = config(**{k: v for k, v in data.items() if k not in ours})
        return hf, settings(**{k: v for k, v in data.items() if k in ours})
    except LpaError:
        raise
    except Exception as error:  # transformers raises several kinds here, one of them its hub library's own
        raise LpaError(f"{family} configuration is not valid: {' '.join(str(error).split())}") from error


def check_audio(audio: Tensor, lengths: Tensor | None, shortest: int) -> Tensor:
    """The lengths, once audio and lengths are seen to fit each other; `shortest`: samples that make one frame."""
    if audio.dim() != 2 or not audio.is_floating_point():
        raise LpaError(f"audio is {tuple(audio.shape)} {audio.dtype}; it must be (batch, samples), floating point")
    rows, samples = audio.shape
    if samples < shortest:
        raise LpaError(f"audio of {samples} samples is too short for one frame; it needs {shortest}")
    if lengths is None:
        return torch.full((rows,), samples, device=audio.device)
    if lengths.shape != (rows,):
        raise LpaError(f"lengths are {tuple(lengths.shape)} for {rows} recordings; give one number each")
    if may_look(lengths) and bool(((lengths < 0) | (lengths > samples)).any()):
        raise LpaError(f"lengths {lengths.tolist()} do not fit {samples} samples of audio")
    return lengths.to(audio.device, torch.int64)
