"""Training models that enhance: noisy pieces, the loop, the conversion and its control, `lpa evaluate`'s figures."""

import json
import math
import sys

import numpy as np
import pytest
import soundfile
import torch

from lpa import families, judge
from lpa.convert.config import ConvertConfig, SweepConfig, build
from lpa.convert.control import compare, control
from lpa.convert.loop import convert
from lpa.convert.stages import norm_parameters, part_of
from lpa.convert.sweep import sweep
from lpa.convert.table import make_table
from lpa.data import AudioBank
from lpa.denoise import HELD_OUT_SNR, NoisyFeed, coloured, cut, negative_si_snr
from lpa.errors import LpaError
from lpa.noise import gaussian, mix
from lpa.recipe import TrainConfig
from lpa.score import si_snr
from lpa.surgery import save, swap
from lpa.train import train

torch.set_num_threads(1)

CPU = torch.device("cpu")
TINY = {"width": 16, "heads": 4, "ffn": 24, "blocks": 1, "intra_layers": 2, "inter_layers": 1, "chunk": 20}
CROP = 0.125
SIZE = 2000


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Tones of three speakers; the last utterance is too short for a piece."""
    desk = tmp_path_factory.mktemp("denoise")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(13):
        samples = int(rng.integers(4500, 7500)) if i < 12 else SIZE - 1
        tone = 0.3 * np.sin(np.arange(samples) * rng.uniform(0.05, 0.2)) + 0.001 * rng.standard_normal(samples)
        soundfile.write(desk / f"{i}.wav", tone, 16000)
        lines.append({"id": f"u{i}", "audio": f"{i}.wav", "text": "a", "speaker": "abc"[i % 3]})
    (desk / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    torch.manual_seed(0)
    save(families.create("sepformer", TINY), desk / "model")
    return desk


def config_for(desk, **changes) -> TrainConfig:
    settings = {
        "family": "sepformer",
        "model_config": TINY,
        "sources": [{"path": str(desk / "manifest.jsonl")}],
        "held_out": ["c"],
        "device": "cpu",
        "batch_seconds": 8 * CROP,
        "crop_seconds": CROP,
        "noise_snr_db": [5, 5],
        "steps": 12,
        "lr": 3e-3,
        "log_every": 1,
        "eval_every": 6,
        "checkpoint_minutes": 0.0,
    }
    return TrainConfig.from_dict({**settings, **changes})


def feed_for(desk, **changes) -> NoisyFeed:
    return NoisyFeed(AudioBank([str(desk / "manifest.jsonl")]), CPU, config_for(desk, **changes))


def hear(feed: NoisyFeed, config: TrainConfig, step: int = 0, rank: int = 0, world: int = 1):
    torch.manual_seed(step)
    return feed.batch(config, lambda samples: samples // 8, torch.empty(0), step, np.arange(6), rank, world)


# --- noisy pieces


def test_pieces_are_the_audio_and_never_leave_their_utterance(desk):
    bank = AudioBank([str(desk / "manifest.jsonl")])
    pieces = cut(bank, CROP)
    assert len(pieces) == sum(int(n) // SIZE for n in bank.lengths)
    assert "u12" not in {name.split("+")[0] for name in pieces.ids}
    owner = pieces.ids.index("u1+1")
    assert np.array_equal(pieces.clip(owner), bank.clip(1)[SIZE : 2 * SIZE])
    assert pieces.speakers[owner] == "b"
    feed = feed_for(desk)
    ends = pieces.offsets + SIZE + feed.slack
    stops = {f"u{i}": bank.offsets[i] + bank.lengths[i] for i in range(len(bank))}
    assert all(end <= stops[name.split("+")[0]] for end, name in zip(ends, pieces.ids, strict=True))
    assert any(end == stops[name.split("+")[0]] for end, name in zip(ends, pieces.ids, strict=True))
    with pytest.raises(LpaError, match="crop_seconds lower"):
        cut(bank, 60.0)


@pytest.mark.parametrize("kinds", [["white"], ["coloured"], ["babble"], ["white", "coloured", "babble"]])
def test_a_batch_has_its_noise_at_the_ratio_asked_for(desk, kinds):
    config = config_for(desk, noise_kinds=kinds, gain_db=[-12, 6])
    feed = feed_for(desk, noise_kinds=kinds)
    batch = hear(feed, config)
    assert batch.audio.shape == batch.targets.shape == (6, SIZE)
    assert batch.lengths is None
    added = batch.audio - batch.targets
    ratio = 10 * torch.log10(batch.targets.square().mean(1) / added.square().mean(1))
    torch.testing.assert_close(ratio, torch.full((6,), 5.0), atol=1e-3, rtol=0)
    again, other = hear(feed, config), hear(feed, config, step=1)
    assert torch.equal(again.audio, batch.audio)
    assert not torch.equal(other.audio, batch.audio)
    assert not torch.equal(other.targets, batch.targets)  # pieces begin elsewhere, and are louder or softer


def test_processes_share_a_batch(desk):
    feed, config = feed_for(desk), config_for(desk)
    whole = hear(feed, config)
    shares = [hear(feed, config, rank=rank, world=4) for rank in range(4)]
    assert torch.equal(torch.cat([s.targets for s in shares]), whole.targets[[0, 4, 1, 5, 2, 3]])
    lonely = hear(feed, config, rank=7, world=8)
    assert (len(lonely.audio), lonely.weights.tolist()) == (1, [0.0])


def test_babble_is_of_other_speakers(desk):
    feed = feed_for(desk, noise_kinds=["babble"])
    whole = np.arange(len(feed.bank))
    voices = feed.others(np.random.default_rng(0), whole)
    assert (feed.speaker[voices] != feed.speaker[whole][:, None]).all()
    assert len(set(voices.ravel().tolist())) > 10


def test_colours_on_the_device_fall_as_they_should():
    noise = coloured(torch.randn(3, 1 << 16, generator=torch.Generator().manual_seed(0)), np.array([0.0, 1.0, 2.0]))
    spectrum = torch.fft.rfft(noise).abs().square().numpy()
    frequency = np.fft.rfftfreq(1 << 16, 1 / 16000)
    for row, exponent in zip(spectrum, (0.0, 1.0, 2.0), strict=True):
        low, high = (row[(frequency > f) & (frequency < 2 * f)].mean() for f in (200, 3200))
        assert math.log2(low / high) / 4 == pytest.approx(exponent, abs=0.1)


def test_what_is_measured_on_is_the_same_every_time(desk):
    one, two = (list(feed_for(desk, seed=seed).held(8 * CROP)) for seed in (0, 1))
    for (noisy, clean), (same, _) in zip(one, two, strict=True):
        assert torch.equal(noisy, same)
        assert -negative_si_snr(noisy, clean).mean().item() == pytest.approx(HELD_OUT_SNR, abs=0.3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noise_kinds": ["pink"]}, "no noise kind 'pink'"),
        ({"noise_kinds": []}, "noise_kinds is empty"),
        ({"kl_weight": 1.0, "teacher": "x", "model": "x", "family": ""}, "no posteriors"),
        ({"snr_weight": 0.0}, "set snr_weight or hidden_weight"),
        ({"speed": [0.9, 1.1]}, "leave out speed"),
    ],
)
def test_settings_that_cannot_be(desk, tmp_path, changes, said):
    changes = {k: str(desk / "model") if v == "x" else v for k, v in changes.items()}
    with pytest.raises(LpaError, match=said):
        train(config_for(desk, **changes, out=str(tmp_path / "run")))


# --- the loop


def lines(folder, key: str) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return {r["step"]: r[key] for r in records if key in r}


@pytest.fixture(scope="module")
def trained(desk):
    """The tiny model, trained on tones with noise for a few steps."""
    train(config_for(desk, out=str(desk / "run"), steps=60, eval_every=0, ema=0.9))
    return desk / "run"


def test_training_lowers_the_loss_and_raises_the_figure(trained):
    loss = lines(trained, "loss")
    assert loss[60] < loss[1] - 10
    assert lines(trained, "si_snri")[60] > 0
    model = families.load(trained / "model")
    assert (model.family, model.task) == ("sepformer", "enhance")


def test_a_run_that_stops_goes_on_as_if_it_had_not(desk, tmp_path):
    plain, stopped = str(tmp_path / "plain"), str(tmp_path / "stopped")
    settings = {"noise_kinds": ["white", "coloured", "babble"], "gain_db": [-6, 6]}
    train(config_for(desk, **settings, out=plain))
    while not (tmp_path / "stopped" / "finished.json").exists():
        train(config_for(desk, **settings, out=stopped, max_minutes=1e-9, log_every=5))
    one, two = (families.load(tmp_path / name / "model").state_dict() for name in ("plain", "stopped"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_hidden_states_of_a_teacher(desk, trained, tmp_path):
    """A student with another start comes closer to what the teacher has between its layers."""
    changes = {"teacher": str(trained / "model"), "hidden_weight": 1.0, "snr_weight": 0.0, "steps": 20, "eval_every": 0}
    train(config_for(desk, **changes, out=str(tmp_path / "run")))
    found = lines(tmp_path / "run", "hidden")
    assert found[20] < 0.8 * found[1]


# --- conversion


def conversion(desk, trained, **changes) -> ConvertConfig:
    given = {
        "model": str(trained / "model"),
        "sources": [str(desk / "manifest.jsonl")],
        "held_out": ["c"],
        "kind": "intra",
        "mixer": "pyramid",
        "batch_seconds": 8 * CROP,
        "lr": 1e-3,
        "warm_epochs": 1.0,
        "settle_epochs": 2.0,
        "align_epochs": 1.0,
        "final_epochs": 1.0,
        "train": {"device": "cpu", "crop_seconds": CROP, "noise_snr_db": [5, 5], "log_every": 1},
    }
    return build(ConvertConfig, {**given, **changes})


@pytest.fixture(scope="module")
def converted(desk, trained):
    """The attention within chunks replaced one layer at a time in the order of a sweep, and the control."""
    convert(conversion(desk, trained), desk / "converted", desk / "results")
    control(desk / "converted", desk / "control")
    return desk / "converted"


def test_intra_layers_are_replaced_in_the_order_of_the_sweep(converted):
    result = json.loads((converted / "result.json").read_text())
    swept = json.loads((converted / "sweep" / "sweep.json").read_text())
    assert sorted(swept["orders"]["sweep"]) == result["replaced"] == [0, 1]
    assert [step["layers"] for step in result["steps"][1:]] == [[i] for i in swept["orders"]["sweep"]]
    assert all(row["si_snri_points"] == pytest.approx(row["si_snri"] - swept["si_snri"]) for row in swept["layers"])
    assert result["measure"] == "si_snri"
    assert result["si_snri"] > result["si_snri_before"] - 1
    align = [stage for step in result["steps"][1:] for stage in step["stages"] if stage["name"] == "align"]
    before = [step["stages"][-2]["si_snri"] for step in result["steps"][1:]]
    assert all(stage["si_snri"] >= value for stage, value in zip(align, before, strict=True))  # else it is undone
    model = families.load(converted / "model")
    assert [model.swaps[i].mixer for i in (0, 1)] == ["pyramid"] * 2


def test_the_control_keeps_attention_and_trains_as_long(converted, desk):
    both = compare(converted, desk / "control")
    assert both["points"] == pytest.approx(both["si_snri"] - both["control_si_snri"])
    assert not families.load(desk / "control" / "model").swaps
    steps = [
        [
            (s["name"], s["steps"])
            for step in json.loads((run / "result.json").read_text())["steps"][1:]
            for s in step["stages"]
        ]
        for run in (converted, desk / "control")
    ]
    assert [s for s in steps[0] if s[0] != "warm"] == steps[1]


def test_all_sites_at_once_and_a_mixer_for_each(desk, trained):
    changes = {
        "kind": "",
        "order": "depth",
        "progressive": False,
        "warm_epochs": 0.0,
        "mixer": "pyramid,pyramid,window",
    }
    out = desk / "all"
    convert(conversion(desk, trained, **changes, mixer_config={"window": {"side": 2}}), out)
    model = families.load(out / "model")
    assert {i: s.mixer for i, s in model.swaps.items()} == {0: "pyramid", 1: "pyramid", 2: "window"}
    assert model.swaps[2].config["side"] == 2


def test_kinds_that_do_not_fit(desk, trained):
    with pytest.raises(LpaError, match="layer 0 has no inter attention to replace"):
        convert(conversion(desk, trained, kind="inter", order="0"), desk / "wrong")
    with pytest.raises(LpaError, match="have intra, inter"):
        convert(conversion(desk, trained, kind="both", order="depth"), desk / "wrong-kind")


def test_what_belongs_to_a_layer(trained):
    """Norms and feed-forward of a layer are its own, though its attention hangs a level deeper than in other models."""
    model = families.load(trained / "model")
    swap(model, 0, "lpa")
    site = model.sites()[0]
    places, norms = {0: f"net.{site.path}."}, norm_parameters(model)
    layer = "net." + site.path.removesuffix("self_att.att")
    for name, part in (
        ("pos_ffn.ffn.0.weight", "ffn"),
        ("norm1.norm.weight", "norms"),
        ("self_att.att.mixer.out.weight", "mixer"),
    ):
        assert part_of(model, layer + name, places, norms) == part
    assert part_of(model, layer.replace("layers.0", "layers.1") + "norm1.norm.weight", places, norms) == "rest"


def test_a_sweep_of_pulses(desk, trained):
    config = conversion(desk, trained).sweeping()
    found = sweep(
        build(SweepConfig, {**config.to_dict(), "mixer": "lpa", "epochs": 6.0, "provision": 4}), desk / "sweep"
    )
    for row in found["layers"]:
        assert row["relative"] < row["relative_before"]
        assert row["kl"] is None


def test_the_table_of_runs(converted, desk, tmp_path):
    found = make_table([converted, desk / "control"], None)
    assert [row["layers"] for row in found["rows"]] == [0, 1, 2]
    result = json.loads((converted / "result.json").read_text())
    assert found["rows"][2]["pyramid"] == result["si_snri"]
    assert found["rows"][1]["pyramid"] == result["steps"][1]["si_snri"]
    assert found["rows"][0]["attention (control)"] == result["si_snri_before"]
    measured = make_table([converted], str(desk / "manifest.jsonl"), limit=2, record=tmp_path)
    records = [json.loads(line) for line in (tmp_path / "evaluate.jsonl").read_text().splitlines()]
    assert [r["figures"]["layers"] for r in records] == [0, 1, 2]
    assert [r["figures"]["si_snri"] for r in records] == [row["pyramid"] for row in measured["rows"]]


# --- lpa evaluate


def test_the_figures_of_an_evaluation(desk, trained, tmp_path, capsys):
    model = str(trained / "model")
    assert judge.enhances(model)
    out = tmp_path / "lines.jsonl"
    (found,) = judge.evaluate_folders([model], str(desk / "manifest.jsonl"), limit=3, out=out)
    bank = AudioBank([str(desk / "manifest.jsonl")])
    each = [json.loads(line) for line in out.read_text().splitlines()]
    assert found["utterances"] == len(each) == 3
    assert found["si_snri"] == pytest.approx(np.mean([line["si_snr"] - line["si_snr_noisy"] for line in each]))
    assert found["si_snri_interval"][0] <= found["si_snri"] <= found["si_snri_interval"][1]
    assert found["si_snr_noisy"] == pytest.approx(5, abs=0.3)
    clip = bank.clip(bank.ids.index(each[0]["id"])) / 32768
    noisy = mix(clip, judge.make_noise(bank, bank.ids.index(each[0]["id"]), "white"), 5.0)
    given = families.load(model).clean(torch.from_numpy(noisy)[None])[0].detach().numpy()
    assert si_snr(given, clip) == pytest.approx(each[0]["si_snr"], abs=0.05)  # its last samples are a part of a frame
    judge.write_record(found, tmp_path)
    (record,) = (json.loads(line) for line in (tmp_path / "evaluate.jsonl").read_text().splitlines())
    assert (record["what"], record["unit"], record["figures"]["si_snri"]) == ("si_snri", "dB", found["si_snri"])
    for kind in ("pink", "babble"):
        (other,) = judge.evaluate_folders([model], str(desk / "manifest.jsonl"), limit=4, kind=kind)
        assert other["si_snri"] != found["si_snri"]
    with pytest.raises(LpaError, match="no noise 'loud'"):
        judge.evaluate_folders([model], str(desk / "manifest.jsonl"), kind="loud")


def test_pesq_and_stoi_know_better_from_worse():
    pytest.importorskip("pesq")
    pytest.importorskip("pystoi")
    from pathlib import Path

    clip = AudioBank([str(Path(__file__).parents[1] / "data" / "librivox" / "manifest.jsonl")]).clip(0) / 32768
    clip = clip.astype(np.float32)
    for measure in judge.measures().values():
        better, worse = (measure(clip, mix(clip, gaussian(len(clip), 0), snr)) for snr in (15.0, 0.0))
        assert better > worse + 0.05


def test_what_is_not_installed_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pesq", None)
    monkeypatch.setitem(sys.modules, "pystoi", None)
    assert judge.measures() == {}
    assert capsys.readouterr().err.splitlines() == [
        "lpa: PESQ is left out; for it: pip install pesq",
        "lpa: STOI is left out; for it: pip install pystoi",
    ]
