"""Audio to words: any file, any length, one bad file of many. Knows no torch until a torch model is asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import soundfile

from . import align, audio
from .errors import LpaError, choose
from .formats import FORMATS, Transcript
from .run import Listener, open_model
from .stream import Blocks, Words, checked, file_frames, resampled, said

STDIN = "-"
MARGIN = 1 / 6  # of a chunk, at either end: what it hears there is taken from its neighbour
SHORTEST_CHUNK = 2.0  # seconds
SLOWEST_RATE = 2000  # Hz; below this no speech is left, and a damaged header would make hours of seconds
WORTH_A_LINE = 1 << 30  # bytes of one pass before anybody is told
AT_ONCE = 10  # seconds of a file that are read together
FFMPEG_KINDS = {".3gp", ".aac", ".amr", ".avi", ".m4a", ".m4b", ".mkv", ".mov", ".mp4", ".webm", ".wma"}

Progress = Callable[[float], None]  # called with the seconds of audio that are done
Source = str | Path | bytes | np.ndarray


def transcribe(
    model: Any,
    source: Source,
    *,
    backend: str | None = None,
    rate: int = audio.RATE,
    chunk: float | None = None,
    progress: Progress | None = None,
) -> Transcript:
    """What is said in a file, a file's bytes, or samples (S,) at `rate`.

    model: a folder or hub id, a model from `lpa.load`, or what `open_model` gave. chunk: in pieces of so many
    seconds that overlap, which is not exact, instead of one pass or exact blocks.
    """
    listener = listen_with(model, backend)
    if isinstance(source, np.ndarray):
        return hear_pieces(listener, from_array(source, rate, listener.sample_rate), "the array", chunk, progress)
    name = "audio bytes" if isinstance(source, bytes) else str(source)
    with as_file(source) as path:
        return hear_pieces(listener, read_pieces(path, listener.sample_rate, name), name, chunk, progress)


def hear_pieces(
    listener: Listener,
    pieces: Iterable[np.ndarray],
    name: str,
    chunk: float | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> Transcript:
    """Words of samples that come in pieces: in exact blocks where the model allows it, else in one pass or chunks."""
    if chunk is None and not listener.field.whole:
        return hear_blocks(listener, pieces, name, progress)
    samples = np.concatenate(list(pieces))
    if tell and (line := forecast(listener, len(samples), chunk)):
        tell(line)
    with naming(name):
        logits = hear(listener, samples, chunk, progress)
    return said(align.words(logits, listener.tokens, listener.frame_rate), len(samples) / listener.sample_rate)


def hear_blocks(
    listener: Listener, pieces: Iterable[np.ndarray], name: str, progress: Progress | None = None
) -> Transcript:
    """The same words as in one pass, block by block: memory does not grow with the recording, but for the words."""
    blocks, words = Blocks(listener, file_frames(listener)), Words(listener)
    found: list[align.Word] = []

    def take(heard: Iterator[np.ndarray]) -> None:
        with naming(name):
            for logits in heard:
                found.extend(words.push(logits))
                if progress:
                    progress(words.frames / listener.frame_rate)

    for samples in pieces:
        take(blocks.push(samples))
    take(blocks.finish())
    found.extend(words.finish())
    seconds = blocks.count / listener.sample_rate
    if progress:
        progress(seconds)
    return said(tuple(found), seconds)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """What goes wrong inside is said of this recording."""
    try:
        yield
    except LpaError as error:
        raise LpaError(f"{name}: {error}") from None
    except MemoryError:
        raise LpaError(f"{name}: not enough memory for one pass; cut it with --chunk 30") from None


def listen_with(model: Any, backend: str | None = None) -> Listener:
    if isinstance(model, Listener):
        return model
    if isinstance(model, str | Path):
        return open_model(model, backend)
    if backend not in (None, "torch"):
        raise LpaError(f"a loaded model runs in torch; give its folder to run it in {backend}")
    from .run.torch import TorchListener

    return TorchListener(model)


# --- hearing


def hear(
    listener: Listener, samples: np.ndarray, chunk: float | None = None, progress: Progress | None = None
) -> np.ndarray:
    """Logits (T, V): one pass, or chunks that overlap, with each frame taken from the chunk it lies deeper in."""
    check_chunk(chunk)
    heard = []
    for start, stop, first, last in spans(len(samples), listener, chunk):
        heard.append(listener.hear(samples[start:stop])[first:last])
        if progress:
            progress(stop / listener.sample_rate)
    return np.concatenate(heard)


def check_chunk(seconds: float | None) -> None:
    if seconds is not None and not seconds >= SHORTEST_CHUNK:
        raise LpaError(f"a chunk of {seconds:g} s is too short to hear a word in; take {SHORTEST_CHUNK:g} or more")


def spans(count: int, listener: Listener, chunk: float | None) -> Iterator[tuple[int, int, int, int | None]]:
    """Each chunk's samples [start, stop), and which of its frames to keep: together every frame once."""
    size = None if chunk is None else int(chunk * listener.frame_rate)  # frames
    if size is None or count <= size * listener.stride:
        yield 0, count, 0, None
        return
    margin = max(1, round(size * MARGIN))
    start, first = 0, 0
    while (start + size) * listener.stride < count:
        yield start * listener.stride, (start + size) * listener.stride, first, size - margin
        start, first = start + size - 2 * margin, margin
    yield start * listener.stride, count, first, None


def forecast(listener: Listener, count: int, chunk: float | None) -> str:
    """A line on the memory that one pass over so many samples will take; empty where it is not worth one."""
    whole = one_pass_bytes(listener, count)
    if chunk is not None or whole < WORTH_A_LINE:
        return ""
    part = one_pass_bytes(listener, 30 * listener.sample_rate)
    return (
        f"{count / listener.sample_rate:.0f} s in one pass ({listener.field.whole}): about {gigabytes(whole)} of "
        f"memory; with --chunk 30 {gigabytes(part)}"
    )


def one_pass_bytes(listener: Listener, count: int) -> int:
    frames = count // listener.stride
    return listener.attention_bytes(frames) + listener.facts.frame_bytes * frames


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.{1 if count >= 1e9 else 2}f} GB"


# --- reading


@contextmanager
def as_file(source: str | Path | bytes | BinaryIO) -> Iterator[str | Path]:
    """A path as it is; bytes or an open stream as a file: from memory libsndfile's complaints are tracebacks."""
    if isinstance(source, str | Path):
        yield source
        return
    with tempfile.NamedTemporaryFile() as file:
        if isinstance(source, bytes):
            file.write(source)
        else:
            shutil.copyfileobj(source, file)
        file.flush()
        yield file.name


def read_pieces(path: str | Path, rate: int, name: str) -> Iterator[np.ndarray]:
    """A file as samples (S,) float32 at `rate`, some seconds at a time; what libsndfile cannot read goes to ffmpeg."""
    if not Path(path).is_file():
        raise LpaError(f"{name} is not there; check the path")
    try:
        file = soundfile.SoundFile(str(path))
    except (soundfile.SoundFileError, OSError, ValueError, RuntimeError) as error:
        if shutil.which("ffmpeg"):
            yield from read_with_ffmpeg(path, rate, name)
            return
        if Path(name).suffix.lower() not in FFMPEG_KINDS:
            raise unreadable(name, error) from None
        raise LpaError(f"{name} needs ffmpeg to be read; install it, or convert the file to wav or flac") from None
    with file:
        if file.samplerate < SLOWEST_RATE:
            raise LpaError(
                f"{name} has {file.samplerate} samples a second, too few for speech; replace it or leave it out"
            )
        count = 0
        try:
            for samples in resampled(decode(file, name), file.samplerate, rate):
                count += len(samples)
                yield samples
        except (soundfile.SoundFileError, OSError, MemoryError, ValueError, RuntimeError) as error:
            raise unreadable(name, error) from None  # damaged further on, or a header that asks for the impossible
    if not count:
        raise LpaError(f"{name} has no samples; replace it or leave it out")


def decode(file: soundfile.SoundFile, name: str) -> Iterator[np.ndarray]:
    """The samples of an open file, channels averaged."""
    most = max(1, AT_ONCE * audio.RATE // file.channels)
    while len(samples := file.read(most, dtype="float32", always_2d=True)):  # (S, channels)
        if not np.isfinite(samples).all():
            raise LpaError(f"{name} has samples that are not numbers (NaN or infinity); replace it or leave it out")
        yield samples.mean(axis=1) if samples.shape[1] > 1 else samples[:, 0]


def unreadable(name: str, error: Exception) -> LpaError:
    said = getattr(error, "error_string", "") or " ".join(str(error).split())[:100]
    return LpaError(
        f"{name} cannot be read as audio ({said.strip().rstrip('.') or type(error).__name__}); "
        "replace it or leave it out"
    )


def read_with_ffmpeg(path: str | Path, rate: int, name: str) -> Iterator[np.ndarray]:
    """Through ffmpeg, which may open files and nothing on a network, whatever a playlist says."""
    limits = ["-v", "error", "-nostdin", "-protocol_whitelist", "file,pipe"]
    command = ["ffmpeg", *limits, "-i", f"file:{path}", "-vn", "-ac", "1", "-ar", str(rate), "-f", "f32le", "pipe:1"]
    count, finite = 0, True
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints) as running,
    ):
        assert running.stdout is not None
        try:
            while finite and (data := running.stdout.read(4 * AT_ONCE * rate)):
                samples = np.frombuffer(data[: len(data) // 4 * 4], "<f4").astype(np.float32)
                finite = bool(np.isfinite(samples).all())
                count += len(samples)
                if finite:
                    yield samples
        finally:
            running.stdout.close()  # where nobody wants the rest, ffmpeg ends
        code = running.wait()
        complaints.seek(0)
        lines = complaints.read().decode(errors="replace").strip().splitlines()
    if code or not count or not finite:
        raise LpaError(f"{name} cannot be read as audio (ffmpeg: {lines[-1] if lines else 'no samples'}); replace it")


def from_array(samples: np.ndarray, rate: int, wanted: int) -> Iterator[np.ndarray]:
    if not samples.size:
        raise LpaError(f"audio is {samples.shape}; it must be (samples,): one channel, not empty")
    samples = checked(samples)
    return resampled((samples[at : at + AT_ONCE * rate] for at in range(0, len(samples), AT_ONCE * rate)), rate, wanted)


# --- the command


def transcribe_files(
    files: Sequence[str],
    model: str,
    *,
    backend: str | None = None,
    form: str = "txt",
    out: Path | None = None,
    chunk: float | None = None,
    latency: float | None = None,
    device: str = "cpu",
    compiled: bool = False,
) -> int:
    """`lpa transcribe`: results to stdout or to one file each in `out`, all else to stderr. How many files failed."""
    write = choose(form, FORMATS, "format")
    targets = name_outputs(files, form, out)
    listener = open_model(model, backend, latency, device, compiled)
    failed = 0
    with progress_bar(files) as bar:
        for name, target in zip(files, targets, strict=True):
            try:
                label = "stdin" if name == STDIN else name
                with as_file(sys.stdin.buffer if name == STDIN else name) as path:
                    bar.begin(label, known_seconds(path))
                    pieces = read_pieces(path, listener.sample_rate, label)
                    tell = partial(print, f"lpa: {label}:", file=sys.stderr)
                    text = write(hear_pieces(listener, pieces, label, chunk, bar.advance, tell), label)
                if target is None:
                    print(f"{label}: {text}" if len(files) > 1 and form == "txt" else text, end="", flush=True)
                else:
                    save(text, target)
            except LpaError as error:
                failed += 1
                print(f"lpa: {error}", file=sys.stderr)
    return failed


def name_outputs(files: Sequence[str], form: str, out: Path | None) -> list[Path | None]:
    """Where each result goes: a file of its own in `out`, or None for stdout. What is wrong is said before any work."""
    if files.count(STDIN) > 1:
        raise LpaError("stdin (-) can be read only once; name it once")
    if out is None:
        if len(files) > 1 and form in ("srt", "vtt"):
            raise LpaError(f"{form} of several files needs one file each; add --out FOLDER")
        return [None] * len(files)
    targets = [out / f"{'stdin' if name == STDIN else Path(name).stem}.{form}" for name in files]
    for number, target in enumerate(targets):
        if target in targets[:number]:
            first = files[targets.index(target)]
            raise LpaError(f"{first} and {files[number]} would both be written to {target}; do them one by one")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LpaError(f"{out} cannot be made a folder ({error.strerror}); choose another --out") from None
    return list(targets)


def save(text: str, target: Path) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LpaError(f"{target} cannot be written ({error.strerror}); choose another --out") from None


class Bar:
    """Seconds of audio done out of all; the files' headers say how many there are."""

    def __init__(self, bars: Any, total: float):
        self.bars, self.done, self.length = bars, 0.0, 0.0
        self.task = bars.add_task("", total=total) if bars else None

    def begin(self, name: str, seconds: float) -> None:
        self.done += self.length
        self.length = seconds
        if self.bars:
            task = self.bars.tasks[self.task]
            self.bars.update(self.task, description=Path(name).name, total=max(task.total, self.done + seconds))

    def advance(self, seconds: float) -> None:
        if self.bars:
            self.bars.update(self.task, completed=self.done + seconds)


@contextmanager
def progress_bar(files: Sequence[str]) -> Iterator[Bar]:
    """A bar with an estimate on a terminal's stderr, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield Bar(None, 0.0)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    # On a terminal results are printed above the bar; in a pipe they must stay on stdout.
    shared = sys.stdout.isatty()
    with Bars(*columns, console=Console(stderr=True), transient=True, redirect_stdout=shared) as bars:
        yield Bar(bars, sum(map(known_seconds, files)))


def known_seconds(name: str | Path) -> float:
    """By the header; 0 where there is none to read, such as on stdin."""
    try:
        return audio.seconds(name)
    except LpaError:
        return 0.0
