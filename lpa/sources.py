"""Where speech comes from: LibriSpeech, manifests, packed shards, Hugging Face datasets; listed first, then decoded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from . import audio
from .errors import LpaError
from .score import normalise

SUFFIXES = {".flac", ".wav", ".opus", ".ogg", ".oga", ".mp3", ".aiff", ".aif", ".au", ".caf", ".w64"}
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript")
CACHE_BYTES = 16 * 2**30  # the decode cache never grows past this; its oldest entries go first

Progress = Callable[[int, int], None]  # (utterances done, utterances in all)
Bad = list[tuple[str, str]]  # (what, why it was left out)


@dataclass(frozen=True)
class HubAudio:
    """One row of a Hugging Face dataset, read when it is needed."""

    dataset: Any = field(repr=False, compare=False)
    row: int
    name: str

    def read(self) -> np.ndarray:
        entry = self.dataset[self.row]["audio"]
        source = entry["bytes"] or entry["path"]
        if not source:
            raise LpaError(f"{self.name} has no audio")
        return audio.read(source, name=self.name)


@dataclass(frozen=True)
class Utterance:
    """One recording and what is said in it."""

    id: str
    audio: Path | HubAudio
    text: str  # normalised
    speaker: str = ""
    split: str = ""
    seconds: float | None = None  # where the source says so; a bank knows them all
    row: int | None = None  # its place, where `audio` is a packed shard


@dataclass
class Source:
    """What a folder, manifest or dataset holds, and what in it is no use."""

    spec: str
    utterances: list[Utterance]
    bad: Bad
    packed: bool = False  # a folder of shards, where more may appear


def open_source(
    spec: str, *, include: Iterable[str] = (), exclude: Iterable[str] = (), growing: bool = False
) -> Source:
    """LibriSpeech, a JSONL manifest, a folder of packed shards, a saved dataset or `hf:NAME[:SPLIT]`.

    A `growing` folder is one of shards that may be empty, or not even there yet. For the rest see open_sources.
    """
    return open_sources([spec], include=include, exclude=exclude, growing=[spec] if growing else ())[0]


def open_sources(
    specs: Sequence[str], *, include: Iterable[str] = (), exclude: Iterable[str] = (), growing: Sequence[str] = ()
) -> list[Source]:
    """Sources by name, with only the speakers of `include` (where given) and none of `exclude`; audio is not read yet.

    A speaker who is in none of the sources is an error: a misspelt name would hold nobody out.
    """
    sources = [_open_growing(Path(spec)) if spec in growing else _open(str(spec)) for spec in specs]
    include, exclude = {str(s) for s in include}, {str(s) for s in exclude}
    unknown = (include | exclude) - {u.speaker for s in sources for u in s.utterances}
    if unknown:
        raise LpaError(f"no speaker {', '.join(sorted(unknown))} in {', '.join(map(str, specs))}; check the names")
    for source in sources:
        left = [u for u in source.utterances if u.speaker not in exclude]
        source.utterances = [u for u in left if not include or u.speaker in include]  # some sources may have none
        if not left and source.spec not in growing:
            why = f"; first fault: {source.bad[0][0]}: {source.bad[0][1]}" if source.bad else ""
            raise LpaError(f"{source.spec} holds no utterance that can be used{why}")
    return sources


def spread(found: Sequence[Any], most: int) -> list[Any]:
    """At most so many, spread evenly over all and so over the speakers."""
    if most < 1:
        raise LpaError(f"limit must be at least 1, not {most}")
    picks = np.unique(np.linspace(0, len(found) - 1, min(most, len(found))).astype(int))
    return [found[i] for i in picks]


def _open(spec: str) -> Source:
    if spec.startswith("hf:"):
        return _hub(spec)
    path = Path(spec)
    if path.is_file():
        return _manifest(path)
    if not path.is_dir():
        raise LpaError(f"{spec} is not there; give a folder, a JSONL manifest or hf:NAME[:SPLIT]")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved_dataset(path)
    if found := shards(path):
        return open_shards(path, found)
    if next(path.rglob("*.trans.txt"), None):
        return _librispeech(path)
    raise LpaError(f"{spec} holds no speech; expected LibriSpeech (*.trans.txt) or packed shards (*.npz) in it")


def _open_growing(folder: Path) -> Source:
    if folder.is_dir() and any(folder.iterdir()) and not shards(folder) and not any(folder.glob("*.part")):
        raise LpaError(f"{folder} holds other things than packed shards (*.npz); only a folder of shards can grow")
    return open_shards(folder, shards(folder))


def _librispeech(root: Path) -> Source:
    found, bad = [], []
    for transcript in sorted(root.resolve().rglob("*.trans.txt")):
        chapter = transcript.parent
        files = {p.stem: p for p in sorted(chapter.iterdir()) if p.suffix.lower() in SUFFIXES}
        try:
            lines = transcript.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            bad.append((str(transcript), "is not UTF-8 text"))
            lines = []
        for line in filter(str.strip, lines):
            name, _, text = line.strip().partition(" ")
            text = normalise(text)
            path = files.pop(name, None)
            if path is None:
                bad.append((f"{chapter / name}.*", f"no audio file for this line of {transcript.name}"))
            elif not text:
                bad.append((str(path), f"its transcript in {transcript.name} has no words"))
            else:
                found.append(Utterance(name, path, text, chapter.parent.name, chapter.parent.parent.name))
        bad += [(str(path), f"no line for it in {transcript.name}") for path in files.values()]
    return Source(str(root), found, bad)


def _manifest(path: Path) -> Source:
    found, bad = [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise LpaError(f"{path} is not UTF-8 text; a manifest has one JSON object a line") from None
    if not any(map(str.strip, lines)):
        raise LpaError(f"{path} is empty; a manifest has one JSON object a line with audio and text")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
            file, text = entry["audio"], normalise(entry["text"])
            found_here = Utterance(
                str(entry.get("id", file)), path.parent / file, text, str(entry.get("speaker", "")),
                seconds=float(entry["seconds"]) if "seconds" in entry else None,
            )  # fmt: skip
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
            bad.append((where, f"not a JSON object with audio and text ({type(error).__name__}: {error})"))
            continue
        if text:
            found.append(found_here)
        else:
            bad.append((where, "its text has no words"))
    return Source(str(path), found, bad)


def shards(folder: Path) -> list[Path]:
    """Whole shards only: one that is being written has another suffix until it is renamed."""
    return sorted(folder.glob("*.npz"))


def open_shards(folder: Path, paths: Sequence[Path]) -> Source:
    """The utterances of some of a folder's shards."""
    found, bad = [], []
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as shard:
                texts = shard["text"].tolist()
                speakers = shard["speaker"].tolist() if "speaker" in shard.files else [""] * len(texts)
                seconds = (shard["lengths"] / audio.RATE).tolist()
            rows = list(zip(texts, speakers, seconds, strict=True))
        except (BadZipFile, KeyError, ValueError, OSError, EOFError) as error:
            bad.append((str(path), f"not a shard of audio, lengths and text ({error})"))
            continue
        for row, (text, speaker, length) in enumerate(rows):
            name, text = f"{path.stem}/{row}", normalise(text)
            if text:
                found.append(Utterance(name, path, text, str(speaker), seconds=length, row=row))
            else:
                bad.append((name, "its text has no words"))
    return Source(str(folder), found, bad, packed=True)


def _hub(spec: str) -> Source:
    name, _, split = spec.removeprefix("hf:").partition(":")
    datasets = _datasets()
    try:
        table = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:
        raise LpaError(
            f"{spec} cannot be loaded ({str(error).splitlines()[0]}); check name, split and network"
        ) from None
    return _from_tables(spec, {split or "train": table})


def _saved_dataset(folder: Path) -> Source:
    tables = _datasets().load_from_disk(str(folder))
    return _from_tables(str(folder), tables if isinstance(tables, dict) else {"": tables})


def _datasets():
    try:
        import datasets
    except ImportError:
        raise LpaError(
            "Hugging Face datasets need the package datasets; install it with: pip install datasets"
        ) from None
    return datasets


def _from_tables(spec: str, tables: dict[str, Any]) -> Source:
    found, bad = [], []
    for split, table in tables.items():
        column = next((c for c in TEXT_COLUMNS if c in table.column_names), None)
        if column is None or "audio" not in table.column_names:
            raise LpaError(f"{spec} needs the columns audio and text; it has {', '.join(table.column_names)}")
        speakers = table["speaker_id"] if "speaker_id" in table.column_names else [""] * len(table)
        table = table.cast_column("audio", _datasets().Audio(decode=False))
        for row, (text, speaker) in enumerate(zip(table[column], speakers, strict=True)):
            name, text = f"{spec}:{split}[{row}]", normalise(text or "")
            if text:
                found.append(Utterance(name, HubAudio(table, row, name), text, str(speaker), split))
            else:
                bad.append((name, "its text has no words"))
    return Source(spec, found, bad)


def decode(utterances: Sequence[Utterance], workers: int | None = None, progress: Progress | None = None) -> Iterator:
    """(utterance, int16 samples at 16 kHz or the reason why there are none), in order.

    Threads do it: libsndfile and soxr let go of the interpreter while they work, and nothing is copied to processes.
    """
    groups = [list(g) for _, g in groupby(utterances, key=lambda u: u.audio)]
    done = 0
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for group, clips in zip(groups, pool.map(_decode_group, groups), strict=True):
            yield from zip(group, clips, strict=True)
            done += len(group)
            if progress:
                progress(done, len(utterances))


def _decode_group(group: list[Utterance]) -> list[np.ndarray | str]:
    """The clips of utterances that share a file."""
    try:
        source = group[0].audio
        if isinstance(source, HubAudio):
            samples = source.read()
        elif rows := [u.row for u in group if u.row is not None]:
            return _read_shard(source, rows)
        else:
            samples = audio.read(source)
        return [audio.to_int16(samples)] * len(group)
    except LpaError as error:
        return [str(error)] * len(group)


def _read_shard(path: Path, rows: list[int]) -> list[np.ndarray | str]:
    try:
        with np.load(path, allow_pickle=False) as shard:
            samples, ends = shard["audio"], np.cumsum(shard["lengths"])
    except (BadZipFile, KeyError, ValueError, OSError, EOFError) as error:
        raise LpaError(f"{path} is no whole shard ({error}); remove it or make it again") from None
    if samples.dtype != np.int16 or samples.ndim != 1 or ends[-1] != len(samples):
        raise LpaError(f"{path}: its audio is not int16 or not as long as its lengths say; make it again")
    clips = np.split(samples, ends[:-1])
    return [clips[row] if len(clips[row]) else f"{path} row {row} has no samples" for row in rows]


def decode_cached(
    source: Source, cache: Path | None, limit: int = CACHE_BYTES, workers=None, progress=None
) -> Iterator:
    """decode(), kept on disk under a fingerprint of the files; shards are decoded already and stay where they are."""
    if cache is None or source.packed or not source.utterances:
        yield from decode(source.utterances, workers, progress)
        return
    path = Path(cache) / f"bank-{_fingerprint(source.utterances)}.npz"
    try:
        with np.load(path, allow_pickle=False) as kept:
            samples, lengths, reasons = kept["samples"], kept["lengths"], kept["reasons"].tolist()
    except (OSError, BadZipFile, ValueError, KeyError, EOFError):  # none yet, or damaged: it is made (again)
        clips = []
        for utterance, clip in decode(source.utterances, workers, progress):
            clips.append(clip)
            yield utterance, clip
        _write_cache(path, clips, limit)
        return
    split = np.split(samples, np.cumsum(lengths)[:-1])
    for utterance, clip, reason in zip(source.utterances, split, reasons, strict=True):
        yield utterance, reason or clip


def _fingerprint(utterances: Sequence[Utterance]) -> str:
    digest = hashlib.sha256(b"int16 16 kHz")
    for u in utterances:
        if isinstance(u.audio, HubAudio):
            state: tuple = (u.audio.name, u.audio.dataset._fingerprint)
        else:
            stat = u.audio.stat() if u.audio.is_file() else None
            state = (str(u.audio.absolute()), stat and stat.st_size, stat and stat.st_mtime_ns)
        digest.update(repr(state).encode())
    return digest.hexdigest()[:24]


def _write_cache(path: Path, clips: list[np.ndarray | str], limit: int) -> None:
    kept = [np.zeros(0, np.int16) if isinstance(c, str) else c for c in clips]
    if sum(c.nbytes for c in kept) > limit:
        return  # caching is a convenience; a bank too big for it is decoded each time
    path.parent.mkdir(parents=True, exist_ok=True)
    reasons = np.array([c if isinstance(c, str) else "" for c in clips])
    write_npz(path, samples=np.concatenate(kept), lengths=np.array([len(c) for c in kept]), reasons=reasons)
    entries = sorted(path.parent.glob("bank-*.npz"), key=lambda p: p.stat().st_mtime)
    while len(entries) > 1 and sum(p.stat().st_size for p in entries) > limit:
        entries.pop(0).unlink()


def write_npz(path: Path, **arrays: Any) -> None:
    """An npz that readers only ever see whole."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, **arrays)
    part.replace(path)
