"""Read Whisper from whisper.cpp's ggml files: header, mel filters, vocabulary, then tensors to the end of the file."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import LpaError

MAGIC = 0x67676D6C  # "ggml"
HPARAMS = (
    "n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer",
    "n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels", "ftype",
)  # fmt: skip
TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    1: np.dtype("<f2"),
}  # the others are quantised: whisper.cpp's q5_0 and the like

# OpenAI's names, as the file has them, and what transformers' WhisperEncoder calls the same tensors
OUTER = {
    "conv1": "conv1",
    "conv2": "conv2",
    "ln_post": "layer_norm",
}
INNER = {
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj",
    "attn_ln": "self_attn_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
}


class Ggml(NamedTuple):
    """A whole file."""

    hparams: dict[str, int]
    tensors: dict[str, np.ndarray]  # by OpenAI's names
    mel_filters: np.ndarray  # (mels, FFT bins) float32
    vocab: list[bytes]


class _Cursor:
    """A file's bytes and the place in them; what is not there is an error that says where the file ended."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise LpaError(f"{path} is not there; give a ggml file such as ggml-base.en.bin")
        self.path, self.data, self.at = path, path.read_bytes(), 0

    def take(self, size: int, what: str) -> memoryview:
        if self.at + size > len(self.data):
            raise LpaError(f"{self.path} is truncated: it ends within {what}; download it again")
        self.at += size
        return memoryview(self.data)[self.at - size : self.at]

    def ints(self, count: int, what: str) -> tuple[int, ...]:
        return struct.unpack(f"<{count}i", self.take(4 * count, what))


def read(path: Path | str) -> Ggml:
    """Everything in a ggml file of Whisper, in 16 or 32 bit."""
    cursor = _Cursor(Path(path))
    if cursor.ints(1, "its magic number")[0] != MAGIC:
        raise LpaError(
            f"{path} is not a ggml file (its first four bytes say otherwise); give one such as ggml-base.en.bin"
        )
    hparams = dict(zip(HPARAMS, cursor.ints(len(HPARAMS), "its header"), strict=True))
    if min(hparams[name] for name in HPARAMS[:-1]) < 1:
        raise LpaError(f"{path}: its header is no Whisper's ({hparams}); download it again")
    if hparams["ftype"] not in TYPES:
        raise LpaError(f"{path} is quantised (ftype {hparams['ftype']}); give the 16- or 32-bit file of the same model")
    mels, bins = cursor.ints(2, "its mel filters")
    if mels != hparams["n_mels"] or not 0 < bins < 65536:
        raise LpaError(
            f"{path}: mel filters of {mels} x {bins} in a model of {hparams['n_mels']} mels; download it again"
        )
    filters = np.frombuffer(cursor.take(4 * mels * bins, "its mel filters"), "<f4").reshape(mels, bins)
    vocab = []
    for _ in range(cursor.ints(1, "its vocabulary")[0]):
        vocab.append(bytes(cursor.take(max(0, cursor.ints(1, "its vocabulary")[0]), "its vocabulary")))
    tensors: dict[str, np.ndarray] = {}
    while cursor.at < len(cursor.data):
        name, tensor = _tensor(cursor, after=next(reversed(tensors), "its vocabulary"))
        if name in tensors:
            raise LpaError(f"{path} holds the tensor {name} twice; download it again")
        tensors[name] = tensor
    return Ggml(hparams, tensors, filters, vocab)


def _tensor(cursor: _Cursor, after: str) -> tuple[str, np.ndarray]:
    dims, length, kind = cursor.ints(3, f"the header of the tensor after {after}")
    if not 1 <= dims <= 4 or not 1 <= length <= 256:
        raise LpaError(f"{cursor.path}: what follows {after} is no tensor; the file is damaged, download it again")
    shape = cursor.ints(dims, f"the header of the tensor after {after}")[::-1]  # ggml counts from the last dimension
    try:
        name = bytes(cursor.take(length, f"the name of the tensor after {after}")).decode()
    except UnicodeDecodeError:
        raise LpaError(
            f"{cursor.path}: what follows {after} is no tensor; the file is damaged, download it again"
        ) from None
    if min(shape) < 1:
        raise LpaError(f"{cursor.path}: {name} has the shape {shape}; the file is damaged, download it again")
    if kind not in TYPES:
        raise LpaError(
            f"{cursor.path}: {name} is of type {kind}, which is quantised or unknown; give a 16- or 32-bit file"
        )
    data = cursor.take(math.prod(shape) * TYPES[kind].itemsize, f"the tensor {name}")
    return name, np.frombuffer(data, TYPES[kind]).reshape(shape)


def encoder_state(path: Path | str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(WhisperConfig's fields for the encoder, its weights as float32 by WhisperEncoder's names); whole or an error."""
    return _encoder(read(path), path)


def _encoder(file: Ggml, path: Path | str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    hparams = file.hparams
    dim, layers, mels = (hparams[k] for k in ("n_audio_state", "n_audio_layer", "n_mels"))
    config = {
        "d_model": dim,
        "encoder_layers": layers,
        "encoder_attention_heads": hparams["n_audio_head"],
        "encoder_ffn_dim": 4 * dim,
        "num_mel_bins": mels,
        "max_source_positions": hparams["n_audio_ctx"],
    }
    if dim % hparams["n_audio_head"]:
        raise LpaError(f"{path}: {hparams['n_audio_head']} heads do not divide a width of {dim}; download it again")
    state = {}
    for theirs, (ours, shape) in _names(dim, layers, mels, hparams["n_audio_ctx"]).items():
        tensor = file.tensors.get(theirs)
        if tensor is None:
            raise LpaError(f"{path} lacks the tensor {theirs}; it may be truncated, download it again")
        if tensor.size != math.prod(shape) or tuple(d for d in tensor.shape if d > 1) != tuple(
            d for d in shape if d > 1
        ):
            raise LpaError(f"{path}: {theirs} has the shape {tensor.shape}, expected {shape}; download it again")
        if not np.isfinite(tensor).all():
            raise LpaError(f"{path}: {theirs} holds values that are not numbers; download it again")
        state[ours] = tensor.astype(np.float32).reshape(shape)  # the file has the biases of convolutions as (D, 1)
    return config, state


def _names(dim: int, layers: int, mels: int, positions: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """OpenAI's name -> (transformers' name, shape), for every tensor of the encoder."""
    shapes = {
        "conv1": (dim, mels, 3), "conv2": (dim, dim, 3), "mlp.0": (4 * dim, dim), "mlp.2": (dim, 4 * dim),
        **{f"attn.{part}": (dim, dim) for part in ("query", "key", "value", "out")},
    }  # fmt: skip
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "encoder.positional_embedding": ("embed_positions.weight", (positions, dim))
    }
    places = [(f"encoder.{a}", b, a) for a, b in OUTER.items()]
    for i in range(layers):
        places += [(f"encoder.blocks.{i}.{a}", f"layers.{i}.{b}", a) for a, b in INNER.items()]
    for theirs, ours, kind in places:
        shape = shapes.get(kind, (dim,))  # layer norms have vectors only
        names[f"{theirs}.weight"] = (f"{ours}.weight", shape)
        if kind != "attn.key":  # the one projection that has no bias
            names[f"{theirs}.bias"] = (f"{ours}.bias", shape[:1])
    return names


def more_positions(table: np.ndarray, wanted: int) -> np.ndarray:
    """Whisper's position table (n, D), cut or carried on to `wanted` rows: sines and cosines have no end."""
    dim = table.shape[1]
    rates = np.exp(-np.log(10000) / (dim // 2 - 1) * np.arange(dim // 2))
    angles = np.arange(max(wanted, len(table)))[:, None] * rates
    full = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
    if wanted > len(table) and not np.allclose(full[: len(table)], table, atol=2e-3):
        raise LpaError(
            f"the position table is not Whisper's sines and cosines: keep max_source_positions at {len(table)}"
        )
    return np.concatenate([table, full[len(table) :]])[:wanted]


def import_whisper(
    path: Path | str,
    out: Path | str,
    *,
    seed: int = 0,
    weights: str = "float16",
    settings: dict[str, Any] | None = None,
) -> Path:
    """A model folder of a ggml file's encoder and a fresh CTC head. `settings`: the family's own, beside the file's."""
    import torch

    from . import families, surgery

    file = read(path)
    config, state = _encoder(file, path)
    config |= settings or {}
    state["embed_positions.weight"] = more_positions(state["embed_positions.weight"], config["max_source_positions"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = families.create("whisper", config)
    model.encoder.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()}, strict=True)
    filters = model.get_buffer("log_mel.filters").T.numpy()  # (mels, FFT bins)
    if filters.shape != file.mel_filters.shape or not np.allclose(filters, file.mel_filters, atol=1e-5):
        raise LpaError(f"{path} was made with other mel filters than Whisper's; it cannot be imported")
    return surgery.save(model, out, weights)
