"""What a sweep or a conversion works with: the processes, the speech, the clock, and the one way to train a stage."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import families, train
from ..audio import RATE
from ..data import AudioBank, Batches, bucket
from ..denoise import NoisyFeed
from ..errors import LpaError
from ..families.base import SpeechModel
from ..feed import Feed, Kept
from ..journal import list_left_out
from ..recipe import TrainConfig
from ..sources import SUFFIXES, open_source, open_sources
from ..task import TASKS, Measure, task_of
from .config import Run, build, read_json, settle, write_json
from .stages import FRONT

try:
    import fcntl
except ImportError:  # Windows: there a folder cannot be claimed
    fcntl = None  # type: ignore[assignment]

CLAIM = "in-use"  # the file in a run folder that the process at work there holds a lock on
BEGUN = ("config.json", "order.json", "data.json", "left_out.jsonl")  # what a run writes before it makes anything
SPEECH = SUFFIXES | {".txt", ".npz", ".arrow"}  # with transcripts, shards and saved datasets
HELD_OUT_WORDS = 10_000  # an hour of speech, more or less: more would take longer to hear and hardly tell more


class TimeUp(Exception):
    """max_minutes are over; everything is kept, and the same command goes on."""


class Session:
    """Opened once a command. Speech is read into memory here, and nothing after this needs its folder."""

    def __init__(self, config: Run, out: Path, trains: bool = False):
        """`trains`: it has to be measured on speakers it does not hear, so some are held out if none are named."""
        self.out, self.began = Path(out), time.monotonic()
        self.accelerator = train.make_accelerator(config.training(1))
        self.main = self.accelerator.is_main_process
        self.claim = Claim(self.out) if self.main and fcntl else None
        ours = (self.out / "config.json").is_file() or not self.out.is_dir()
        self.theirs = set() if ours else {path.name for path in self.out.iterdir()} - {CLAIM}  # no run's
        try:
            self.config = self._settle(config, trains)
        except BaseException:
            self.close()
            raise
        self.feed: Feed | None = None
        self.held: Feed | None = None
        self.sources: list[dict[str, Any]] = []
        self.task = TASKS["transcribe"]

    def _settle(self, config: Run, trains: bool) -> Run:
        """The config with the speakers that are held out, which the run folder keeps; the same in every process."""
        if self.main:
            path = self.out / "config.json"
            if not config.held_out and path.is_file():
                config = dataclasses.replace(config, held_out=build(type(config), read_json(path), str(path)).held_out)
            elif not config.held_out and trains and config.sources:
                config = dataclasses.replace(config, held_out=self._hold_out(config.sources))
            settle(config, self.out)
        self.accelerator.wait_for_everyone()
        return dataclasses.replace(config, held_out=broadcast_object_list([config.held_out])[0])

    def _hold_out(self, specs: Sequence[str]) -> tuple[str, ...]:
        """The speakers to measure on where none are named; says which they are."""
        said = words_of_speakers(specs)
        chosen, whole = held_out_of(said), sum(said, Counter[str]())
        names = ", ".join(chosen[:8]) + (f" and {len(chosen) - 8} more" if len(chosen) > 8 else "")
        share = f"{sum(whole[name] for name in chosen) / whole.total():.0%} of the words"
        self.say(f"held out, to measure on: {names} ({share}); for others name them with --held-out")
        return chosen

    def close(self) -> None:
        """Let another run have the folder. Where nothing came of this one, there is none."""
        if self.claim is not None:
            self.claim.release()
        if self.main:
            with contextlib.suppress(OSError):  # it is not empty; or the folder a process works in, say
                self.out.rmdir()

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
        before = {spec: files_of(spec) for spec in config.sources}
        bank, held = train.open_banks(config.training(1), model)
        for spec, files in before.items():
            if gone := sorted(file for file in files if not file.exists()):
                what = gone[0] if Path(spec).exists() else spec
                raise LpaError(f"{what} vanished while it was read; run the same command when it is back")
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
        """Hear everything once with the front end, which no conversion trains; with `train.cache` once for all runs.

        The folder of the cache has no more of it than `front_gb` either: the oldest goes first.
        """
        assert self.feed is not None
        assert self.held is not None
        model.eval()
        training, most, used = self.config.training(1), int(self.config.front_gb * 2**30), 0
        cache = Path(training.resolve(training.cache)) if training.cache else None
        for feed in [self.feed] if self.held is self.feed else [self.feed, self.held]:
            path = cache and cache / f"front-{fingerprint(model, feed, self.config.batch_seconds)}.safetensors"
            kept = path and read_front(path, feed.device)
            if kept and kept.values.nbytes <= most - used:
                feed.kept = kept
                used += kept.values.nbytes
                continue
            used += feed.keep_front(model, most - used, self.config.batch_seconds)
            if path and self.main:
                assert feed.kept is not None
                try:
                    write_front(path, feed.kept, most)
                except (OSError, SafetensorError) as error:  # a convenience: this run has it in memory
                    self.say(f"{path} cannot be written ({error}); other runs will make it again")
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
        if self.feed is None:
            raise LpaError("there is nothing to train on; add --data")
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

    def forget(self) -> None:
        """Remove what a run has written that has not made anything yet."""
        if self.main and all(path.name in (*BEGUN, CLAIM, *self.theirs) for path in self.out.iterdir()):
            for name in set(BEGUN) - self.theirs:
                (self.out / name).unlink(missing_ok=True)

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


class Claim:
    """A run folder for one run at a time. However the process ends, the system lets go of what it has locked."""

    def __init__(self, folder: Path):
        self.path = folder / CLAIM
        for tries in count(1):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.file = self.path.open("a+")
            except OSError as error:
                if isinstance(error, FileNotFoundError) and tries < 100:
                    continue  # its owner has removed the folder in between
                raise LpaError(f"{folder} cannot be a run folder ({error.strerror}); choose another --out") from None
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                self.file.seek(0)
                who = self.file.read().strip() or "another process"
                self.file.close()
                raise LpaError(f"{who} is at work in {folder}; wait for its end, or choose another --out") from None
            except OSError:
                break  # a file system that has no locks
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self.file.fileno()), self.path.stat()):
                    break
            self.file.close()  # its owner has removed it in between
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {platform.node()}\n")
        self.file.flush()

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
        self.file.close()


@contextmanager
def started(config: Run, out: Path, trains: bool = False) -> Iterator[Session]:
    """A session. A run that fails before it has made anything leaves nothing; put right, it can have the same --out."""
    session = Session(config, out, trains)
    try:
        yield session
    except LpaError:
        session.forget()
        raise
    finally:
        session.close()


def words_of_speakers(specs: Sequence[str]) -> list[Counter[str]]:
    """How much each speaker says, source by source, by the transcripts: no audio is read for it."""
    found = []
    for source in open_sources(specs):
        words = Counter[str]()
        for utterance in source.utterances:
            words[utterance.speaker] += len(utterance.text.split())
        found.append(words)
    return found


def held_out_of(said: Sequence[Counter[str]]) -> tuple[str, ...]:
    """A tenth of the speakers, at least one; no more than a fifth of the words, nor HELD_OUT_WORDS, if that can be.

    Which ones hangs on their names alone: seeds, mixers and recipes are all measured on the same speech. `said`: words
    by speaker, of each source; each must have some left to train on.
    """
    whole = sum(said, Counter[str]())
    most = min(HELD_OUT_WORDS, whole.total() / 5)
    del whole[""]  # of nobody in particular: heard in training
    order = sorted(whole, key=lambda name: hashlib.sha256(name.encode()).digest())
    chosen: list[str] = []
    for name in order:
        more = [*chosen, name]
        if sum(whole[n] for n in more) <= most and leave_some(said, more):
            chosen = more
        if len(chosen) == max(1, round(len(order) / 10)):
            break
    alone = [name for name in order if leave_some(said, [name])]
    if not alone:
        names = ", ".join(order) or "none"
        raise LpaError(
            f"what is trained is measured on speakers it does not hear, and the data is of too few to hold one out "
            f"({names}); add --data with other speakers"
        )
    return tuple(chosen or [min(alone, key=whole.__getitem__)])


def leave_some(said: Sequence[Counter[str]], without: Sequence[str]) -> bool:
    return all(words.keys() - set(without) for words in said)


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


def files_of(spec: str) -> set[Path]:
    """The files of a source that are there now; what is beside its speech does not count."""
    path = Path(spec)
    if path.is_dir():
        return {file for file in path.rglob("*") if file.suffix.lower() in SPEECH and file.is_file()}
    if not path.is_file():
        return set()
    named = [utterance.audio for utterance in open_source(spec).utterances]
    return {path} | {audio for audio in named if isinstance(audio, Path) and audio.is_file()}


# --- what the front end has made, on disk


def fingerprint(model: SpeechModel, feed: Feed, batch_seconds: float) -> str:
    """Tells what a front end makes of a bank from what another, or the same in other batches, makes of it."""
    digest = hashlib.sha256(repr((model.family, model.base(), feed.device.type, batch_seconds)).encode())
    for name, parameter in model.named_parameters():
        if FRONT in name:
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    digest.update(np.ascontiguousarray(feed.bank.lengths).tobytes())
    digest.update(feed.bank.samples.data)
    return digest.hexdigest()[:24]


def read_front(path: Path, device: torch.device) -> Kept | None:
    """What a front end has made, from the disk; None: it is not there, or no use."""
    try:
        found = load_file(path, device=str(device))
        kept = Kept(found["values"], found["starts"].cpu().numpy(), found["lengths"].cpu().numpy())
        with contextlib.suppress(PermissionError):  # it is somebody else's
            os.utime(path)  # what is used is not the oldest
    except (OSError, SafetensorError, KeyError):
        return None
    return kept


def write_front(path: Path, kept: Kept, most: int) -> None:
    """A file that is there whole or not at all; the oldest of its kind go until no more than `most` bytes are left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    arrays = {"starts": torch.from_numpy(kept.starts), "lengths": torch.from_numpy(kept.lengths)}
    try:
        save_file({"values": kept.values.cpu(), **arrays}, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sizes = {}
    for file in path.parent.glob("front-*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # another run has just removed it
            sizes[file] = (file.stat().st_mtime_ns, file.stat().st_size)
    for file in sorted(sizes, key=lambda file: sizes[file][0]):
        if file != path and sum(size for _, size in sizes.values()) > most:
            file.unlink(missing_ok=True)
            del sizes[file]
