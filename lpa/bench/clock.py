"""One clock. Every figure in a table came through `measure`: baseline and candidates interleaved in one run."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import LpaError

Name = TypeVar("Name", bound=Hashable)


def measure(
    runs: dict[Name, Callable[[], Any]],
    rounds: int,
    sync: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Seconds of every run in every round. A round calls each once, so that a slow spell hits all alike.

    now: what tells the time; time.process_time counts what the processor did for this process alone.
    """
    for run in runs.values():
        run()  # warm-up: memory, threads, kernels
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            sync()
            start = now()
            run()
            sync()
            seconds[name].append(now() - start)
    return seconds


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def milliseconds(seconds: list[float]) -> tuple[float, float, float]:
    low, median, high = (round(1e3 * t, 3) for t in quartiles(seconds))
    return low, median, high


def speedup(baseline: list[float], times: list[float]) -> float:
    """Median over the rounds of the baseline's time over this one's: a slow spell hits both sides of a ratio."""
    return round(statistics.median(a / b for a, b in zip(baseline, times, strict=True)), 2)


def peak_mb() -> float:
    """The most memory this process ever had, in MB (10⁶ bytes)."""
    found = high_water_mb("self")  # getrusage would count in what the parent had when it started this process
    if found is not None:
        return found
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6


def high_water_mb(process: int | str) -> float | None:
    """The most memory a running process ever had, in MB; None where the system does not tell, or it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("VmHWM")), None)
    return None if found is None else int(found.split()[1]) * 1024 / 1e6


def in_child(function: str, spec: dict[str, Any]) -> dict[str, Any]:
    """What `function` ("module:name") returns for `spec`, from a process of its own, whose memory is its alone."""
    module, name = function.split(":")
    code = f"import json, sys; from {module} import {name}; print(json.dumps({name}(json.load(sys.stdin))))"
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(spec), capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise LpaError(f"the process that measures memory failed ({last[:200]}); was there enough of it?")
    return json.loads(done.stdout.splitlines()[-1])
