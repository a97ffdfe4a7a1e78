"""The runtimes: each hears audio with a model folder's network, and none needs another's framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LpaError, choose
from ..tokens import Tokens
from .field import Field, samples_of_a_frame

if TYPE_CHECKING:
    from ..formats import Transcript

DEFAULT = Path(__file__).parents[1] / "models" / "default"  # the model that comes with the package


@dataclass(frozen=True)
class Facts:
    """What a plan says about running its network: no weights needed."""

    shortest: int  # samples that make one frame
    longest: float | None  # seconds it has positions for; None: any length
    heads: int
    attention: int  # layers that keep their attention
    frame_bytes: int  # memory that one pass takes for every frame, attention's scores not counted

    @classmethod
    def of(cls, family: str, base: dict[str, Any], swapped: int) -> Facts:
        if family == "whisper":
            longest = base["max_source_positions"] / 50 if base["positions"] else None
            layers, heads = base["encoder_layers"], base["encoder_attention_heads"]
            return cls(1, longest, heads, layers - swapped, 4 * (4 * base["encoder_ffn_dim"] + 8 * base["d_model"]))
        samples = samples_of_a_frame(base)
        first = base["conv_dim"][0] * np.prod(base["conv_stride"][1:])  # numbers a frame after the first convolution
        layers, heads = base["num_hidden_layers"], base["num_attention_heads"]
        return cls(samples, None, heads, layers - swapped, int(4 * 3 * first))


class Listener(ABC):
    """A model ready to hear one recording at a time."""

    backend: str
    tokens: Tokens
    sample_rate: int
    frame_rate: float
    facts: Facts
    field: Field
    room: float = 300e6  # bytes that a block of a long recording may take

    @abstractmethod
    def run(self, samples: np.ndarray) -> np.ndarray:
        """Samples (S,) float32 in [-1, 1] → CTC logits (T, V) float32, in one pass."""

    @property
    def stride(self) -> int:
        """Samples from one frame to the next."""
        return round(self.sample_rate / self.frame_rate)

    @abstractmethod
    def attention_bytes(self, frames: int) -> int:
        """Memory that attention alone takes at its peak in one pass over so many frames; 0 where it has no square."""

    def hear(self, samples: np.ndarray) -> np.ndarray:
        """`run`, once the model is seen to take audio of this length."""
        seconds, longest = len(samples) / self.sample_rate, self.facts.longest
        if len(samples) < self.facts.shortest:
            raise LpaError(f"{len(samples)} samples are too short for one frame; it takes {self.facts.shortest}")
        if longest is not None and len(samples) > longest * self.sample_rate:
            raise LpaError(
                f"{seconds:.0f} s of audio, but this model hears {longest:g} s at once; cut it with --chunk {longest:g}"
            )
        return self.run(samples)

    def limit(self, seconds: float) -> None:
        """Look no more than so many seconds ahead; a runtime that cannot change its network says so."""
        if self.field.whole:
            raise LpaError(f"the lookahead cannot be limited: this model takes whole recordings ({self.field.whole})")
        ahead = self.field.ahead / self.sample_rate
        if ahead > seconds:
            raise LpaError(
                f"this {self.backend} model looks {ahead:.2f} s ahead and cannot be changed; "
                f"export it again with --latency {seconds:g}, or use --backend torch"
            )

    def settle(self, device: str, compiled: bool) -> None:
        """Work on a device, with mixers compiled; only torch can."""
        raise LpaError(f"{self.backend} has no --device and no --compile; add --backend torch")

    def transcribe(self, source: str | Path | bytes | np.ndarray, **options: Any) -> Transcript:
        """What is said in a file, a file's bytes or an array of samples: see `lpa.transcribe.transcribe`."""
        from ..transcribe import transcribe

        return transcribe(self, source, **options)

    def stream(self, chunks: Iterable[np.ndarray], **options: Any) -> Iterator[Transcript]:
        """Words as soon as they are sure, while audio comes in: see `lpa.stream.stream`."""
        from ..stream import stream

        return stream(self, chunks, **options)


def open_onnx(source: str | Path) -> Listener:
    from .onnx import OnnxListener

    return OnnxListener(Path(source))


def open_mlx(source: str | Path) -> Listener:
    from .mlx import MlxListener

    return MlxListener(Path(source))


def open_torch(source: str | Path) -> Listener:
    from .torch import TorchListener

    return TorchListener.load(source)


BACKENDS = {"mlx": open_mlx, "onnx": open_onnx, "torch": open_torch}


def open_model(
    source: str | Path,
    backend: str | None = None,
    latency: float | None = None,
    device: str = "cpu",
    compiled: bool = False,
) -> Listener:
    """A model in a backend; in ONNX Runtime where nothing is said and the folder has model.onnx.

    latency: look no more than so many seconds ahead. device, compiled: torch's device, and its compiler for the mixers,
    which takes a minute and pays on a GPU.
    """
    folder = find_model(str(source))
    backend = backend or ("onnx" if (Path(folder) / "model.onnx").is_file() else "torch")
    listener = choose(backend, BACKENDS, "backend")(folder)
    if latency is not None:
        listener.limit(latency)
    if compiled or device != "cpu":
        listener.settle(device, compiled)
    return listener


def find_model(name: str) -> str:
    """The folder behind `default`; any other name is its own."""
    if name != "default":
        return name
    if not (DEFAULT / "plan.json").is_file():
        raise LpaError(
            "there is no built-in model in this installation; name a folder: --model FOLDER, or lpa.load('FOLDER')"
        )
    return str(DEFAULT)


def is_export(folder: str | Path) -> bool:
    """Whether a folder holds a graph to run and no weights to work on."""
    return (Path(folder) / "model.onnx").is_file() and not (Path(folder) / "weights.safetensors").is_file()
