"""What a sweep or a conversion works with: the processes, the speech, the clock, and the one way to train a stage."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from .. import families, train
from ..audio import RATE
from ..data import AudioBank, Batches, bucket
from ..denoise import NoisyFeed
from ..errors import LpaError
from ..families.base import SpeechModel
from ..feed import Feed
from ..journal import list_left_out
from ..recipe import TrainConfig
from ..task import TASKS, Measure, task_of
from .config import Run, read_json, settle, write_json


class TimeUp(Exception):
    """max_minutes are over; everything is kept, and the same command goes on."""


class Session:
    """Opened once a command. Speech is read into memory here, and nothing after this needs its folder."""

    def __init__(self, config: Run, out: Path):
        self.config, self.out, self.began = config, Path(out), time.monotonic()
        self.accelerator = train.make_accelerator(config.training(1))
        self.main = self.accelerator.is_main_process
        if self.main:
            settle(config, self.out)
        self.accelerator.wait_for_everyone()
        self.feed: Feed | None = None
        self.held: Feed | None = None
        self.sources: list[dict[str, Any]] = []
        self.task = TASKS["transcribe"]

    def load(self, source: str | Path) -> SpeechModel:
        """A model on the device of this process; what it is for decides what it hears and how it is judged."""
        model = families.load(source).to(self.accelerator.device)
        self.task = task_of(model)
        return model

    @property
    def measure(self) -> Measure:
        return self.task.measure

    def listen(self, model: SpeechModel) -> None:
        """Read the speech. It must be what it was when the run began, or the run would not be the same."""
        config = self.config
        if not config.sources:
            return
        bank, held = train.open_banks(config.training(1), model)
        for spec in config.sources:
            if not spec.startswith("hf:") and not Path(spec).exists():
                raise LpaError(f"{spec} vanished while it was read; run the same command when it is back")
        self._recognise(bank, held)
        device, training = self.accelerator.device, config.training(1)
        self.feed = self.task.feed(model, bank, device, training)
        self.held = self.feed if held is None else self.task.feed(model, held, device, training)
        if config.front_gb:
            if model.task == "enhance":
                raise LpaError("the noise is new in every batch: the front end cannot be kept; set front_gb to 0")
            self._keep_front(model)
        seconds = np.bincount(bank.source, weights=bank.lengths / RATE, minlength=len(config.sources)).tolist()
        shares = config.shares or seconds
        self.sources = [{"path": path, "share": s} for path, s in zip(config.sources, shares, strict=True)]

    def _keep_front(self, model: SpeechModel) -> None:
        """Hear everything once with the front end, which no conversion trains."""
        assert self.feed is not None
        assert self.held is not None
        model.eval()
        most = int(self.config.front_gb * 2**30)
        used = self.feed.keep_front(model, most, self.config.batch_seconds)
        if self.held is not self.feed:
            used += self.held.keep_front(model, most - used, self.config.batch_seconds)
        self.say(f"front end: {used / 2**30:.2f} GB kept")

    def _recognise(self, bank: AudioBank, held: AudioBank | None) -> None:
        found = {"training": describe(bank), "held_out": describe(held) if held else None}
        path = self.out / "data.json"
        if path.is_file() and read_json(path) != found:
            then, now = read_json(path)["training"]["utterances"], found["training"]["utterances"]  # type: ignore[index]
            raise LpaError(
                f"{', '.join(self.config.sources)} is not what this run began with ({now} utterances to train on, "
                f"{then} then); put the data back and run the same command"
            )
        if self.main:
            write_json(path, found)
            list_left_out(bank.bad + (held.bad if held else []), self.out / "left_out.jsonl")

    def training(self, steps: int, **changes: Any) -> TrainConfig:
        """The loop's settings, within the time that is left."""
        if self.config.max_minutes:
            left = [self.config.max_minutes - (time.monotonic() - self.began) / 60]
            changes["max_minutes"] = broadcast_object_list(left)[0]  # the first process's clock counts
            if changes["max_minutes"] <= 0:
                raise TimeUp
        return self.config.training(steps, sources=self.sources, **changes)

    def epoch(self, seed: int) -> int:
        """Batches in an epoch, as `fit` will draw them."""
        assert self.feed is not None
        shares = [s["share"] for s in self.sources] if len(self.sources) > 1 else None
        seconds = self.config.training(1).epoch_seconds
        return len(Batches(self.feed.bank, self.config.batch_seconds, seed=seed, shares=shares, epoch_seconds=seconds))

    def fit(self, model: SpeechModel, config: TrainConfig, folder: Path, **arguments: Any) -> None:
        """Train to the end, or raise TimeUp. A stage that was finished before is restored and trained no further."""
        if self.feed is None:
            raise LpaError("there is nothing to train on; add --data")
        folder.mkdir(parents=True, exist_ok=True)
        if not train.fit(model, self.feed, config, folder, self.accelerator, **arguments):
            raise TimeUp

    def lacks(self, path: Path) -> bool:
        """Whether something is still to be made. All processes have looked before one makes it."""
        missing = not path.exists()
        self.accelerator.wait_for_everyone()
        return missing

    def say(self, text: str) -> None:
        """A line on stderr, once for all processes."""
        self.accelerator.print(text, file=sys.stderr)

    def judge(self, model: SpeechModel) -> float | None:
        """The measure on the held-out speakers (all there is, where none are held out); None: it cannot be taken."""
        if self.held is None or (model.task == "transcribe" and not model.settings.head):
            return None
        return self.task.evaluation(self.held, self.accelerator, self.config.batch_seconds)(model)[self.measure.name]

    def hear(self, training: bool = False, seconds: float = math.inf) -> Iterator[tuple[Tensor, Any]]:
        """The batches that things are measured on (or those trained on), the same every time: audio, lengths.

        `seconds` of them at most, in whole batches.
        """
        feed: Any = self.feed if training else self.held
        if isinstance(feed, NoisyFeed):
            yield from ((noisy, None) for noisy, _ in feed.held(self.config.batch_seconds))
            return
        lengths = feed.bank.lengths
        order = bucket(lengths, self.config.batch_seconds * RATE, np.random.default_rng(0), jitter=0.0)
        for index in order if seconds == math.inf else order[: math.ceil(seconds / self.config.batch_seconds)]:
            yield feed.clean(index)


@contextmanager
def measuring(session: Session, model: SpeechModel) -> Iterator[None]:
    """Eval mode, no gradients, the precision of training."""
    model.eval()
    with torch.no_grad(), session.accelerator.autocast():
        yield


def layers_of(model: Any, kind: str) -> list[int]:
    """The layers of a model that are to be looked at: all that have their attention, or those of a kind."""
    if kind and model.task != "enhance":
        raise LpaError(f"{model.family} has one kind of attention; leave out kind")
    found = [site.index for site in (model.sites(kind) if kind else model.sites()) if site.index not in model.swaps]
    if not found:
        raise LpaError(f"the model has no {kind + ' ' if kind else ''}attention left to replace")
    return found


def describe(bank: AudioBank) -> dict[str, Any]:
    digest = hashlib.sha256("\n".join(f"{i} {n}" for i, n in zip(bank.ids, bank.lengths, strict=True)).encode())
    return {"utterances": len(bank), "hours": round(bank.hours, 4), "digest": digest.hexdigest()[:16]}
