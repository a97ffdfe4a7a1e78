"""Make synthetic speech with a Piper voice, as packed shards that `lpa train` reads while more are being made.

    python recipes/speak.py --voice DIR --text DIR --out DIR --workers N [--limit N] [--seconds MAX]

--voice  skeleton.onnx (the network), weights_fp16.npz (its weights by name) and voice.json
--text   sentences.txt and, line for line, phonemes.npz (flat: phoneme ids, lens: how many a sentence has)
--out    NNNNN.npz: audio (int16, 16 kHz, end to end), lengths, text, speaker; 40 utterances each

A shard depends on its number and --seed alone, appears under its name only when it is whole, and is not made twice:
stop at any time and run the same command again. Needs numpy, soxr, onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RATE = 16000
SIZE = 40  # utterances a shard


def rebuild(voice: Path, out: Path) -> None:
    """Put the 16-bit weights back into the network, as float32."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(voice / "skeleton.onnx")
    with np.load(voice / "weights_fp16.npz") as weights:
        for tensor in model.graph.initializer:
            if tensor.name in weights.files:
                tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name].astype(np.float32), tensor.name))
    onnx.save(model, out)


class Voice:
    """A session that speaks phonemes. The network's own noise is seeded when a session is made, so make one a shard."""

    def __init__(self, network: Path, settings: Path, seed: int):
        import onnxruntime

        onnxruntime.set_seed(seed)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # one process a core does better than threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(network), options, providers=["CPUExecutionProvider"])
        card = json.loads(settings.read_text())
        self.speakers, self.rate = card["num_speakers"], card["audio"]["sample_rate"]

    def speak(self, phonemes: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """int16 samples at 16 kHz and who spoke, with speaker, noise, pace and rhythm drawn from rng."""
        import soxr

        speaker = int(rng.integers(self.speakers))
        scales = [rng.uniform(0.4, 0.8), rng.uniform(0.9, 1.4), rng.uniform(0.5, 0.9)]  # noise, length, duration noise
        inputs = {
            "input": phonemes[None].astype(np.int64),
            "input_lengths": np.array([len(phonemes)]),
            "scales": np.array(scales, np.float32),
            "sid": np.array([speaker]),
        }
        wave = soxr.resample(self.session.run(None, inputs)[0].ravel(), self.rate, RATE)
        return np.rint(wave / max(1e-3, np.abs(wave).max()) * 30000).astype(np.int16), speaker


def write(path: Path, **arrays: np.ndarray) -> None:
    """Readers only ever see whole files: *.npz.part becomes *.npz."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, **arrays)
    part.replace(path)


def work(worker: int, options: argparse.Namespace, network: Path, numbers: list[int], made) -> None:
    """One process: every shard of `numbers` that is not there yet, while the total of seconds is below the limit."""
    os.nice(15)  # whatever trains beside this goes first
    sentences = (options.text / "sentences.txt").read_text().splitlines()
    with np.load(options.text / "phonemes.npz") as packed:
        phonemes, ends = packed["flat"], np.cumsum(packed["lens"])
    for number in numbers:
        if options.seconds and made.value >= options.seconds:
            return
        rng = np.random.default_rng([options.seed, number])
        voice = Voice(network, options.voice / "voice.json", seed=int(rng.integers(2**31)))
        rows = range(number * SIZE, min((number + 1) * SIZE, options.limit))
        clips, speakers = zip(
            *(voice.speak(phonemes[ends[j - 1] if j else 0 : ends[j]], rng) for j in rows), strict=True
        )
        lengths = np.array([len(c) for c in clips], np.int64)
        write(
            options.out / f"{number:05d}.npz",
            audio=np.concatenate(clips),
            lengths=lengths,
            text=np.array([sentences[j] for j in rows]),
            speaker=np.array([f"voice-{s}" for s in speakers]),
        )
        with made.get_lock():
            made.value += float(lengths.sum()) / RATE


def seconds_in(path: Path) -> float:
    with np.load(path) as shard:
        return float(shard["lengths"].sum()) / RATE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("voice", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int, help="sentences, from the first (all)")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop at this much speech, what is there included")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for path in (options.voice / "skeleton.onnx", options.voice / "weights_fp16.npz", options.voice / "voice.json"):
        if not path.is_file():
            parser.error(f"{path} is not there; --voice names a folder with it")
    with np.load(options.text / "phonemes.npz") as packed:
        options.limit = min(options.limit or len(packed["lens"]), len(packed["lens"]))
    options.out.mkdir(parents=True, exist_ok=True)

    shards = range(-(-options.limit // SIZE))
    there = {int(p.stem) for p in options.out.glob("[0-9]*.npz")}
    todo = [n for n in shards if n not in there]
    spawn = multiprocessing.get_context("spawn")
    made = spawn.Value("d", sum(seconds_in(options.out / f"{n:05d}.npz") for n in there))
    before, start = made.value, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "voice.onnx"
        rebuild(options.voice, network)
        turns = [todo[w :: options.workers] for w in range(options.workers)]
        team = [spawn.Process(target=work, args=(w, options, network, t, made)) for w, t in enumerate(turns) if t]
        for process in team:
            process.start()
        while any(process.is_alive() for process in team):
            for process in team:
                process.join(10 / len(team))
            pace = (made.value - before) / (time.monotonic() - start)
            print(f"{made.value / 3600:.2f} h of speech, {pace:.0f} s a second", file=sys.stderr, flush=True)
    return max((process.exitcode or 0 for process in team), key=abs, default=0)


if __name__ == "__main__":
    sys.exit(main())
