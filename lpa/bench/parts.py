"""Where a torch model's time goes: front end, mixers and feed-forward layers, in the very passes that are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..families.base import SpeechModel

PARTS = ("front", "mixers", "ffn")


class Parts:
    """Seconds of each part of a model, summed over the passes since `reset`. For the CPU, where a call is its work."""

    def __init__(self, model: SpeechModel, now: Callable[[], float] = time.perf_counter):
        self.model, self.now = model, now
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.start = 0.0
        encoder: Any = model.encoder
        whisper = model.family == "whisper"
        for site in model.sites():
            self.watch("mixers", model.net.get_submodule(site.path))
        for layer in encoder.layers:
            self.watch("ffn", layer.fc1, layer.fc2) if whisper else self.watch("ffn", layer.feed_forward)
        if whisper:  # its first convolutions come after the features
            self.watch("front", encoder.conv1, encoder.conv2)

    def watch(self, part: str, first: nn.Module, last: nn.Module | None = None) -> None:
        """Count the time from a module's start to its end, or to a later module's."""
        first.register_forward_pre_hook(self.begin)
        (last or first).register_forward_hook(self.end(part))

    def begin(self, *_: Any) -> None:
        self.start = self.now()

    def end(self, part: str) -> Callable[..., None]:
        def add(*_: Any) -> None:
            self.seconds[part] += self.now() - self.start

        return add

    def run(self, audio: Tensor) -> None:
        """One pass."""
        self.begin()
        features = self.model.front(audio)
        self.end("front")()
        self.model.encode(*features)

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
