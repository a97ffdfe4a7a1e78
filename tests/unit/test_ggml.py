"""The ggml reader: a file written here by hand, Whisper's encoder computed a second way, and every kind of damage."""

import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.audio_utils import mel_filter_bank

import lpa
from lpa import ggml
from lpa.errors import LpaError
from lpa.families import create

DIM, HEADS, LAYERS, POSITIONS, MELS = 16, 2, 2, 20, 80
HPARAMS = (7, POSITIONS, DIM, HEADS, LAYERS, 8, DIM, HEADS, LAYERS, MELS, 1)
VOCAB = [b"a", b"", b"\xff\x00b"]
FILTERS = mel_filter_bank(201, MELS, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney").T.astype(np.float32)


def weights() -> dict[str, np.ndarray]:
    """OpenAI's names; matrices as float16 and vectors as float32, as whisper.cpp's converter leaves them."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"encoder.positional_embedding": (POSITIONS, DIM)}
    for name, inputs in (("conv1", MELS), ("conv2", DIM)):
        shapes[f"encoder.{name}.weight"], shapes[f"encoder.{name}.bias"] = (DIM, inputs, 3), (DIM, 1)
    for block in range(LAYERS):
        for part, shape in {
            "attn.query": (DIM, DIM), "attn.key": (DIM, DIM), "attn.value": (DIM, DIM), "attn.out": (DIM, DIM),
            "mlp.0": (4 * DIM, DIM), "mlp.2": (DIM, 4 * DIM), "attn_ln": (DIM,), "mlp_ln": (DIM,),
        }.items():  # fmt: skip
            shapes[f"encoder.blocks.{block}.{part}.weight"] = shape
            if part != "attn.key":
                shapes[f"encoder.blocks.{block}.{part}.bias"] = shape[:1]
    shapes["encoder.ln_post.weight"] = shapes["encoder.ln_post.bias"] = (DIM,)
    shapes["decoder.ln.weight"] = (DIM,)  # the reader takes what else there is
    small = {n: rng.normal(0, 0.3, s) + ("ln" in n and n.endswith("weight")) for n, s in shapes.items()}
    return {n: v.astype(np.float16 if v.ndim > 1 and not n.endswith("bias") else np.float32) for n, v in small.items()}


def tensor(name: str, value: np.ndarray, kind: int | None = None) -> bytes:
    kind = {np.dtype("f4"): 0, np.dtype("f2"): 1}[value.dtype] if kind is None else kind
    header = struct.pack("<3i", value.ndim, len(name), kind) + struct.pack(f"<{value.ndim}i", *value.shape[::-1])
    return header + name.encode() + value.tobytes()


def build(tensors: dict[str, np.ndarray], hparams=HPARAMS, magic=0x67676D6C) -> bytes:
    head = struct.pack("<i11i2i", magic, *hparams, *FILTERS.shape) + FILTERS.tobytes()
    vocab = struct.pack("<i", len(VOCAB)) + b"".join(struct.pack("<i", len(w)) + w for w in VOCAB)
    return head + vocab + b"".join(tensor(n, v) for n, v in tensors.items())


def write(folder: Path, data: bytes) -> Path:
    path = folder / "ggml-tiny.bin"
    path.write_bytes(data)
    return path


def reference(weights: dict[str, np.ndarray], mel: torch.Tensor, heads: int, layers: int) -> torch.Tensor:
    """Whisper's encoder in plain operations, by OpenAI's names. mel (B, mels, M) → (B, M/2, D)."""
    w = {n.removeprefix("encoder."): torch.from_numpy(v.astype(np.float32)) for n, v in weights.items()}

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]
        )

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    x = gelu(F.conv1d(mel, w["conv1.weight"], w["conv1.bias"].ravel(), padding=1))
    x = gelu(F.conv1d(x, w["conv2.weight"], w["conv2.bias"].ravel(), stride=2, padding=1)).transpose(1, 2)
    x = x + w["positional_embedding"][: x.shape[1]]
    for block in (f"blocks.{i}" for i in range(layers)):
        h = norm(x, f"{block}.attn_ln")
        q, k, v = (
            linear(h, f"{block}.attn.{part}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )  # (B, H, T, E)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + linear((scores @ v).transpose(1, 2).flatten(2), f"{block}.attn.out")
        x = x + linear(gelu(linear(norm(x, f"{block}.mlp_ln"), f"{block}.mlp.0")), f"{block}.mlp.2")
    return norm(x, "ln_post")


def encode(config: dict, state: dict[str, np.ndarray], mel: torch.Tensor) -> torch.Tensor:
    """The same, by our model with the weights that were read."""
    model = create("whisper", config)
    model.encoder.load_state_dict({n: torch.from_numpy(v) for n, v in state.items()})
    with torch.inference_mode():
        return model.encode(mel.transpose(1, 2), torch.full((len(mel),), mel.shape[2])).last


def test_everything_is_read_back(tmp_path):
    tensors = weights()
    file = ggml.read(write(tmp_path, build(tensors)))
    assert tuple(file.hparams.values()) == HPARAMS
    assert np.array_equal(file.mel_filters, FILTERS)
    assert file.vocab == VOCAB
    assert list(file.tensors) == list(tensors)
    for name, value in tensors.items():
        assert file.tensors[name].dtype == value.dtype
        assert np.array_equal(file.tensors[name], value), name


def test_encoder_agrees_with_the_mathematics(tmp_path):
    tensors = weights()
    config, state = ggml.encoder_state(write(tmp_path, build(tensors)))
    assert config["encoder_layers"] == LAYERS
    mel = torch.randn(2, MELS, 2 * POSITIONS, generator=torch.Generator().manual_seed(0))
    expected = reference(tensors, mel, HEADS, LAYERS)
    assert torch.allclose(encode(config, state, mel), expected, atol=1e-4)
    swapped = {**state, "layers.1.fc1.bias": state["layers.0.fc1.bias"]}  # one vector astray would show
    assert (encode(config, swapped, mel) - expected).abs().max() > 1e-2


def test_import_makes_a_model_folder(tmp_path):
    path = write(tmp_path, build(weights()))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    ggml.import_whisper(path, tmp_path / "model", weights="float32", settings={"mel_floor": -4.0})
    assert torch.equal(torch.get_rng_state(), before)
    ggml.import_whisper(path, tmp_path / "again", weights="float32", settings={"mel_floor": -4.0})
    model, again = lpa.load(tmp_path / "model"), lpa.load(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for name, value in ggml.encoder_state(path)[1].items():
        assert np.array_equal(model.encoder.state_dict()[name].numpy(), value), name
    assert model.settings.mel_floor == -4.0
    output = model(torch.randn(2, 4800), torch.tensor([4800, 3000]))
    assert output.logits.shape == (2, 15, len(model.tokens))
    assert output.lengths.tolist() == [15, 10]


def test_import_refuses_other_mel_filters(tmp_path):
    data = bytearray(build(weights()))
    data[56:60] = struct.pack("<f", 3.0)  # the first filter's first value: 4 bytes of magic, 44 of header, 8 of sizes
    with pytest.raises(LpaError, match="other mel filters"):
        ggml.import_whisper(write(tmp_path, bytes(data)), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_damage_is_named(tmp_path):
    tensors = weights()
    whole = build(tensors)
    query = "encoder.blocks.0.attn.query.weight"
    vocab_end = len(build({}))
    wrong = {
        "its magic number": whole[:3],
        "its header": whole[:20],
        "its mel filters": whole[:2000],
        "its vocabulary": whole[: vocab_end - 1],
        "not a ggml file": build(tensors, magic=0x46554747),
        r"quantised \(ftype 8\)": build(tensors, (*HPARAMS[:-1], 8)),
        "no Whisper's": build(tensors, (7, 0, *HPARAMS[2:])),
        "the tensor decoder.ln.weight": whole[:-1],
        "header of the tensor after decoder.ln.weight": whole + b"\0\0\0",
        "what follows decoder.ln.weight is no tensor": whole + b"\xee" * 40,
        "decoder.ln.weight twice": whole + tensor("decoder.ln.weight", np.zeros(3, np.float32)),
        "odd is of type 6": whole + tensor("odd", np.zeros(3, np.float32), kind=6),
        f"{query} has the shape": build({**tensors, query: np.zeros((DIM, DIM + 1), np.float16)}),
        f"lacks the tensor {query}": build({n: v for n, v in tensors.items() if n != query}),
        f"{query} holds values that are not numbers": build(
            {**tensors, query: np.full((DIM, DIM), np.nan, np.float16)}
        ),
        "3 heads do not divide": build(tensors, (7, POSITIONS, DIM, 3, *HPARAMS[4:])),
    }
    for reason, data in wrong.items():
        with pytest.raises(LpaError, match=reason) as error:
            ggml.encoder_state(write(tmp_path, data))
        assert "ggml-tiny.bin" in str(error.value)
    with pytest.raises(LpaError, match="not there"):
        ggml.read(tmp_path / "none.bin")


def test_no_truncation_goes_unnoticed(tmp_path):
    tensors = {n: v for n, v in weights().items() if n.startswith("encoder.")}
    whole = build(tensors)
    for size in np.random.default_rng(0).integers(0, len(whole), 60):
        with pytest.raises(LpaError, match=r"truncated|lacks the tensor"):
            ggml.encoder_state(write(tmp_path, whole[:size]))


def test_real_file():
    path = os.environ.get("LPA_WHISPER_GGML")
    if not path:
        pytest.skip("no Whisper at hand; set LPA_WHISPER_GGML to a file such as ggml-base.en.bin")
    file = ggml.read(path)
    config, state = ggml.encoder_state(path)
    frames = 400
    mel = torch.randn(1, config["num_mel_bins"], frames, generator=torch.Generator().manual_seed(0)) * 0.5
    encoder = {n: v for n, v in file.tensors.items() if n.startswith("encoder.")}
    expected = reference(encoder, mel, config["encoder_attention_heads"], config["encoder_layers"])
    assert torch.allclose(encode(config, state, mel), expected, atol=1e-3)
    assert np.allclose(file.mel_filters, FILTERS[: config["num_mel_bins"]], atol=1e-5)


def test_positions_go_on_for_longer_audio(tmp_path):
    from transformers.models.whisper.modeling_whisper import sinusoids

    tensors = weights()
    tensors["encoder.positional_embedding"] = sinusoids(POSITIONS, DIM).numpy().astype(np.float16)
    path = write(tmp_path, build(tensors))
    ggml.import_whisper(path, tmp_path / "model", weights="float32", settings={"max_source_positions": 50})
    table = lpa.load(tmp_path / "model").encoder.embed_positions.weight
    torch.testing.assert_close(table, sinusoids(50, DIM), atol=1e-3, rtol=0)
    odd = write(tmp_path, build(weights()))
    with pytest.raises(LpaError, match="not Whisper's sines and cosines"):
        ggml.import_whisper(odd, tmp_path / "odd", settings={"max_source_positions": 50})
