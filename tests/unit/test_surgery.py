import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ONE_EACH, batch, make

import lpa
from lpa.errors import LpaError
from lpa.mixers import MIXERS
from lpa.mixers.base import split_heads
from lpa.plan import Plan, Site
from lpa.surgery import freeze, mixer_at, pack, save, swap, unfreeze, unpack


def outputs(model):
    audio, lengths = batch()
    with torch.no_grad():
        return model(audio, lengths).logits


@pytest.mark.parametrize("mixer", sorted(MIXERS))
@pytest.mark.parametrize("case", ONE_EACH)
def test_swap_and_undo_is_bit_identical(case, mixer):
    model = make(case)
    before, state = outputs(model), {k: v.clone() for k, v in model.state_dict().items()}
    modules = dict(model.named_modules())
    undos = [swap(model, site, mixer) for site in model.sites()]
    assert sorted(model.swaps) == [0, 1]
    assert (outputs(model) - before).abs().max() > 1e-6  # it did something
    with torch.no_grad():  # and whatever is then done to the new parts stays with them
        for site in model.sites():
            for parameter in model.net.get_submodule(site.path).parameters():
                parameter.add_(1)
    for undo in reversed(undos):
        undo()
    assert model.swaps == {}
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert dict(model.named_modules()) == modules  # the very same objects
    assert torch.equal(outputs(model), before)
    with pytest.raises(LpaError, match="undone already"):
        undos[0]()


def test_swap_keeps_training_mode_and_records_the_whole_config():
    model = make("wav2vec2").train()
    swap(model, 1, "conv", {"taps": 5})
    assert all(m.training for m in model.modules())
    assert model.swaps[1].config == {"taps": 5}
    swap(model, 0, "conv")
    assert model.swaps[0].config == {"taps": 31}


def no_sites():
    return make("wav2vec2", layers=0)


@pytest.mark.parametrize(
    ("site", "mixer", "config", "says"),
    [
        (0, "lap", None, "no mixer 'lap'; have "),
        (2, "conv", None, "no site 2; this model has layers 0 to 1"),
        (-1, "conv", None, "no site -1"),
        (Site(0, "elsewhere", 32, 4), "conv", None, "belongs to another model"),
        (0, "conv", {"tap": 3}, "has no field tap; have taps"),
    ],
)
def test_swap_checks_before_it_acts(site, mixer, config, says):
    model = make("wav2vec2")
    before, modules = outputs(model), dict(model.named_modules())
    with pytest.raises(LpaError) as error:
        swap(model, site, mixer, config)
    assert says in str(error.value)
    assert dict(model.named_modules()) == modules
    assert model.swaps == {}
    assert torch.equal(outputs(model), before)


@pytest.mark.parametrize("mixer", sorted(MIXERS.keys() - {"lpa"}))  # which copies weights, and `meta` has none
def test_a_mixer_is_put_where_the_model_is(mixer):
    """`meta` stands for any device that new parameters are not made on."""
    model = make(ONE_EACH[0]).to("meta")
    swap(model, 0, mixer, {"places": True} if mixer in ("window", "pyramid") else {})
    assert {p.device.type for p in mixer_at(model, 0).parameters()} == {"meta"}


def test_a_site_is_swapped_once():
    model = make("wav2vec2")
    undo = swap(model, 0, "conv")
    with pytest.raises(LpaError, match="layer 0 already has 'conv'; undo that swap first"):
        swap(model, 0, "none")
    undo()
    swap(model, 0, "none")
    with pytest.raises(LpaError, match="undone already"):
        undo()
    assert model.swaps[0].mixer == "none"


def test_a_model_without_attention_says_so():
    with pytest.raises(LpaError, match="no attention sites"):
        swap(no_sites(), 0, "conv")


def with_heads():
    """Mixers whose config has a number of heads."""
    return [n for n in sorted(MIXERS) if "heads" in {f.name for f in dataclasses.fields(MIXERS[n][0].Config)}]


@pytest.mark.parametrize("mixer", with_heads())
def test_heads_must_divide_the_width(mixer):
    model = make("wav2vec2")
    with pytest.raises(LpaError, match="5 heads do not divide a width of 32"):
        swap(model, 0, mixer, {"heads": 5})
    assert model.swaps == {}


def test_split_heads():
    assert split_heads(32, 4) == 8
    with pytest.raises(LpaError, match="5 heads do not divide"):
        split_heads(32, 5)


@pytest.mark.parametrize("mixer", sorted(MIXERS))
@pytest.mark.parametrize("case", ["wav2vec2", "wavlm", "whisper"])
def test_only_intended_parameters_train(case, mixer):
    model = make(case)
    swap(model, 1, mixer)
    freeze(model)
    layer = model.encoder.layers[1]
    unfreeze([mixer_at(model, 1), layer.final_layer_norm])
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    audio, lengths = batch()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    out = model(audio, lengths)
    mask = torch.arange(out.logits.shape[1]) < out.lengths[:, None]
    out.logits[mask].square().mean().backward()
    optimiser.step()
    moved = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    path = model.sites()[1].path
    allowed = (f"net.{path}.mixer.", f"net.{path.rsplit('.', 1)[0]}.final_layer_norm.")
    assert all(name.startswith(allowed) for name in moved)
    assert any(name.startswith(allowed[0]) for name in moved)
    assert any(name.startswith(allowed[1]) for name in moved)


# --- folders


@pytest.mark.parametrize("mixer", sorted(MIXERS))
@pytest.mark.parametrize("case", ONE_EACH)
def test_save_and_load(case, mixer, tmp_path):
    model = make(case)
    swap(model, 0, mixer)
    want = outputs(model)
    for weights, close in (("float32", 0.0), ("float16", 0.01), ("int8", 0.2)):
        folder = save(model, tmp_path / weights, weights)
        assert {p.name for p in folder.iterdir()} == {"plan.json", "weights.safetensors", "processor.json"}
        loaded = lpa.load(folder)
        assert loaded.swaps == model.swaps
        assert loaded.tokens == model.tokens
        assert loaded.base() == model.base()
        assert list(loaded.state_dict()) == list(model.state_dict())
        assert not loaded.training
        error = (outputs(loaded) - want).abs().max() / want.std()
        assert error <= close
        assert close == 0 or error > 0  # it was rounded


def test_int8_is_a_quarter_and_symmetric_per_channel():
    weight = torch.randn(64, 100) * torch.logspace(-3, 2, 64)[:, None]
    weight[7] = 0
    stored = pack({"w": weight, "small": torch.randn(8, 8), "bias": torch.randn(5000), "n": torch.tensor(3)}, "int8")
    assert {k: v.dtype for k, v in stored.items()} == {
        "w": torch.int8,
        "w.scale": torch.float32,
        "small": torch.float16,
        "bias": torch.float32,
        "n": torch.int64,
    }
    back = unpack(stored)
    assert set(back) == {"w", "small", "bias", "n"}
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((back["w"] - weight).abs() <= step / 2 * 1.001).all()
    assert stored["w"].abs().max() == 127
    for shape in ((128, 4, 16), (4096, 2)):
        conv = torch.randn(shape)
        assert pack({"c": conv}, "int8")["c.scale"].shape == shape[:1]
        torch.testing.assert_close(unpack(pack({"c": conv}, "int8"))["c"], conv, atol=0.02, rtol=0)


def test_weight_norm_round_trips(tmp_path):
    model = make("wav2vec2")
    conv = model.encoder.pos_conv_embed.conv
    assert hasattr(conv, "parametrizations")
    loaded = lpa.load(save(model, tmp_path / "m"))
    assert torch.equal(loaded.encoder.pos_conv_embed.conv.weight, conv.weight)


def test_loading_draws_no_random_numbers(tmp_path):
    folder = save(make("whisper"), tmp_path / "m")
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    lpa.load(folder)
    assert torch.equal(torch.rand(3), want)


def test_a_folder_loads_with_other_settings_and_a_hub_model_keeps_its_own(tmp_path):
    from lpa import families

    save(make("whisper"), tmp_path / "model")
    loaded = families.load(tmp_path / "model", config={"dropout": 0.25})
    assert loaded.base()["dropout"] == 0.25
    assert families.load(tmp_path / "model").base()["dropout"] != 0.25
    with pytest.raises(LpaError, match="whisper has no setting droopout"):
        families.load(tmp_path / "model", config={"droopout": 0.25})
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    with pytest.raises(LpaError, match="is no lpa model folder, so its settings stay; leave out dropout"):
        families.load(tmp_path / "hub", config={"dropout": 0.25})


def test_load_in_another_precision(tmp_path):
    folder = save(make("wav2vec2"), tmp_path / "m")
    model = lpa.load(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert outputs(model).isfinite().all()


def failure(folder):
    with pytest.raises(LpaError) as error:
        lpa.load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_loading_is_strict_both_ways(tmp_path):
    model = make("wav2vec2")
    swap(model, 0, "conv")
    folder = save(model, tmp_path / "m")
    path = folder / "weights.safetensors"
    good = load_file(path)
    name = "wav2vec2.encoder.layers.0.attention.mixer.kernel"

    save_file({k: v for k, v in good.items() if k != name}, path)
    assert f"missing {name}" in failure(folder)
    save_file({**good, "stray.weight": torch.zeros(2)}, path)
    assert "unknown stray.weight" in failure(folder)
    save_file({**good, name: torch.zeros(32, 7)}, path)
    assert f"{name} is (32, 7), not (32, 31)" in failure(folder)
    save_file({k: v for k, v in good.items() if "layers" not in k}, path)
    assert failure(folder).endswith("more")


def test_damaged_folders(tmp_path):
    folder = save(make("whisper"), tmp_path / "m", "int8")
    path = folder / "weights.safetensors"
    good = path.read_bytes()
    for bad in (good[:-100], good[:50], b"", b"\xff" * 200):
        path.write_bytes(bad)
        assert "cut short or corrupt" in failure(folder)
    path.write_bytes(good)
    stored = load_file(path)
    stored.pop("encoder.conv1.weight.scale")
    save_file(stored, path)
    assert "has no encoder.conv1.weight.scale" in failure(folder)
    path.unlink()
    assert "has no weights.safetensors" in failure(folder)
    path.write_bytes(good)
    lpa.load(folder)

    processor = folder / "processor.json"
    text = processor.read_text()
    processor.write_text("{")
    assert "is not JSON" in failure(folder)
    processor.write_text("{}")
    assert "no tokens" in failure(folder)
    processor.unlink()
    assert "no processor.json" in failure(folder)
    processor.write_text(text)

    plan = folder / "plan.json"
    data = json.loads(plan.read_text())
    plan.write_text(json.dumps({**data, "swaps": [{"index": 0, "mixer": "gone", "config": {}}]}))
    assert "no mixer 'gone'; have" in failure(folder)
    plan.write_text(json.dumps({**data, "family": "gone"}))
    assert "no family 'gone'; have" in failure(folder)


def test_processor_says_how_to_prepare_audio(tmp_path):
    wave = json.loads((save(make("wav2vec2"), tmp_path / "w") / "processor.json").read_text())
    assert wave["audio"] == {"kind": "waveform", "normalise": True}
    mel = json.loads((save(make("whisper-fixed-floor"), tmp_path / "m") / "processor.json").read_text())
    assert mel["audio"] == {"kind": "log-mel", "fft": 400, "hop": 160, "mels": 80, "floor": -5.0}
    assert mel["sample_rate"] == 16000
    assert mel["tokens"] == make("whisper").tokens.to_dict()


def test_saving_over_a_model_replaces_it_and_keeps_its_card(tmp_path):
    folder = tmp_path / "m"
    save(make("whisper"), folder)
    (folder / "README.md").write_text("card")
    model = make("wav2vec2")
    save(model, folder)
    assert Plan.read(folder).family == "wav2vec2"
    assert (folder / "README.md").read_text() == "card"
    assert torch.equal(outputs(lpa.load(folder)), outputs(model))
    assert os.listdir(tmp_path) == ["m"]  # nothing left beside it
    assert (folder / "weights.safetensors").stat().st_mode == (folder / "plan.json").stat().st_mode


def test_saving_spares_what_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LpaError, match="is no model folder"):
        save(make("whisper"), tmp_path)
    with pytest.raises(LpaError, match="is no model folder"):
        save(make("whisper"), tmp_path / "notes.txt")
    with pytest.raises(LpaError, match="no weights 'int4'; have float32, float16, int8"):
        save(make("whisper"), tmp_path / "m", "int4")
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_killed_save_leaves_the_old_model(tmp_path):
    """Killed while it writes, as hard as can be: the folder still holds the model that was there."""
    model = make("whisper")
    folder = save(model, tmp_path / "m")
    code = (
        "import os, signal, lpa, lpa.surgery as s\n"
        f"model = lpa.load({str(folder)!r})\n"
        "model.net.head.weight.data.zero_()\n"
        "s.shutil.copymode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"  # weights are written, nothing renamed
        f"s.save(model, {str(folder)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -9
    assert torch.equal(outputs(lpa.load(folder)), outputs(model))
    save(make("wav2vec2"), folder)  # and the next save works
    assert lpa.load(folder).family == "wav2vec2"
