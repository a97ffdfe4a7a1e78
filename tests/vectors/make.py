"""Make the committed test vectors again: `python tests/vectors/make.py [NAME …]`, with torch and the ONNX exporter.

Small models of random weights that hold every mixer, each a model folder with its graph and the logits that torch
gives for the beginning of a bundled clip; and such logits for the built-in model, where there is one (`default`).
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]  # this package, and the small models

CLIP = ROOT / "tests" / "data" / "librivox" / "austen-0870.flac"
LENGTHS = (700, 5000, 20799, 40000)  # samples: from a frame or two to more than any window's reach

# Short windows: a graph holds an indicator of each of them, and they are most of a small one.
PYRAMID = {"block": 8, "pieces": [1, 1, 2, 4], "steps": [1, 2, 4]}
WINDOW, LADDER, ANCHORED = {"side": 20}, {"ladder": 4, "reach": 6}, {"anchored": 4, "reach": 12}
DYNCONV = {"taps": 5, "heads": 2}
HARD = {"hard": True}

WHISPER = {"d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 24}
# Three convolutions where Wav2Vec2 has seven, with its stride: the exporter takes long over seven.
CONVS = {"conv_dim": [16] * 3, "conv_kernel": [12, 8, 4], "conv_stride": [10, 8, 4]}
WAVE = {**CONVS, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}

Mixers = list[tuple[str, dict[str, Any]]]  # of each layer, with its settings
KEPT: Mixers = [("attention", {})]

# name -> (the small model it comes from, what differs, the mixers)
MODELS: dict[str, tuple[str, dict[str, Any], Mixers]] = {
    "whisper-every-mixer": (
        "whisper-fixed-floor",
        WHISPER,
        [
            *KEPT,
            *[("lpa", {}), ("lpa", HARD), ("anchored", ANCHORED), ("ladder", LADDER)],
            *[("pyramid", PYRAMID), ("window", WINDOW)],
            *[("conv", {"taps": 9}), ("dynconv", DYNCONV), ("summary", {}), ("none", {})],
        ],
    ),
    "whisper-bounded": (  # all layers replaced and no positions: what streams; half of them look less far ahead
        "whisper-fixed-floor",
        WHISPER,
        [
            *[("pyramid", PYRAMID), ("window", WINDOW), ("ladder", {**LADDER, "right": 2})],
            *[("pyramid", {**PYRAMID, "right": 4}), ("window", {**WINDOW, "right": 3}), ("pyramid", PYRAMID)],
        ],
    ),
    "whisper-positions": ("whisper", {**WHISPER, "max_source_positions": 150}, KEPT * 2),
    "wav2vec2-8-of-12": (
        "wav2vec2",
        WAVE,
        [
            *KEPT * 2,
            *[("pyramid", PYRAMID), ("window", WINDOW), ("ladder", LADDER), ("lpa", HARD)],
            *[("pyramid", PYRAMID), ("window", WINDOW), ("anchored", ANCHORED), ("lpa", {})],
            *KEPT * 2,
        ],
    ),
    "wav2vec2-norm-first": ("wav2vec2-stable", WAVE, [*KEPT, ("pyramid", PYRAMID)]),
}


def make_model(folder: Path, case: str, changes: dict[str, Any], mixers: Mixers) -> None:
    import torch
    from tiny_models import make

    from lpa.export.onnx import export_onnx
    from lpa.surgery import mixer_at, save, swap

    model = make(case, layers=len(mixers), **changes)
    for index, (name, config) in enumerate(mixers):
        if name != "attention":
            swap(model, index, name, config)
            generator = torch.Generator().manual_seed(index)
            with torch.no_grad():
                for parameter in mixer_at(model, index).parameters():  # off its starting value
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save(model, folder, weights="float16")  # half the space; every runtime unpacks them
    export_onnx(str(folder), folder)
    strip(folder / "model.onnx")


def strip(path: Path) -> None:
    """Take out of a graph what names the machine and the lines of code it came from: it is most of a small one."""
    import onnx

    model = onnx.load(path)
    for thing in (model, model.graph, *model.graph.node, *model.graph.value_info, *model.functions):
        del thing.metadata_props[:]
        thing.doc_string = ""
    del model.graph.value_info[:]
    onnx.save(model, path)


def make_vectors(folder: Path, target: Path, lengths: tuple[int, ...]) -> None:
    """What torch, in float32, hears in the first so many samples of the clip."""
    from lpa import audio
    from lpa.run.torch import TorchListener

    samples, listener = audio.read(CLIP), TorchListener.load(folder)
    heard = {str(length): listener.hear(samples[:length]) for length in lengths}
    np.savez_compressed(target, fingerprint=fingerprint(folder), **heard)


def fingerprint(folder: Path) -> str:
    """Of the weights that vectors were made with."""
    return hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()


def main(names: list[str]) -> None:
    from lpa.run import DEFAULT

    for name in names or [*MODELS, *(["default"] if (DEFAULT / "plan.json").is_file() else [])]:
        if name == "default":
            make_vectors(DEFAULT, HERE / "default.npz", (40000, 96000))
        else:
            make_model(HERE / name, *MODELS[name])
            make_vectors(HERE / name, HERE / name / "vectors.npz", LENGTHS)
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
