"""`lpa bench transcribe` and `enhance`: from the start of a process to its end, by the length of the recording."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from .. import audio
from ..errors import LpaError
from .clock import high_water_mb, quartiles

FILE = "FILE"  # in a command: the recording
LOOK = 0.02  # seconds between two looks at a process's memory


@dataclass(frozen=True)
class WholeRow:
    """One command on one recording in one backend, everything included."""

    backend: str
    seconds: float  # of audio
    wall_s: float  # median
    low_s: float  # quartiles
    high_s: float
    ms_per_second: float  # of audio
    peak_mb: float | None  # the most of all rounds; None where the system does not tell


def bench_transcribe(
    source: str, model: str, backends: Sequence[str], seconds: Sequence[float], rounds: int
) -> list[WholeRow]:
    commands = {name: ["transcribe", FILE, "--model", model, "--backend", name] for name in backends}
    return bench_whole(source, commands, seconds, rounds)


def bench_enhance(source: str, model: str, seconds: Sequence[float], rounds: int) -> list[WholeRow]:
    with tempfile.TemporaryDirectory() as out:
        return bench_whole(source, {"torch": ["enhance", FILE, "--model", model, "--out", out]}, seconds, rounds)


def bench_whole(source: str, commands: dict[str, list[str]], seconds: Sequence[float], rounds: int) -> list[WholeRow]:
    """A recording, said over and over until it lasts so long; every length and backend in turn, round by round."""
    samples = audio.read(source)
    if not len(samples):
        raise LpaError(f"{source} has no samples; name a recording of speech")
    with tempfile.TemporaryDirectory() as folder:
        files = {length: Path(folder) / f"{length:g}.wav" for length in seconds}
        for length, path in files.items():
            wanted = round(length * audio.RATE)
            soundfile.write(path, np.tile(samples, math.ceil(wanted / len(samples)))[:wanted], audio.RATE)
        runs: dict[tuple[str, float], list[tuple[float, float | None]]] = {}
        for _ in range(rounds):
            for backend, command in commands.items():
                for length, path in files.items():
                    said = [str(path) if part == FILE else part for part in command]
                    runs.setdefault((backend, length), []).append(run_whole(said))
    return [summary(backend, length, found) for (backend, length), found in runs.items()]


def run_whole(arguments: list[str]) -> tuple[float, float | None]:
    """Seconds that `lpa` took, from its start to its end, and the most memory it ever had, in MB."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([sys.executable, "-m", "lpa", *arguments], stdout=said, stderr=errors)
        peak = None
        while process.poll() is None:
            peak = high_water_mb(process.pid) or peak
            time.sleep(LOOK)
        took = time.perf_counter() - start
        errors.seek(0)
        if process.returncode:
            last = (errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise LpaError(f"lpa {' '.join(arguments)} failed: {last.removeprefix('lpa: ')}")
        said.seek(0)
        if not said.read().strip():
            raise LpaError(f"lpa {' '.join(arguments)} heard no words; name a recording of speech")
    return took, peak


def summary(backend: str, seconds: float, found: list[tuple[float, float | None]]) -> WholeRow:
    low, median, high = (round(t, 3) for t in quartiles([took for took, _ in found]))
    peaks = [peak for _, peak in found if peak is not None]
    most = round(max(peaks), 1) if peaks else None
    return WholeRow(backend, seconds, median, low, high, round(1e3 * median / seconds, 2), most)


def whole_table(rows: Sequence[WholeRow]) -> Any:
    from rich.table import Table

    table = Table(title="From the start of a process to its end")
    for name in ("backend", "seconds of audio", "s", "quartiles", "ms per second", "peak MB"):
        table.add_column(name, justify="left" if name == "backend" else "right")
    for row in rows:
        spread, peak = f"{row.low_s:.2f}–{row.high_s:.2f}", "" if row.peak_mb is None else f"{row.peak_mb:,.0f}"
        table.add_row(row.backend, f"{row.seconds:g}", f"{row.wall_s:.2f}", spread, f"{row.ms_per_second:.1f}", peak)
    return table
