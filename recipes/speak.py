"""Make synthetic speech with a Piper voice, as packed shards that `lpa train` reads while more are being made.

    python recipes/speak.py --voice DIR --text DIR --out DIR --workers N [--limit N] [--seconds MAX] [--cuda]

--voice  skeleton.onnx (the network), weights_fp16.npz (its weights by name) and voice.json
--text   sentences.txt and, line for line, phonemes.npz (flat: phoneme ids, lens: how many a sentence has)
--out    NNNNN.npz: audio (int16, 16 kHz, end to end), lengths, text, speaker; 256 utterances each
--cuda   a shard at once on a GPU, hundreds of times as fast; a few workers fill it

A shard depends on its number, --seed and --cuda alone, appears under its name only when it is whole, and is not made
twice: stop at any time and run the same command again. Needs numpy, soxr, onnx and onnxruntime; --cuda needs torch.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RATE = 16000
SIZE = 256  # utterances a shard


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

    def run(self, phonemes: np.ndarray, rng: np.random.Generator) -> tuple[list[np.ndarray], int]:
        """The network's outputs and who spoke, with speaker, noise, pace and rhythm drawn from rng."""
        speaker = int(rng.integers(self.speakers))
        scales = [rng.uniform(0.4, 0.8), rng.uniform(0.9, 1.4), rng.uniform(0.5, 0.9)]  # noise, length, duration noise
        inputs = {
            "input": phonemes[None].astype(np.int64),
            "input_lengths": np.array([len(phonemes)]),
            "scales": np.array(scales, np.float32),
            "sid": np.array([speaker]),
        }
        return self.session.run(None, inputs), speaker

    def speak(self, lines: list[np.ndarray], rng: np.random.Generator) -> tuple[list[np.ndarray], list[int]]:
        """int16 samples at 16 kHz and the speaker of each line."""
        import soxr

        said, speakers = zip(*(self.run(line, rng) for line in lines), strict=True)
        return [loud(soxr.resample(outputs[0].ravel(), self.rate, RATE)) for outputs in said], list(speakers)


def loud(wave: np.ndarray) -> np.ndarray:
    return np.rint(wave / max(1e-3, np.abs(wave).max()) * 30000).astype(np.int16)


# Where the network is cut: what to say, frame by frame; who says it; the frames of each line.
PLAN = ["/Add_output_0", "/Unsqueeze_output_0", "/Cast_output_0"]
# Values inside the network, one for all lines there, each line's own here: noise, length, duration noise; voice.
SCALES, VOICE = ("/Gather_output_0", "/Gather_1_output_0", "/Gather_2_output_0"), "/emb_g/Gather_output_0"
FRAMES = 48_000  # spoken at once; the last layer has 256 samples a frame
PAIRS = 3_000_000  # of phonemes of one line, planned at once: some 2 kB each, for all that the graph makes is kept


class CudaVoice:
    """The whole network by torch, all lines of a shard at once; every second line's voice is a mix of two speakers'."""

    def __init__(self, network: Path, settings: Path, seed: int, device: str = "cuda"):
        import torch

        self.device, self.seed = device, seed
        self.graph, self.weights, self.voices = self.load(network, device)
        card = json.loads(settings.read_text())
        self.rate = card["audio"]["sample_rate"]
        torch.manual_seed(seed)

    @staticmethod
    @functools.cache
    def load(network: Path, device: str):
        """The nodes up to PLAN; weight and bias of every convolution after it, by the name of its node; the voices."""
        import onnx
        import torch
        from onnx_in_torch import Graph

        model = onnx.load(network)
        values = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
        weights = {
            node.name: [values[name].to(device) for name in node.input[1:]]
            for node in model.graph.node
            if node.op_type.startswith("Conv") and node.name.startswith(("/flow/", "/dec/"))
        }
        return Graph(model, PLAN, device), weights, values["emb_g.weight"].to(device)

    def plan(self, lines: list[np.ndarray], rng: np.random.Generator):
        """What PLAN names, for all lines, and each one's speaker: everything that differs is drawn from rng."""
        import torch

        count, longest = len(lines), max(map(len, lines))
        phonemes = np.zeros((count, longest), np.int64)
        for row, line in zip(phonemes, lines, strict=True):
            row[: len(line)] = line
        scales = [rng.uniform(low, high, (count, 1, 1)) for low, high in ((0.4, 0.8), (0.85, 1.4), (0.5, 0.9))]
        one, two = rng.integers(len(self.voices), size=(2, count))
        share = rng.uniform(0.0, 0.5, count) * (rng.random(count) < 0.5)

        def place(values: np.ndarray):
            return torch.from_numpy(values).to(self.device)

        given = {name: place(scale.astype(np.float32)) for name, scale in zip(SCALES, scales, strict=True)}
        mixed = torch.lerp(self.voices[one], self.voices[two], place(share.astype(np.float32)[:, None]))
        lengths = place(np.array([len(line) for line in lines]))
        return self.graph(input=place(phonemes), input_lengths=lengths, **given, **{VOICE: mixed}), one.tolist()

    def conv(self, name: str, x, dilation: int = 1):
        from torch.nn import functional as F

        weight, *bias = self.weights[f"{name}/Conv"]
        return F.conv1d(x, weight, *bias, padding=dilation * (weight.shape[-1] // 2), dilation=dilation)

    def flow(self, z, mask, who):
        """VITS's coupling layers, backwards: each takes from one half of the channels what it reads off the other."""
        import torch

        for layer in ("/flow/flows.6", "/flow/flows.4", "/flow/flows.2", "/flow/flows.0"):
            kept, changed = z.flip(1).chunk(2, 1)
            x, total = self.conv(f"{layer}/pre", kept) * mask, 0
            voices = self.conv(f"{layer}/enc/cond_layer", who).chunk(4, 1)
            for i, voice in enumerate(voices):
                rise, gate = (self.conv(f"{layer}/enc/in_layers.{i}", x) + voice).chunk(2, 1)
                both = self.conv(f"{layer}/enc/res_skip_layers.{i}", rise.tanh() * gate.sigmoid())
                *on, skip = both.split(x.shape[1], 1)
                x, total = (x + on[0]) * mask if on else x, total + skip
            z = torch.cat([kept, (changed - self.conv(f"{layer}/post", total * mask) * mask) * mask], 1)
        return z * mask

    def decode(self, z, mask, who):
        """HiFi-GAN: three steps up to samples, after each the mean of three blocks of dilated convolutions.

        Channels last, as images one pixel high: half precision has its fast kernels for these alone.
        """
        import torch
        from torch.nn import functional as F

        x = self.conv("/dec/conv_pre", z) + self.conv("/dec/cond", who)
        mask = mask.to(x.dtype).unsqueeze(2)  # or every product with it would be float32
        x = (x.unsqueeze(2) * mask).contiguous(memory_format=torch.channels_last)  # (N, C, 1, T)
        for step, stride in enumerate((8, 8, 4)):
            x = self.stretch(F.leaky_relu(x, 0.1), *self.weights[f"/dec/ups.{step}/ConvTranspose"], stride)
            mask = mask.repeat_interleave(stride, -1)
            x, total = x * mask, 0  # silence beyond a line's end, as the network has it for one line alone
            for block, dilations in enumerate(((1, 2), (2, 6), (3, 12))):
                y = x
                for i, dilation in enumerate(dilations):
                    inner = F.leaky_relu(y, 0.1) * mask
                    y = y + self.image_conv(f"/dec/resblocks.{3 * step + block}/convs.{i}", inner, dilation)
                total = total + y
            x = total / 3 * mask
        return (self.image_conv("/dec/conv_post", F.leaky_relu(x, 0.01)).tanh() * mask).squeeze(2)

    def image_conv(self, name: str, x, dilation: int = 1):
        import torch
        from torch.nn import functional as F

        weight, *bias = self.weights[f"{name}/Conv"]
        weight = weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        padding = dilation * (weight.shape[-1] // 2)
        return F.conv2d(x, weight, *bias, padding=(0, padding), dilation=(1, dilation))

    @staticmethod
    def stretch(x, weight, bias, stride: int):
        """A transposed convolution of kernel 2·stride: one product, whose halves overlap. x (N, C, 1, T)."""
        import torch
        from torch.nn import functional as F

        x = x.squeeze(2).transpose(1, 2)  # (N, T, C)
        first, second = (x @ weight.permute(0, 2, 1).flatten(1)).chunk(2, -1)  # (N, T, stride · C') each
        y = F.pad(first, (0, 0, 0, 1)) + F.pad(second, (0, 0, 1, 0))  # (N, T + 1, stride · C')
        y = y.unflatten(-1, (stride, -1)).flatten(1, 2)[:, stride // 2 : -(stride // 2)] + bias.to(x.dtype)
        return y.transpose(1, 2).unsqueeze(2).contiguous(memory_format=torch.channels_last)

    def speak(self, lines: list[np.ndarray], rng: np.random.Generator) -> tuple[list[np.ndarray], list[int]]:
        """int16 samples at 16 kHz and the speaker of each line."""
        import torch

        clips, speakers, longest = [], [], max(map(len, lines))
        rows = max(1, PAIRS // longest**2)
        for some in (lines[start : start + rows] for start in range(0, len(lines), rows)):
            (z, who, frames), spoke = self.plan(some, rng)
            most = max(1, FRAMES // z.shape[-1])
            parts = zip(z.split(most), who.split(most), frames.split(most), strict=True)
            clips += [clip for part in parts for clip in self.sound(*part)]
            speakers += spoke
        if self.device == "cuda":
            torch.cuda.empty_cache()  # lengths differ from shard to shard, and others want the memory
        return clips, speakers

    def sound(self, z, who, frames, half: bool = True) -> list[np.ndarray]:
        import torch

        longest = int(frames.max())
        z, mask = z[..., :longest], (torch.arange(longest, device=self.device) < frames[:, None]).float()[:, None]
        half = half and self.device == "cuda"
        with torch.inference_mode(), torch.autocast(self.device, torch.float16, enabled=half):
            wave = self.decode(self.flow(z, mask, who), mask, who)[:, 0].float()
            # Resampled by cutting the spectrum: a length that is a whole number of both rates' smallest common step.
            step = math.gcd(self.rate, RATE)
            old, new = self.rate // step, RATE // step
            steps = -(-wave.shape[-1] // (64 * old)) * 64  # few lengths, with small factors
            if self.device == "cuda":
                torch.backends.cuda.cufft_plan_cache.max_size = 2  # each keeps gigabytes
            spectrum = torch.fft.rfft(wave, steps * old)[:, : steps * new // 2 + 1]
            wave = torch.fft.irfft(spectrum, steps * new)
            peak = wave.abs().amax(1, keepdim=True)
            if not peak.isfinite().all():
                if half:  # too loud somewhere inside for its range
                    return self.sound(z, who, frames, half=False)
                raise FloatingPointError("the voice gave something that is no number")
            wave = wave * (30000 / peak.clamp(min=1e-3))
            wave = wave.round().to(torch.int16).cpu().numpy()
        samples = frames.cpu().numpy() * 256 * new // old
        return [row[:count] for row, count in zip(wave, samples, strict=True)]


def in_shards(lens: np.ndarray) -> np.ndarray:
    """Line numbers, shard after shard: of every 32 shards' lines those of like length share one, so little is padded.

    Which shard has which length is drawn, so that the first few have all lengths.
    """
    order = np.arange(len(lens))
    for start in range(0, len(lens), 32 * SIZE):
        part = order[start : start + 32 * SIZE]
        part = part[np.argsort(lens[part], kind="stable")]
        whole, rest = np.split(part, [len(part) // SIZE * SIZE])
        shuffled = np.random.default_rng(start).permutation(whole.reshape(-1, SIZE)).ravel()
        order[start : start + 32 * SIZE] = np.concatenate([shuffled, rest])
    return order


def write(path: Path, **arrays: np.ndarray) -> None:
    """Readers only ever see whole files: *.npz.part becomes *.npz."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, **arrays)
    part.replace(path)


def work(worker: int, options: argparse.Namespace, network: Path, numbers: list[int], made) -> None:
    """One process: every shard of `numbers` that is not there yet, while the total of seconds is below the limit."""
    os.nice(15)  # whatever trains beside this goes first
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sentences = (options.text / "sentences.txt").read_text().splitlines()
    with np.load(options.text / "phonemes.npz") as packed:
        phonemes, lens = packed["flat"], packed["lens"]
    ends, order = np.cumsum(lens), in_shards(lens[: options.limit])
    for number in numbers:
        path = options.out / f"{number:05d}.npz"
        if path.exists():  # copied here meanwhile
            continue
        if options.seconds and made.value >= options.seconds:
            return
        rng = np.random.default_rng([options.seed, number])
        kind = CudaVoice if options.cuda else Voice
        voice = kind(network, options.voice / "voice.json", seed=int(rng.integers(2**31)))
        rows = order[number * SIZE : (number + 1) * SIZE]
        clips, speakers = voice.speak([phonemes[ends[j - 1] if j else 0 : ends[j]] for j in rows], rng)
        lengths = np.array([len(c) for c in clips], np.int64)
        write(
            path,
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
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for path in (options.voice / "skeleton.onnx", options.voice / "weights_fp16.npz", options.voice / "voice.json"):
        if not path.is_file():
            parser.error(f"{path} is not there; --voice names a folder with it")
    with np.load(options.text / "phonemes.npz") as packed:
        options.limit = min(options.limit or len(packed["lens"]), len(packed["lens"]))
    options.out.mkdir(parents=True, exist_ok=True)

    there = {int(p.stem) for p in options.out.glob("[0-9]*.npz")}
    todo = [n for n in range(-(-options.limit // SIZE)) if n not in there]
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
