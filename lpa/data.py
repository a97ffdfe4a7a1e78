"""Speech decoded once into a flat bank, the batches drawn from it, and what `lpa data check` says of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from . import audio
from .errors import LpaError
from .sources import (
    CACHE_BYTES,
    Bad,
    Progress,
    Source,
    Utterance,
    decode,
    decode_cached,
    open_shards,
    open_source,
    open_sources,
    shards,
    spread,
)

__all__ = [
    "AudioBank",
    "Batches",
    "Source",
    "Utterance",
    "check",
    "fits",
    "open_source",
    "open_sources",
    "rejecter",
    "show",
    "spread",
]

Reject = Callable[[str, int], str | None]  # (text, samples) -> why it cannot be used
SHARDS_AT_ONCE = 64  # read by threads side by side; all of them would fill the memory twice


def fits(ids: Sequence[int], frames: int) -> bool:
    """Whether CTC can spell these tokens in that many frames: one each, and a blank between two that are the same."""
    repeats = sum(a == b for a, b in pairwise(ids))
    return len(ids) + repeats <= frames


def rejecter(tokens, frames: Callable[[int], int], longest: float | None = None) -> Callable[[str, int], str | None]:
    """A bank's `reject`: why (text, samples) cannot be trained on, by the alphabet and the model's count of frames."""

    def reject(text: str, samples: int) -> str | None:
        if longest is not None and samples > longest * audio.RATE:
            return f"lasts {samples / audio.RATE:.1f} s, more than {longest:g}"
        if not fits(tokens.encode(text), frames(samples)):
            return f"its transcript of {len(text)} characters is longer than its {frames(samples)} CTC frames"
        return None

    return reject


class AudioBank:
    """All audio of some sources as one flat int16 array, with where each utterance starts and what is said in it.

    samples (S,) int16; for utterance i: offsets[i], lengths[i] (samples), texts[i], ids[i], speakers[i], source[i]
    (which of the sources) and part[i] (which shard, an index into part_names). `bad` lists what was left out, and why.
    """

    def __init__(
        self,
        sources: Sequence[Source | str],
        *,
        reject: Reject | None = None,
        workers: int | None = None,
        cache: Path | str | None = None,
        cache_bytes: int = CACHE_BYTES,
        progress: Progress | None = None,
    ):
        self.sources = [open_source(s) if isinstance(s, str) else s for s in sources]
        self.reject, self.workers = reject, workers
        self._buffer, self._used = np.empty(0, np.int16), 0
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.speakers: list[str] = []
        self.part_names: list[str] = []
        self.offsets, self.lengths = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.source, self.part = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.bad: Bad = [b for s in self.sources for b in s.bad]
        total, before = sum(len(s.utterances) for s in self.sources), 0
        for number, source in enumerate(self.sources):
            tell = _shifted(progress, before, total) if progress else None
            cached = decode_cached(source, Path(cache) if cache else None, cache_bytes, workers, tell)
            self._take(number, cached)
            before += len(source.utterances)
        if not len(self) and self.bad:
            raise LpaError(f"no utterance can be used; first fault: {self.bad[0][0]}: {self.bad[0][1]}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def samples(self) -> np.ndarray:
        return self._buffer[: self._used]

    @property
    def hours(self) -> float:
        return float(self.lengths.sum()) / audio.RATE / 3600

    def clip(self, index: int) -> np.ndarray:
        """(S,) int16"""
        return self.samples[self.offsets[index] : self.offsets[index] + self.lengths[index]]

    def gather(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A padded batch: audio (B, S) float32 in [-1, 1), lengths (B,) in samples."""
        lengths = self.lengths[indices]
        batch = np.zeros((len(lengths), int(lengths.max())), np.float32)
        for row, index in enumerate(indices):
            batch[row, : lengths[row]] = audio.to_float(self.clip(index))
        return batch, lengths

    def parts(self) -> dict[str, int]:
        """How many utterances of each part (a shard, or a source that is not packed) are in the bank."""
        counts = np.bincount(self.part, minlength=len(self.part_names))
        return {name: int(count) for name, count in zip(self.part_names, counts, strict=True)}

    def new_shards(self) -> list[str]:
        """Parts that have appeared on the disk since they were last taken in."""
        known = set(self.part_names)
        return [
            name
            for number, source in enumerate(self.sources)
            if source.packed
            for shard in shards(Path(source.spec))
            if (name := f"{number}/{shard.name}") not in known
        ]

    def extend(self, parts: Sequence[str] | None = None) -> int:
        """Take in shards that have appeared (or just `parts`, so that many processes agree); the utterances that came.

        They join the end: what is in the bank keeps its place, so a copy of it on a device needs only the new samples.
        """
        before, names = len(self), dict.fromkeys(self.new_shards() if parts is None else parts)
        for number, source in enumerate(self.sources):
            mine = [n for n in names if n.startswith(f"{number}/") and n not in self.part_names]
            for some in (mine[i : i + SHARDS_AT_ONCE] for i in range(0, len(mine), SHARDS_AT_ONCE)):
                found = open_shards(Path(source.spec), [Path(source.spec, name.partition("/")[2]) for name in some])
                self.bad += found.bad
                self._take(number, decode(found.utterances, self.workers), *some)
        return len(self) - before

    def _take(self, number: int, decoded: Iterable, *names: str) -> None:
        """Append what decodes; `names` are parts to register even when nothing in them does."""
        rows: list[tuple[int, int, int]] = []  # offset, length, part
        index = {name: i for i, name in enumerate(self.part_names)}
        for name in names:
            index.setdefault(name, len(index))
        for utterance, clip in decoded:
            why = clip if isinstance(clip, str) else self.reject and self.reject(utterance.text, len(clip))
            name = str(number) if utterance.row is None else f"{number}/{utterance.audio.name}"
            part = index.setdefault(name, len(index))
            if why:
                self.bad.append((utterance.id, why))
                continue
            rows.append((self._append(clip), len(clip), part))
            self.ids.append(utterance.id)
            self.texts.append(utterance.text)
            self.speakers.append(utterance.speaker)
        self.part_names = list(index)
        offsets, lengths, parts = np.array(rows, np.int64).reshape(-1, 3).T
        self.offsets = np.concatenate([self.offsets, offsets])
        self.lengths = np.concatenate([self.lengths, lengths])
        self.part = np.concatenate([self.part, parts.astype(np.int32)])
        self.source = np.concatenate([self.source, np.full(len(rows), number, np.int32)])

    def _append(self, clip: np.ndarray) -> int:
        """The buffer grows by half at a time (unused pages cost nothing), so that many appends stay linear."""
        start, end = self._used, self._used + len(clip)
        if end > len(self._buffer):
            grown = np.empty(max(end, len(self._buffer) * 3 // 2, 2**22), np.int16)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start:end] = clip
        self._used = end
        return start


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


def bucket(lengths: np.ndarray, limit: float, rng: np.random.Generator, jitter: float = 0.05) -> list[np.ndarray]:
    """Batches of like lengths, in random order, each of at most `limit` when padded (longest x count).

    What is longer than the limit is a batch of its own. Lengths are jittered before they are sorted, so that the same
    utterances do not always meet.
    """
    lengths = np.asarray(lengths)
    order = np.argsort(lengths * rng.uniform(1 - jitter, 1 + jitter, len(lengths)), kind="stable")
    batches, start, longest = [], 0, 0
    for end, index in enumerate(order):
        longest = max(longest, lengths[index])
        if end > start and longest * (end - start + 1) > limit:
            batches.append(order[start:end])
            start, longest = end, lengths[index]
    if start < len(order):
        batches.append(order[start:])
    return [batches[i] for i in rng.permutation(len(batches))]


class Batches:
    """An endless, seeded sequence of batches from a bank, and the place in it.

    Without `shares` an epoch is every utterance once. With them (one a source, relative, of the seconds heard) it is
    the first source once, and as much of the others as keeps to the shares, taken in turn from epoch to epoch;
    `epoch_seconds`, if not 0, makes it that long instead. New parts of the bank join when an epoch begins; which ones
    the epoch knows is in the state, so that a run that resumes finds the same batches though more shards have come.
    A global batch is the same for any number of processes: each takes every world-th utterance of it (maybe none).
    """

    def __init__(
        self,
        bank: AudioBank,
        batch_seconds: float,
        *,
        seed: int = 0,
        shares: Sequence[float] | None = None,
        epoch_seconds: float = 0.0,
        rank: int = 0,
        world: int = 1,
    ):
        if shares is not None and (len(shares) != len(bank.sources) or min(shares) <= 0):
            raise LpaError(f"{len(bank.sources)} sources need as many shares above 0; got {list(shares)}")
        self.bank, self.batch_seconds, self.seed, self.shares = bank, batch_seconds, seed, shares
        self.epoch_seconds, self.rank, self.world = epoch_seconds, rank, world
        self.epoch, self.position = 0, 0
        self.parts = bank.parts()
        self._plan: list[np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches in this epoch."""
        return len(self.plan())

    def plan(self) -> list[np.ndarray]:
        """The global batches of this epoch, as indices into the bank."""
        if self._plan is None:
            chosen = self._epoch()
            rng = np.random.default_rng([self.seed, self.epoch])
            plan = bucket(self.bank.lengths[chosen], self.batch_seconds * audio.RATE, rng)
            self._plan = [chosen[batch] for batch in plan]
        return self._plan

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """(this process's share of the next global batch, the whole of it), as indices into the bank."""
        if self.position == len(self.plan()):
            self.epoch, self.position, self.parts, self._plan = self.epoch + 1, 0, self.bank.parts(), None
        whole = self.plan()[self.position]
        self.position += 1
        return whole[self.rank :: self.world], whole

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position, "parts": dict(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        have = self.bank.parts()
        for name, count in state["parts"].items():
            if have.get(name) != count:
                raise LpaError(
                    f"cannot resume: part {name} of the data had {count} utterances and now has {have.get(name, 0)}"
                )
        if state["seed"] != self.seed:
            raise LpaError(f"cannot resume: the run was started with seed {state['seed']}, not {self.seed}")
        self.epoch, self.position, self.parts = state["epoch"], state["position"], dict(state["parts"])
        self._plan = None
        if self.position > len(self.plan()):
            raise LpaError("cannot resume: the batches are not those of the run; was batch_seconds or shares changed?")

    def _epoch(self) -> np.ndarray:
        """This epoch's utterances, in an order that depends on the parts' names and not on when they came."""
        pools = [self._pool(number) for number in range(len(self.bank.sources))]
        if not any(map(len, pools)):
            raise LpaError(f"no speech to draw batches from yet in {', '.join(s.spec for s in self.bank.sources)}")
        if self.shares is None and not self.epoch_seconds:
            return np.concatenate(pools)
        sizes = [int(self.bank.lengths[pool].sum()) for pool in pools]  # samples
        shares = [share if size else 0.0 for share, size in zip(self.shares or sizes, sizes, strict=True)]
        first = next(i for i, size in enumerate(sizes) if size)  # a source that is still empty sets nothing
        whole = self.epoch_seconds * audio.RATE or sizes[first] * sum(shares) / shares[first]
        chosen = []
        for number, pool in enumerate(pools):
            order = np.random.default_rng([self.seed, number]).permutation(pool)
            chosen.append(self._turn(order, round(whole * shares[number] / sum(shares))))
        return np.concatenate(chosen)

    def _turn(self, order: np.ndarray, budget: int) -> np.ndarray:
        """The stretch of `budget` samples that is this epoch's turn, of utterances laid end to end, over and over."""
        if not len(order) or not budget:
            return order[:0]
        lengths = self.bank.lengths[order]
        starts, lap = np.cumsum(lengths) - lengths, int(lengths.sum())
        low = self.epoch * budget
        laps = np.arange(low // lap, -(-(low + budget) // lap))
        starts = (laps[:, None] * lap + starts).ravel()
        return np.tile(order, len(laps))[(starts >= low) & (starts < low + budget)]

    def _pool(self, number: int) -> np.ndarray:
        """The utterances of one source that this epoch knows."""
        order = {name: place for place, name in enumerate(sorted(self.parts))}
        places = np.array([order.get(name, -1) for name in self.bank.part_names])[self.bank.part]
        mine = np.flatnonzero((self.bank.source == number) & (places >= 0))
        return mine[np.argsort(places[mine], kind="stable")]


def check(spec: str, *, workers: int | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """What a source holds, found by decoding every file: utterances, hours, speakers, splits, extremes, what is bad."""
    source = open_source(spec)
    bad, lengths, good = list(source.bad), [], []
    for utterance, clip in decode(source.utterances, workers, progress):
        if isinstance(clip, str):
            bad.append((utterance.id, clip))
        else:
            good.append(utterance)
            lengths.append(len(clip) / audio.RATE)
    splits = {}
    for split in sorted({u.split for u in good}):
        mine = [i for i, u in enumerate(good) if u.split == split]
        splits[split] = _summary([good[i] for i in mine], [lengths[i] for i in mine])
    return {
        "source": spec,
        **_summary(good, lengths),
        "shortest_seconds": round(min(lengths, default=0.0), 3),
        "longest_seconds": round(max(lengths, default=0.0), 3),
        "splits": splits,
        "bad": [{"what": what, "why": why} for what, why in bad],
    }


def _summary(utterances: list[Utterance], lengths: list[float]) -> dict[str, Any]:
    return {
        "utterances": len(utterances),
        "hours": round(sum(lengths) / 3600, 4),
        "speakers": len({u.speaker for u in utterances if u.speaker}),
        "words": sum(len(u.text.split()) for u in utterances),
    }


def show(report: dict[str, Any], console, most: int = 20) -> None:
    """Print a check's report on a rich console."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(report["source"]))
    table.add_column("split")
    columns = ("utterances", "hours", "speakers", "words")
    for column in columns:
        table.add_column(column, justify="right")
    rows = [*report["splits"].items()] if len(report["splits"]) > 1 else []
    for name, row in [*rows, ("all", report)]:
        table.add_row(escape(name), *(f"{row[c]:,}" if c != "hours" else f"{row[c]:.2f}" for c in columns))
    console.print(table)
    console.print(f"shortest {report['shortest_seconds']:.2f} s, longest {report['longest_seconds']:.2f} s")
    bad = report["bad"]
    console.print(f"{len(bad)} bad" if bad else "nothing bad")
    for entry in bad[:most]:
        console.print(f"  {escape(entry['what'])}: {escape(entry['why'])}", soft_wrap=True)
    if len(bad) > most:
        console.print(f"  and {len(bad) - most} more; --json lists them all")
