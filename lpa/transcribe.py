"""Audio to words: any file, any length, one bad file of many. Knows no torch until a torch model is asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

from . import align, audio
from .errors import LpaError, choose
from .formats import FORMATS, Transcript
from .run import Listener, open_model

DEFAULT = Path(__file__).parent / "models" / "default"  # the model that comes with the package
STDIN = "-"
MARGIN = 1 / 6  # of a chunk, at either end: what it hears there is taken from its neighbour
SHORTEST_CHUNK = 2.0  # seconds
SLOWEST_RATE = 2000  # Hz; below this no speech is left, and a damaged header would make hours of seconds
WORTH_A_LINE = 1 << 30  # bytes of attention before anybody is told
FFMPEG_KINDS = {".3gp", ".aac", ".amr", ".avi", ".m4a", ".m4b", ".mkv", ".mov", ".mp4", ".webm", ".wma"}

Progress = Callable[[float], None]  # called with the seconds of audio that are done


def transcribe(
    model: Any,
    source: str | Path | bytes | np.ndarray,
    *,
    backend: str | None = None,
    rate: int = audio.RATE,
    chunk: float | None = None,
    progress: Progress | None = None,
) -> Transcript:
    """What is said in a file, a file's bytes, or samples (S,) at `rate`.

    model: a folder or hub id, a model from `lpa.load`, or what `open_model` gave. chunk: in pieces of so many
    seconds that overlap, instead of one pass.
    """
    listener = listen_with(model, backend)
    if isinstance(source, np.ndarray):
        samples, name = from_array(source, rate, listener.sample_rate), "the array"
    else:
        name = "audio bytes" if isinstance(source, bytes) else str(source)
        samples = read(source, listener.sample_rate, name)
    return transcribe_samples(listener, samples, name, chunk, progress)


def transcribe_samples(
    listener: Listener, samples: np.ndarray, name: str, chunk: float | None, progress: Progress | None = None
) -> Transcript:
    try:
        logits = hear(listener, samples, chunk, progress)
    except LpaError as error:
        raise LpaError(f"{name}: {error}") from None
    except MemoryError:
        raise LpaError(f"{name}: not enough memory for one pass; cut it with --chunk 30") from None
    words = align.words(logits, listener.tokens, listener.frame_rate)
    return Transcript(" ".join(w.word for w in words), words, len(samples) / listener.sample_rate)


def listen_with(model: Any, backend: str | None = None) -> Listener:
    if isinstance(model, Listener):
        return model
    if isinstance(model, str | Path):
        return open_model(find_model(str(model)), backend)
    if backend not in (None, "torch"):
        raise LpaError(f"a loaded model runs in torch; give its folder to run it in {backend}")
    from .run.torch import TorchListener

    return TorchListener(model)


def find_model(name: str) -> str:
    """The folder behind `default`; any other name is its own."""
    if name != "default":
        return name
    if not (DEFAULT / "plan.json").is_file():
        raise LpaError("there is no built-in model in this installation; name yours with --model FOLDER")
    return str(DEFAULT)


# --- hearing


def hear(
    listener: Listener, samples: np.ndarray, chunk: float | None = None, progress: Progress | None = None
) -> np.ndarray:
    """Logits (T, V): one pass, or chunks that overlap, with each frame taken from the chunk it lies deeper in."""
    if chunk is not None and not chunk >= SHORTEST_CHUNK:
        raise LpaError(f"a chunk of {chunk:g} s is too short to hear a word in; take {SHORTEST_CHUNK:g} or more")
    heard = []
    for start, stop, first, last in spans(len(samples), listener, chunk):
        heard.append(listener.hear(samples[start:stop])[first:last])
        if progress:
            progress(stop / listener.sample_rate)
    return np.concatenate(heard)


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
    """A line on the memory that attention will take over so many samples; empty where it is not worth one."""
    whole = listener.attention_bytes(count // listener.stride)
    if chunk is not None or whole < WORTH_A_LINE:
        return ""
    part = listener.attention_bytes(round(30 * listener.frame_rate))
    return (
        f"{count / listener.sample_rate:.0f} s in one pass through {listener.facts.attention} attention layers: "
        f"about {gigabytes(whole)} of memory for them; with --chunk 30 {gigabytes(part)}"
    )


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.{1 if count >= 1e9 else 2}f} GB"


# --- reading


def read(source: str | Path | bytes, rate: int, name: str) -> np.ndarray:
    """A file, or a file's bytes, as samples (S,) float32 at `rate`; what libsndfile cannot read goes through ffmpeg."""
    if isinstance(source, bytes):  # as a file: from memory libsndfile's complaints are tracebacks on stderr
        with tempfile.NamedTemporaryFile() as file:
            file.write(source)
            file.flush()
            return read(file.name, rate, name)
    try:
        check_rate(source, name)
        return audio.read(source, rate, name)
    except LpaError as error:
        if "cannot be read" not in str(error) or not Path(source).is_file():
            raise
        if shutil.which("ffmpeg"):
            return read_with_ffmpeg(source, rate, name)
        if Path(name).suffix.lower() not in FFMPEG_KINDS:
            raise
        raise LpaError(f"{name} needs ffmpeg to be read; install it, or convert the file to wav or flac") from None
    except (MemoryError, ValueError, RuntimeError) as error:  # a damaged header asks for the impossible
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise LpaError(f"{name} cannot be read as audio ({reason}); replace it or leave it out") from None


def check_rate(path: str | Path, name: str) -> None:
    try:
        rate = soundfile.info(str(path)).samplerate
    except (soundfile.SoundFileError, OSError):
        return  # audio.read says what is wrong
    if rate < SLOWEST_RATE:
        raise LpaError(f"{name} has {rate} samples a second, too few for speech; replace it or leave it out")


def read_with_ffmpeg(path: str | Path, rate: int, name: str) -> np.ndarray:
    """Through ffmpeg, which may open files and nothing on a network, whatever a playlist says."""
    limits = ["-v", "error", "-nostdin", "-protocol_whitelist", "file,pipe"]
    done = subprocess.run(
        ["ffmpeg", *limits, "-i", f"file:{path}", "-vn", "-ac", "1", "-ar", str(rate), "-f", "f32le", "pipe:1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    samples = np.frombuffer(done.stdout[: len(done.stdout) // 4 * 4], "<f4").astype(np.float32)
    if done.returncode or not len(samples) or not np.isfinite(samples).all():
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise LpaError(f"{name} cannot be read as audio (ffmpeg: {said[-1] if said else 'no samples'}); replace it")
    return samples


def from_array(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    if samples.ndim != 1 or not len(samples):
        raise LpaError(f"audio is {samples.shape}; it must be (samples,): one channel, not empty")
    if samples.dtype == np.int16:
        samples = audio.to_float(samples)
    if not np.issubdtype(samples.dtype, np.floating) or not np.isfinite(samples).all():
        raise LpaError(f"audio is {samples.dtype}; it must be int16, or finite numbers in [-1, 1]")
    samples = np.ascontiguousarray(samples, np.float32)
    return samples if rate == wanted else soxr.resample(samples, rate, wanted)


# --- the command


def transcribe_files(
    files: Sequence[str],
    model: str,
    *,
    backend: str | None = None,
    form: str = "txt",
    out: Path | None = None,
    chunk: float | None = None,
) -> int:
    """`lpa transcribe`: results to stdout or to one file each in `out`, all else to stderr. How many files failed."""
    write = choose(form, FORMATS, "format")
    targets = name_outputs(files, form, out)
    listener = open_model(find_model(model), backend)
    failed = 0
    with progress_bar(files) as bar:
        for name, target in zip(files, targets, strict=True):
            try:
                source = sys.stdin.buffer.read() if name == STDIN else name
                label = "stdin" if name == STDIN else name
                samples = read(source, listener.sample_rate, label)
                if line := forecast(listener, len(samples), chunk):
                    print(f"lpa: {label}: {line}", file=sys.stderr)
                bar.begin(label, len(samples) / listener.sample_rate)
                text = write(transcribe_samples(listener, samples, label, chunk, bar.advance), label)
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


def known_seconds(name: str) -> float:
    """By the header; 0 where there is none to read, such as on stdin."""
    try:
        return audio.seconds(name)
    except LpaError:
        return 0.0
