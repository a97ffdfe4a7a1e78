"""ONNX Runtime gives torch's logits: every mixer, both kinds of front end, many lengths, and no torch to run it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "unit"))  # for the small models

pytest.importorskip("onnxscript", reason="pip install 'lpa[onnx]' to export")

from mixer_cases import attention, shake  # noqa: E402
from tiny_models import make  # noqa: E402

from lpa import audio, load, transcribe  # noqa: E402
from lpa.errors import LpaError  # noqa: E402
from lpa.export import forms  # noqa: E402
from lpa.export.onnx import export_onnx  # noqa: E402
from lpa.mixers import MIXERS, build  # noqa: E402
from lpa.mixers.blocks import block_count, key_blocks  # noqa: E402
from lpa.run.onnx import OnnxListener  # noqa: E402
from lpa.run.torch import TorchListener  # noqa: E402
from lpa.surgery import mixer_at, save, swap  # noqa: E402

CLIP = next((ROOT / "tests" / "data" / "librivox").glob("*.flac"))
TOLERANCE = 1e-3
FRAMES = (1, 2, 17, 64, 65, 333, 1500)

# One model holds several mixers, as a converted one does; exporting is what takes the time here.
MODELS = {
    "log-mel": (
        "whisper-fixed-floor",
        [
            "attention",
            "pyramid",
            "window",
            "ladder",
            "lpa",
            "lpa-hard",
            "anchored",
            "conv",
            "dynconv",
            "summary",
            "none",
        ],
    ),
    "positions": ("whisper", ["attention"]),
    # no hard gates here: where a gate's edge is within rounding of a frame, features equal to rounding move it by one
    "waveform": ("wav2vec2-short", ["attention", "pyramid-places", "window-places", "ladder", "lpa"]),
    "position bias, norm first": ("wavlm-stable", ["conv", "attention"]),
}


# Three convolutions in place of seven: what follows seven has lengths that take the exporter long to reason about.
SHORT = {"conv_dim": [16] * 3, "conv_kernel": [12, 8, 4], "conv_stride": [10, 8, 4]}


def converted(case: str, mixers: list[str], **config):
    """A model with these mixers from the first layer on, moved off their starting values."""
    short = SHORT if case.endswith("-short") else {}
    model = make(case.removesuffix("-short"), layers=len(mixers), **short, **config)
    for index, name in enumerate(mixers):
        if name != "attention":
            mixer, _, option = name.partition("-")
            swap(model, index, mixer, {option: True} if option else None)
            torch.manual_seed(index)
            shake(mixer_at(model, index), 0.1)
    return model


def sounds(listener: TorchListener) -> list[np.ndarray]:
    """Noise of so many frames, some of it not on a frame's border, and a clip."""
    rng = np.random.default_rng(0)
    found = []
    for frames in FRAMES:
        count = max(listener.facts.shortest, frames * listener.stride - (frames % 5) * 60)
        found.append(0.1 * rng.normal(size=count).astype(np.float32))
    found.append(audio.read(CLIP))
    longest = listener.facts.longest
    return found if longest is None else [s for s in found if len(s) <= longest * listener.sample_rate]


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """(torch, ONNX Runtime) of the same model folder."""
    folder = tmp_path_factory.mktemp("models")
    model = converted(*MODELS[request.param])
    save(model, folder / "model")
    export_onnx(str(folder / "model"), folder / "onnx")
    assert sorted(p.name for p in (folder / "onnx").iterdir()) == ["model.onnx", "plan.json", "processor.json"]
    return TorchListener(load(folder / "model")), OnnxListener(folder / "onnx")


def test_logits_agree_at_every_length(pair):
    wanted, found = pair
    heard = sounds(wanted)
    assert len(heard) >= 4
    for samples in heard:
        a, b = wanted.hear(samples), found.hear(samples)
        assert a.shape == b.shape
        assert np.abs(a - b).max() < TOLERANCE, len(samples)
        assert a.std() > 0.01  # of something, not of zeros
    assert found.facts == wanted.facts
    assert (found.tokens, found.frame_rate) == (wanted.tokens, wanted.frame_rate)


def test_every_mixer_is_exported_above():
    assert {name.partition("-")[0] for _, mixers in MODELS.values() for name in mixers} == {*MIXERS, "attention"}


@pytest.mark.parametrize("name", [*MIXERS, "lpa-hard"])
def test_forms_are_the_mixers(name):
    config = {"hard": True} if name.endswith("-hard") else {}
    mixer = shake(build(name.removesuffix("-hard"), attention(32, 4), config)).eval()
    for frames in (1, 15, 16, 63, 64, 65, 200):
        torch.manual_seed(frames)
        x = torch.randn(1, frames, 32)
        with torch.no_grad():
            wanted = mixer(x).y
            with forms.onnx_forms():
                found = mixer(x).y
        assert torch.allclose(found, wanted, atol=1e-5), frames


@pytest.mark.parametrize(("block", "reach"), [(1, 0), (16, 5), (32, 64), (64, 31)])
def test_key_blocks_are_the_same(block, reach):
    for frames in (1, 31, 32, 33, 100):
        x = torch.randn(1, frames, 4)
        assert torch.equal(forms.key_blocks(x, block, reach), key_blocks(x, block, reach))
        assert forms.block_count(frames, block, reach) == block_count(frames, block, reach)


def test_forms_leave_no_trace():
    import lpa.mixers.attention as module

    before = module.key_blocks, module.Pyramid.mix
    with forms.onnx_forms():
        assert module.key_blocks is forms.key_blocks
        assert module.Pyramid.mix is forms.mix_pyramid
    assert (module.key_blocks, module.Pyramid.mix) == before


# --- the folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model folder, exported into itself."""
    folder = save(converted("whisper-fixed-floor", ["attention"]), tmp_path_factory.mktemp("models") / "tiny")
    assert export_onnx(str(folder), folder) == folder
    return folder


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory) -> Path:
    """The same export in a folder of its own, with int8 weights."""
    return export_onnx(str(folder), tmp_path_factory.mktemp("models") / "int8", weights="int8")


def test_the_graph_says_nothing_of_where_it_was_made(folder):
    data = (folder / "model.onnx").read_bytes()
    assert b".py" not in data
    assert str(ROOT).encode() not in data


def test_one_folder_for_both(folder):
    """Exported into its own folder, a model runs in either, and its plan stays that of its weights."""
    names = ["model.onnx", "plan.json", "processor.json", "weights.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert json.loads((folder / "plan.json").read_text())["weights"] == "float32"
    texts = {backend: transcribe.transcribe(folder, CLIP, backend=backend).text for backend in ("onnx", "torch")}
    assert texts["onnx"] == texts["torch"]


@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
def test_in_its_own_folder_a_graph_holds_no_weights(tmp_path, weights):
    """It reads them where they are, as they are stored."""
    config = {"d_model": 64, "encoder_ffn_dim": 128}
    folder = save(converted("whisper-fixed-floor", ["pyramid", "attention"], **config), tmp_path / "model", weights)
    alone = export_onnx(str(folder), tmp_path / "alone")
    export_onnx(str(folder), folder)
    shrunk = (alone / "model.onnx").stat().st_size - (folder / "model.onnx").stat().st_size
    assert shrunk > 0.9 * 4 * sum(t.numel() for t in load(folder).net.state_dict().values() if t.numel() >= 4096)
    wanted, found = (OnnxListener(path).hear(audio.read(CLIP)) for path in (alone, folder))
    assert np.array_equal(wanted, found)
    save(load(folder), folder)  # what would then read the wrong bytes is gone
    assert not (folder / "model.onnx").exists()


def test_int8_is_smaller_and_near(folder, alone, tmp_path):
    folder = export_onnx(str(folder), tmp_path / "float32")
    sizes = [(path / "model.onnx").stat().st_size for path in (folder, alone)]
    assert sizes[1] < 0.85 * sizes[0]
    assert json.loads((alone / "plan.json").read_text())["weights"] == "int8"
    full, small = (OnnxListener(path).hear(audio.read(CLIP)) for path in (folder, alone))
    assert 0 < np.sqrt(np.square(full - small).mean()) < 0.1 * full.std(0).mean()


def test_int8_with_products_of_stacked_matrices_runs(tmp_path):
    folder = save(converted("whisper-fixed-floor", ["ladder"]), tmp_path / "ladder")
    wanted = TorchListener(load(folder)).hear(audio.read(CLIP))
    small = OnnxListener(export_onnx(str(folder), tmp_path / "int8", weights="int8")).hear(audio.read(CLIP))
    assert 0 < np.sqrt(np.square(wanted - small).mean()) < 0.1 * wanted.std(0).mean()


def test_a_graph_that_differs_is_not_written(folder, tmp_path, monkeypatch):
    def wrong(self, features):
        return self.model.encode(features, torch.full((1,), features.shape[1])).logits * 1.01

    monkeypatch.setattr("lpa.export.onnx.Network.forward", wrong)
    with pytest.raises(LpaError, match="differs from the model"):
        export_onnx(str(folder), tmp_path / "onnx")
    assert not list((tmp_path / "onnx").iterdir())


def test_it_runs_where_there_is_no_torch(folder):
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'safetensors', 'onnx'): sys.modules[name] = None\n"
        f"sys.argv = ['lpa', 'transcribe', {str(CLIP)!r}, '--model', {str(folder)!r}, '--format', 'json']\n"
        "from lpa.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    wanted = transcribe.transcribe(folder, CLIP, backend="torch")
    assert json.loads(done.stdout)["text"] == wanted.text


def test_what_cannot_be_is_one_line(folder, alone, tmp_path):
    new = tmp_path / "onnx"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    bare = save(make("whisper", head=False), tmp_path / "bare")
    for said, arguments in {
        "name a folder": (str(folder), tmp_path / "a.onnx"),
        "export somewhere else": (str(folder), tmp_path / "other"),
        "is not an export": (str(folder), bare),
        "no CTC head": (str(bare), new),
        "no weights 'int4'": (str(folder), new, "int4"),
    }.items():
        with pytest.raises(LpaError, match=said):
            export_onnx(*arguments)
    assert not new.exists()
    with pytest.raises(LpaError, match="is an ONNX export"):
        TorchListener.load(alone)
    shutil.copytree(alone, new)
    (new / "model.onnx").write_bytes((new / "model.onnx").read_bytes()[:1000])
    with pytest.raises(LpaError, match="cannot be loaded"):
        OnnxListener(new)
    (new / "model.onnx").unlink()
    with pytest.raises(LpaError, match=r"no model\.onnx"):
        OnnxListener(new)
