"""`lpa bench model`: a converted model, its twin with attention and one with windows, in torch and in ONNX Runtime."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LpaError, choose
from ..run import find_model
from .clock import in_child, measure, milliseconds, peak_mb, speedup

RATE = 16000
ATTENTION = "attention"
BACKENDS = ("torch", "onnx")
PRECISIONS = {"fp32": "float32", "int8": "int8"}
NARROWEST = 8  # frames either side: a window for mixers so cheap that none costs as little

# name -> (family, what differs from that family's defaults); fresh weights
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2-base": ("wav2vec2", {}),
    "whisper-base": (
        "whisper",
        {
            **{"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048},
            **{"positions": False, "mel_floor": -7.0},
        },
    ),
}


@dataclass(frozen=True)
class Variant:
    """A network by what it is made of: a base, and a mixer with its config for each layer replaced."""

    name: str
    family: str
    base: dict[str, Any]
    swaps: tuple[tuple[int, str, dict[str, Any]], ...] = ()

    def build(self) -> Any:
        """Fresh weights, the same every time: speed does not depend on them."""
        import torch

        from ..families import create
        from ..surgery import swap

        torch.manual_seed(0)
        model = create(self.family, self.base)
        for index, mixer, config in self.swaps:
            swap(model, index, mixer, config)
        return model.eval()


@dataclass(frozen=True)
class ModelRow:
    """One network at one length of audio. `speedup` is over attention in the same backend and precision."""

    seconds: float
    backend: str
    precision: str
    model: str
    median_ms: float
    low_ms: float  # quartiles: the spread
    high_ms: float
    ms_per_second: float  # of audio
    speedup: float | None  # None where attention was not run
    front_ms: float | None = None  # parts: of torch networks alone
    mixers_ms: float | None = None
    ffn_ms: float | None = None
    peak_mb: float | None = None
    loaded_mb: float | None = None  # of that, before it heard anything


def bench_model(
    source: str | None = None,
    size: str = "wav2vec2-base",
    mixers: Sequence[str] = (),
    seconds: Sequence[float] = (10, 30, 60, 120, 600),
    backend: str = "torch",
    precision: str = "fp32",
    rounds: int = 5,
    attention_up_to: float = 120,
    memory: bool = True,
    cpu_time: bool = False,
) -> list[ModelRow]:
    """Every variant at every length, in turn. ONNX Runtime's rows come with torch's, to tell what each is worth.

    Attention is left out above `attention_up_to` seconds, where a pass takes minutes. cpu_time: what the processor did
    for this process and not what the clock says, for machines that others use as well.
    """
    if backend not in BACKENDS:
        choose(backend, dict.fromkeys(BACKENDS), "backend")
    weights = choose(precision, PRECISIONS, "precision")
    if backend == "torch" and precision == "int8":
        raise LpaError("int8 products are ONNX Runtime's; add --backend onnx")
    if min(seconds, default=0) <= 0:
        raise LpaError("seconds must be positive; try --seconds 10,60")
    variants = choose_variants(source, size, mixers)
    now = time.process_time if cpu_time else time.perf_counter
    audio = {s: noise(s) for s in seconds}
    runs: dict[Any, Callable[[], Any]] = {}
    parts: dict[Any, list[dict[str, float]]] = {}
    homes: dict[tuple[str, str], str] = {}  # where each exported network is
    with tempfile.TemporaryDirectory() as work:
        for variant in variants:
            opened = dict(open_variant(variant, backend, weights, Path(work), now))
            for (where, kind), (run, home) in opened.items():
                homes[where, variant.name] = home
                for s in seconds:
                    if variant.name != ATTENTION or s <= attention_up_to:
                        key = (s, where, kind, variant.name)
                        runs[key] = partial(run, audio[s], parts.setdefault(key, []))
        times = measure(runs, rounds, now=now)
        rows = []
        for key in sorted(times, key=lambda k: (k[0], BACKENDS.index(k[1]), [v.name for v in variants].index(k[3]))):
            s, where, kind, name = key
            low, median, high = milliseconds(times[key])
            baseline = times.get((s, where, kind, ATTENTION))
            row = {
                **{"seconds": s, "backend": where, "precision": kind, "model": name, "median_ms": median},
                **{"low_ms": low, "high_ms": high, "ms_per_second": round(median / s, 2)},
                "speedup": speedup(baseline, times[key]) if baseline else None,
                **part_times(parts[key][1:]),  # the first was the warm-up
            }
            if memory:
                variant = next(v for v in variants if v.name == name)
                spec = {"variant": asdict(variant), "seconds": s, "backend": where, "home": homes[where, name]}
                row |= in_child("lpa.bench.model:peak_of", spec)
            rows.append(ModelRow(**row))
    return rows


def choose_variants(source: str | None, size: str, mixers: Sequence[str]) -> list[Variant]:
    """Attention; the model, or one of the size with each mixer everywhere; and windows at the price of the first."""
    from ..mixers import resolve

    if source is None:
        family, base = choose(size, SIZES, "size")
        layers = len(Variant(ATTENTION, family, base).build().sites())
        found = []
        for name in mixers or ("pyramid", "ladder", "lpa"):
            resolve(name)
            found.append(Variant(name, family, base, tuple((i, name, {}) for i in range(layers))))
    else:
        from ..plan import Plan

        if mixers:
            raise LpaError(f"{source} has its mixers already; name a --size to choose others")
        source = find_model(source)
        if not (Path(source) / "plan.json").is_file():
            raise LpaError(f"{source} is no model folder (no plan.json); convert a model first, or name a --size")
        plan = Plan.read(Path(source))
        family, base = plan.family, plan.base
        if not plan.swaps:
            raise LpaError(f"no layer of {source} is replaced, so there is nothing to compare; convert it first")
        found = [Variant(Path(source).name, family, base, tuple((s.index, s.mixer, s.config) for s in plan.swaps))]
    side = equal_window(found[0])
    window = tuple((index, "window", {"side": side}) for index, *_ in found[0].swaps)
    return [Variant(ATTENTION, family, base), *found, Variant(f"window ±{side}", family, base, window)]


def equal_window(variant: Variant) -> int:
    """Frames either side of the window that costs as many operations as the variant's mixers, at least NARROWEST."""
    from ..surgery import mixer_at

    model = variant.build()
    cost = statistics.mean(mixer_at(model, index).mflop_per_frame() for index, *_ in variant.swaps)
    dim = model.width[0]
    keys = (cost - 8 * dim * dim / 1e6) / (4 * dim / 1e6)
    return max(NARROWEST, round((keys - 1) / 2))


def noise(seconds: float) -> np.ndarray:
    return 0.1 * np.random.default_rng(0).normal(size=round(seconds * RATE)).astype(np.float32)


Run = Callable[[np.ndarray, list[dict[str, float]]], Any]  # samples; where the parts' seconds of a pass go


def open_variant(
    variant: Variant, backend: str, weights: str, work: Path, now: Callable[[], float]
) -> Iterator[tuple[tuple[str, str], tuple[Run, str]]]:
    """(backend, precision) → how to run it there, and the folder it was exported to."""
    import torch

    from .parts import Parts

    model = variant.build()
    watched = Parts(model, now)

    @torch.inference_mode()
    def in_torch(samples: np.ndarray, into: list[dict[str, float]]) -> None:
        watched.reset()
        watched.run(torch.from_numpy(samples).unsqueeze(0))
        into.append(watched.seconds)

    yield ("torch", "fp32"), (in_torch, "")
    if backend == "onnx":
        from ..run.onnx import OnnxListener

        folder = export(variant, work, weights)
        listener = OnnxListener(folder)
        kind = next(k for k, v in PRECISIONS.items() if v == weights)
        yield ("onnx", kind), (lambda samples, into: listener.run(samples), str(folder))


def export(variant: Variant, work: Path, weights: str) -> Path:
    """The variant as a folder for ONNX Runtime; attention in the kernel that is fastest there."""
    from ..export.onnx import export_onnx
    from ..surgery import save
    from .kernels import fuse_attention

    whole = save(variant.build(), work / variant.name)
    folder = export_onnx(str(whole), work / f"{variant.name}-{weights}", weights)
    if variant.name == ATTENTION:
        fuse_attention(folder / "model.onnx", variant)
    return folder


def part_times(passes: list[dict[str, float]]) -> dict[str, float]:
    """Median milliseconds of each part over the passes; nothing for a runtime that cannot tell them apart."""
    if not passes:
        return {}
    return {f"{part}_ms": round(1e3 * statistics.median(p[part] for p in passes), 3) for part in passes[0]}


def peak_of(spec: dict[str, Any]) -> dict[str, float]:
    """Peak memory of one pass, in the process that calls this."""
    samples = noise(spec["seconds"])
    if spec["backend"] == "onnx":
        from ..run.onnx import OnnxListener

        listener = OnnxListener(Path(spec["home"]))
        loaded = peak_mb()
        listener.run(samples)
    else:
        import torch

        model = Variant(**{**spec["variant"], "swaps": tuple(map(tuple, spec["variant"]["swaps"]))}).build()
        loaded = peak_mb()
        with torch.inference_mode():
            model(torch.from_numpy(samples).unsqueeze(0))
    return {"peak_mb": round(peak_mb(), 1), "loaded_mb": round(loaded, 1)}


def split_gain(rows: Sequence[ModelRow]) -> list[dict[str, Any]]:
    """What the algorithm and what the framework gives, for each length and model that has all four times.

    From torch with attention there are two ways to ONNX Runtime converted: the algorithm first, or the framework first.
    """
    took = {(r.seconds, r.backend, r.model): r.median_ms for r in rows}
    split = []
    for seconds, backend, name in took:
        corners = [(seconds, where, what) for where in BACKENDS for what in (ATTENTION, name)]
        if backend == "onnx" and name != ATTENTION and all(c in took for c in corners):
            torch_attention, torch_model, onnx_attention, onnx_model = (took[c] for c in corners)
            gains = {
                "algorithm_in_torch": torch_attention / torch_model,
                "algorithm_in_onnx": onnx_attention / onnx_model,
                "framework_with_attention": torch_attention / onnx_attention,
                "framework_converted": torch_model / onnx_model,
                "both": torch_attention / onnx_model,
            }
            split.append({"seconds": seconds, "model": name, **{k: round(v, 2) for k, v in gains.items()}})
    return split


def model_tables(rows: list[ModelRow]) -> list[Any]:
    """For a terminal: the rows, and the split where there is one."""
    from rich.table import Table

    table = Table(title="Whole models, against attention in the same run")
    names = ("seconds", "runtime", "model", "median ms", "quartiles", "speed-up", "front", "mixers", "FFN", "peak MB")
    for name in names:
        table.add_column(name, justify="left" if name in ("runtime", "model") else "right")
    for last, row in zip([None, *rows], rows, strict=False):
        if last and last.seconds != row.seconds:
            table.add_section()
        parts = [f"{100 * p / row.median_ms:.0f} %" if p else "" for p in (row.front_ms, row.mixers_ms, row.ffn_ms)]
        table.add_row(
            *(f"{row.seconds:g}", f"{row.backend} {row.precision}", row.model, f"{row.median_ms:,.0f}"),
            f"{row.low_ms:,.0f}–{row.high_ms:,.0f}",
            f"{row.speedup:.2f}×" if row.speedup else "",
            *parts,
            f"{row.peak_mb:,.0f}" if row.peak_mb else "",
        )
    split = split_gain(rows)
    if not split:
        return [table]
    second = Table(title="What is the algorithm's, and what the framework's (times as fast)")
    for name in split[0]:
        second.add_column(name.replace("_", " "), justify="left" if name == "model" else "right")
    for entry in split:
        second.add_row(*(f"{v:g}" if isinstance(v, float) else str(v) for v in entry.values()))
    return [table, second]
