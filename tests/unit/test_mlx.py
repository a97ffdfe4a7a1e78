"""MLX gives torch's numbers: every mixer, every norm of both families, any stored precision; and needs no torch."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make

mx = pytest.importorskip("mlx.core", reason="mlx is not installed; pip install 'lpa[mlx]' to test its backend")

from lpa.errors import LpaError  # noqa: E402
from lpa.export.mlx import export_mlx  # noqa: E402
from lpa.mixers import MIXERS, resolve  # noqa: E402
from lpa.mixers import build as build_torch  # noqa: E402
from lpa.run import open_model  # noqa: E402
from lpa.run.mlx import MlxListener  # noqa: E402
from lpa.run.mlx import mixers as ours  # noqa: E402
from lpa.run.mlx.layers import Flow, product  # noqa: E402
from lpa.run.mlx.weights import Weights  # noqa: E402
from lpa.run.torch import TorchListener  # noqa: E402
from lpa.surgery import mixer_at, save, swap  # noqa: E402

ROOT = Path(__file__).parents[2]
CLIP = ROOT / "tests" / "data" / "librivox" / "austen-0870.flac"
NOTHING_MORE = {"amplitudes": False, "output_gate": False, "modulation": False, "coordination": False, "skip": False}
SETTINGS = [
    *[(name, {}) for name in MIXERS],
    *[("lpa", {"hard": True}), ("lpa", {"weights": "utterance"}), ("lpa", {"weights": "static", **NOTHING_MORE})],
    *[("lpa", {"positional": 0}), ("lpa", {"aperiodic": 0}), ("lpa", {"anchored": 3, "ladder": 5, "hard": True})],
    *[("ladder", {"right": 5}), ("anchored", {"right": 0}), ("window", {"right": 7}), ("pyramid", {"right": 20})],
    *[("window", {"side": 3, "block": 16}), ("pyramid", {"block": 4, "pieces": [1, 3], "steps": [1, 3, 5]})],
    *[("window", {"places": True}), ("pyramid", {"places": True, "right": 20})],
    *[("conv", {"taps": 5}), ("dynconv", {"taps": 3, "heads": 2})],
]


def shaken(mixer: torch.nn.Module, size: float) -> torch.nn.Module:
    """Every parameter moved off its starting value, so that nothing is hidden by a zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return mixer.eval()


def attention() -> torch.nn.Module:
    return make("wav2vec2", layers=1).encoder.layers[0].attention


def converted(case: str, mixers: list[str], **changes):
    """A small model with these mixers from the first layer on, moved off their starting values."""
    model = make(case, layers=len(mixers), **changes)
    for index, name in enumerate(mixers):
        if name != "attention":
            swap(model, index, name.removesuffix("-hard"), {"hard": True} if name.endswith("-hard") else None)
            shaken(mixer_at(model, index), 0.1)
    return model


def noise(samples: int) -> np.ndarray:
    return 0.1 * np.random.default_rng(samples).normal(size=samples).astype(np.float32)


def differ(a, b, *lengths: int) -> float:
    """The largest difference of two listeners' logits."""
    return max(float(np.abs(a.hear(noise(n)) - b.hear(noise(n))).max()) for n in lengths)


# --- mixers


@pytest.mark.parametrize(("name", "config"), SETTINGS)
def test_a_mixer_is_torchs(name, config):
    torch.manual_seed(0)
    theirs = shaken(build_torch(name, attention(), config), 0.2)
    state = {key: mx.array(value.numpy()) for key, value in theirs.state_dict().items()}
    weights = Weights(state)
    mixer = ours.build(name, weights, 32, 4, resolve(name, config)[1].to_dict())
    weights.check_all_taken()
    for frames in (1, 15, 16, 65, 200, 700):
        generator = torch.Generator().manual_seed(frames)
        x, skip = torch.randn(2, 1, frames, 32, generator=generator)
        gates = torch.rand(1, 9, generator=generator)  # of a layer with fewer pulses
        with torch.no_grad():
            wanted = theirs(x, gates=gates, skip=skip)
        flow = Flow(gates=mx.array(gates[0].numpy()), skip=mx.array(skip[0].numpy()))
        found = mixer(mx.array(x[0].numpy()), flow)
        assert np.abs(np.array(found) - wanted.y[0].detach().numpy()).max() < 2e-4, frames
        passed = gates if wanted.gates is None else wanted.gates
        np.testing.assert_allclose(np.array(flow.gates), passed[0].numpy(), atol=1e-4)


def test_settings_are_torchs():
    """So that one that is added there is added here."""
    assert set(ours.MIXERS) == set(MIXERS)
    for name, (kind, _) in MIXERS.items():
        assert ours.MIXERS[name].settings == {field.name for field in dataclasses.fields(kind.Config)}, name


def test_an_older_plan_has_no_right_and_a_newer_one_is_refused():
    state = {k: mx.array(v.detach().numpy()) for k, v in build_torch("window", attention()).state_dict().items()}
    ours.build("window", Weights(state), 32, 4, {"side": 5, "block": 8})
    with pytest.raises(LpaError, match="does not know: dilation"):
        ours.build("window", Weights(state), 32, 4, {"side": 5, "block": 8, "dilation": 2})
    with pytest.raises(LpaError, match="no mixer in MLX 'lap'; have anchored"):
        ours.build("lap", Weights(state), 32, 4, {})


# --- whole models


@pytest.mark.parametrize(
    ("case", "mixers"),
    [
        ("whisper", ["attention", "pyramid"]),
        (
            "whisper-fixed-floor",
            ["lpa", "lpa-hard", "ladder", "anchored", "lpa", "summary"],
        ),  # gates and skips passed on
        ("wav2vec2", ["attention", "window"]),
        ("wav2vec2-stable", ["attention", "lpa-hard"]),
        ("wav2vec2-stable-group", ["conv"]),
        ("hubert", ["dynconv", "attention"]),
        ("hubert-stable", ["none", "attention"]),
        ("hubert-batch-norm", ["attention"]),
    ],
)
def test_a_model_is_torchs(case, mixers, tmp_path):
    model = converted(case, mixers)
    if case == "hubert-batch-norm":
        norm = model.encoder.pos_conv_embed.batch_norm
        norm.running_mean.normal_(generator=torch.Generator().manual_seed(0))
        norm.running_var.fill_(0.5)
    a, b = TorchListener(model), open_model(save(model, tmp_path / "model"), "mlx")
    assert differ(a, b, 400, 8001, 30000) < 1e-4
    assert (a.facts, a.field, a.tokens, a.stride) == (b.facts, b.field, b.tokens, b.stride)


@pytest.mark.parametrize(
    "changes", [{"conv_bias": True, "num_conv_pos_embeddings": 7}, {"feat_proj_layer_norm": False}]
)
def test_what_a_configuration_changes(changes, tmp_path):
    model = converted("hubert", ["attention"], **changes)
    assert differ(TorchListener(model), MlxListener(save(model, tmp_path / "model")), 8001) < 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that streams: every layer replaced, and no positions."""
    mixers = ["pyramid", "window", "ladder"]
    return save(converted("whisper-fixed-floor", mixers, d_model=64), tmp_path_factory.mktemp("models") / "float32")


@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_what_is_stored_small_runs_as_in_torch(weights, tmp_path):
    model = converted("whisper", ["attention", "lpa"], d_model=64)
    folder = save(model, tmp_path / weights, weights=weights)
    a, b = TorchListener.load(folder), MlxListener(folder, precision="float32")
    assert differ(a, b, 8000) < 1e-4
    assert differ(TorchListener(model), a, 8000) > 1e-4  # or nothing was rounded
    assert MlxListener(folder).precision == ("float16" if weights == "float16" else "float32")


def test_float16_multiplies_in_float16_and_adds_in_float32(folder, tmp_path):
    halves = MlxListener(export_mlx(str(folder), tmp_path / "half"))
    assert halves.precision == "float16"
    kinds = {name: tensor.dtype for name, tensor in halves.tensors.items()}
    assert kinds["encoder.layers.0.fc1.weight"] == mx.float16
    assert kinds["encoder.layers.0.fc1.bias"] == mx.float32
    exact = TorchListener.load(folder)
    wanted = exact.hear(noise(16000))
    assert 1e-5 < np.abs(halves.hear(noise(16000)) - wanted).max() < 0.03 * wanted.std()
    ones = mx.ones((1, 5000))
    assert product(ones, mx.ones((5000, 1), mx.float16)).item() == 5000  # a sum in float16 stays at 2048


def test_attention_is_the_fused_kernel(tmp_path, monkeypatch):
    listener = MlxListener(save(converted("wav2vec2", ["attention", "conv", "attention"]), tmp_path / "model"))
    fused, calls = mx.fast.scaled_dot_product_attention, []

    def count(*arguments, **options):
        calls.append(arguments[0].shape)
        return fused(*arguments, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", count)
    listener.hear(noise(4000))
    assert calls == [(1, 4, 12, 8)] * 2
    assert listener.attention_bytes(1000) == 4 * 4 * 1000**2


def test_less_lookahead_is_torchs(folder):
    a, b = TorchListener.load(folder), MlxListener(folder)
    whole = b.hear(noise(40000))
    for listener in (a, b):
        listener.limit(0.8)
    assert a.field == b.field
    assert differ(a, b, 40000) < 1e-4
    assert np.abs(whole - b.hear(noise(40000))).max() > 1e-3


# --- folders


def test_exports(folder, tmp_path):
    """Half the space, and a model folder as good as any; from int8 and from Hugging Face's format too."""
    half = export_mlx(str(folder), tmp_path / "half")
    assert sorted(path.name for path in half.iterdir()) == ["plan.json", "processor.json", "weights.safetensors"]
    assert json.loads((half / "plan.json").read_text())["weights"] == "float16"
    sizes = [(path / "weights.safetensors").stat().st_size for path in (folder, half)]
    assert sizes[1] < 0.7 * sizes[0]
    assert differ(TorchListener.load(half), MlxListener(half, precision="float32"), 8000) < 1e-4

    model = converted("whisper", ["attention"], d_model=64)
    packed = save(model, tmp_path / "int8", weights="int8")
    unpacked = export_mlx(str(packed), tmp_path / "unpacked", weights="float32")
    assert {tensor.dtype for tensor in load_file(unpacked / "weights.safetensors").values()} == {torch.float32}
    assert differ(TorchListener.load(packed), open_model(unpacked, "mlx"), 8000) < 1e-4

    sooner = MlxListener(export_mlx(str(folder), tmp_path / "sooner", weights="float32", latency=0.8))
    assert sooner.field.ahead <= 0.8 * 16000
    limited = MlxListener(folder)
    limited.limit(0.8)
    assert differ(limited, sooner, 8000) == 0

    hub = tmp_path / "hub"
    model = make("wav2vec2")
    model.net.save_pretrained(hub)
    (hub / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(model.tokens.symbols)}))
    ours = MlxListener(export_mlx(str(hub), tmp_path / "ours", weights="float32"))
    assert differ(TorchListener(model), ours, 8000) < 1e-4


def test_an_export_that_overflows_is_not_written(tmp_path):
    model = make("whisper")
    with torch.no_grad():
        model.encoder.layers[0].fc1.bias.fill_(1e5)  # what the next product is given
    whole = save(model, tmp_path / "model")
    with pytest.raises(LpaError, match="in float16 this model gives numbers that are none"):
        export_mlx(str(whole), tmp_path / "half")
    assert not (tmp_path / "half").exists()
    export_mlx(str(whole), tmp_path / "full", weights="float32")


def test_what_cannot_be_is_one_line(folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for said, arguments in {
        "runs in MLX as it is": (str(folder), folder),
        "exists and is not empty": (str(folder), tmp_path / "other"),
        "no weights 'int8' in MLX": (str(folder), tmp_path / "new", "int8"),
        "no folder|no model folder": (str(tmp_path / "none"), tmp_path / "new"),
    }.items():
        with pytest.raises(LpaError, match=said):
            export_mlx(*arguments)
    assert not (tmp_path / "new").exists()
    for case in ("wavlm", "data2vec-audio"):
        with pytest.raises(LpaError, match=f"MLX has no {case} here, only hubert, wav2vec2, whisper"):
            MlxListener(save(make(case), tmp_path / case))
    with pytest.raises(LpaError, match="no CTC head"):
        MlxListener(save(make("whisper", head=False), tmp_path / "bare"))
    with pytest.raises(LpaError, match=r"no activation_function 'relu' here, only gelu"):
        MlxListener(save(make("whisper", activation_function="relu"), tmp_path / "relu"))


def test_damaged_weights_are_one_line(tmp_path):
    whole = save(make("whisper", layers=1), tmp_path / "model")
    path = whole / "weights.safetensors"
    stored = load_file(path)
    for said, state in {
        "missing head.weight": {k: v for k, v in stored.items() if k != "head.weight"},
        r"unknown head.extra, head.more": {**stored, "head.extra": torch.zeros(1), "head.more": torch.zeros(1)},
        r"head.bias is \(3,\), not \(29,\)": {**stored, "head.bias": torch.zeros(3)},
        r"no head.weight.scale": {**stored, "head.weight": stored["head.weight"].to(torch.int8)},
    }.items():
        save_file(state, path)
        with pytest.raises(LpaError, match=said):
            MlxListener(whole)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(LpaError, match="cut short or corrupt"):
        MlxListener(whole)
    path.unlink()
    with pytest.raises(LpaError, match=r"no weights\.safetensors; the model folder is damaged"):
        MlxListener(whole)
    (whole / "model.onnx").touch()
    with pytest.raises(LpaError, match="use --backend onnx"):
        MlxListener(whole)


def run_without(names: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess:
    """The command in a process that cannot import these."""
    code = f"import sys\nfor name in {names!r}: sys.modules[name] = None\nfrom lpa.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_it_runs_where_there_is_only_mlx(folder, tmp_path):
    alone = ("torch", "transformers", "safetensors", "onnx", "onnxruntime")
    half = tmp_path / "half"
    done = run_without(alone, "export", str(folder), "--to", "mlx", "--weights", "float32", "--out", str(half))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{half}\n")
    done = run_without(alone, "transcribe", str(CLIP), "--model", str(half), "--backend", "mlx", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["text"] == open_model(folder, "torch").transcribe(CLIP).text


def test_without_mlx_one_line_says_so(folder):
    done = run_without(("mlx",), "transcribe", str(CLIP), "--model", str(folder), "--backend", "mlx")
    assert done.returncode != 0
    assert done.stderr.startswith("lpa: this needs MLX (")
    assert done.stderr.rstrip().endswith("type: pip install 'lpa[mlx]'")
    assert done.stderr.count("\n") == 1
