"""Sweeps of tiny models: mixers beside their attention, the elastic net, both selectors, and going on after a stop."""

import dataclasses
import json

import numpy as np
import pytest
import soundfile
import torch
from tiny_models import ONE_EACH, batch, make

from lpa.convert.beside import Unexplained, beside, elastic_net, fresh_mixer, layer_error
from lpa.convert.config import SweepConfig, build
from lpa.convert.planner import make_plan
from lpa.convert.sweep import epochs_of, provisioned, read, sweep
from lpa.errors import LpaError
from lpa.mixers import Attention
from lpa.surgery import mixer_at, save


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A model of two layers, and a few seconds of noise from three speakers."""
    desk = tmp_path_factory.mktemp("sweep")
    save(make("wav2vec2"), desk / "model")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(9):
        name = f"{i}.wav"
        soundfile.write(desk / name, 0.2 * rng.standard_normal(int(rng.integers(8000, 16000))), 16000)
        lines.append({"id": f"u{i}", "audio": name, "text": "one two", "speaker": "abc"[i % 3]})
    (desk / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return desk


def config_for(desk, **changes) -> SweepConfig:
    given = {
        "model": str(desk / "model"),
        "sources": [str(desk / "manifest.jsonl")],
        "held_out": ["c"],
        "batch_seconds": 2.0,
        "train": {"device": "cpu"},
    }
    return build(SweepConfig, {**given, **changes})


# --- beside


@pytest.mark.parametrize("case", ONE_EACH)
def test_a_mixer_beside_its_attention_changes_nothing_and_sees_the_same(case):
    model = make(case)
    audio, lengths = batch()
    plain = model(audio, lengths, hidden=True)
    mixers = {i: fresh_mixer(model, i, "lpa", None, seed=i) for i in (0, 1)}
    exact = Attention.from_attention(mixer_at(model, 1))
    with torch.no_grad(), beside(model, {0: mixers[0], 1: exact}):
        watched = model(audio, lengths, hidden=True)
    assert torch.equal(watched.logits, plain.logits)
    assert all(torch.equal(a, b) for a, b in zip(watched.hidden, plain.hidden, strict=True))
    if case != "wavlm":  # whose attention has a position bias beside its projections
        sums = Unexplained()
        sums.add(watched, 1)
        assert sums.relative < 1e-8
    again = model(audio, lengths)
    assert not hasattr(again, "mixed")
    assert not model.swaps
    assert not any(name.startswith("beside") for name, _ in model.named_parameters())


def test_gradients_reach_the_mixer_and_nothing_else():
    model = make("wav2vec2")
    mixer = fresh_mixer(model, 1, "lpa", None, seed=0)
    audio, lengths = batch()
    with beside(model, {1: mixer}):
        part = layer_error(model(audio, lengths), 1, torch.ones(4))
    (part.sum / part.count).backward()
    assert mixer.value.weight.grad.abs().max() > 0
    assert all(p.grad is None for p in model.parameters())


def test_fresh_mixers_are_the_seeds():
    model = make("wav2vec2")
    one, two, other = (fresh_mixer(model, 0, "lpa", None, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_what_is_unexplained_is_a_share_of_the_variance():
    model = make("whisper")
    audio, lengths = batch()
    mixer = fresh_mixer(model, 0, "none", None, seed=0)  # says 0, always
    sums = Unexplained()
    with torch.no_grad(), beside(model, {0: mixer}):
        for row in (0, 1, 3):  # one at a time, as over several batches
            output = model(audio[row : row + 1, : lengths[row]], lengths[row : row + 1])
            sums.add(output, 0)
        frames = torch.cat([model(audio[[r], : lengths[r]], lengths[[r]]).attended[0][0] for r in (0, 1, 3)]).double()
    assert sums.mse == pytest.approx(float(frames.square().mean()))
    wanted = frames.square().sum() / (frames - frames.mean(0)).square().sum()
    assert sums.relative == pytest.approx(float(wanted))
    mean = Unexplained()
    mixer.bias.data = frames.mean(0).float()  # the best that a bias can do explains nothing
    with torch.no_grad(), beside(model, {0: mixer}):
        for row in (0, 1, 3):
            mean.add(model(audio[[row], : lengths[row]], lengths[[row]]), 0)
    assert mean.relative == pytest.approx(1.0, abs=1e-5)


def test_the_elastic_net_is_both_norms_a_pulse():
    part = elastic_net(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), 0.1, 0.01)
    assert float(part.sum) == pytest.approx(0.1 * 6 / 4 + 0.01 * 14 / 4)


# --- the sweep


def test_provisions_are_twelve_of_each_type_there_is(desk):
    found = provisioned(config_for(desk))
    assert [found[name] for name in ("aperiodic", "periodic", "positional", "anchored", "heads")] == [12, 12, 12, 0, 4]
    assert provisioned(config_for(desk, mixer="ladder"))["ladder"] == 16
    assert provisioned(config_for(desk, mixer_config={"positional": 0}))["positional"] == 0
    assert provisioned(config_for(desk, provision=0))["aperiodic"] == 4
    assert [epochs_of(config_for(desk, mixer=name)) for name in ("lpa", "ladder", "window", "pyramid")] == [2, 2, 0, 0]


def test_training_explains_more_and_the_elastic_net_leaves_fewer_pulses(desk):
    small = {"epochs": 10.0, "lr": 3e-4, "provision": 6}
    free = sweep(config_for(desk, l1=0.0, l2=0.0, amplitude_travel=0.0, **small), desk / "free")
    tight = sweep(config_for(desk, l1=0.1, **small), desk / "tight")
    for row in free["layers"]:
        assert row["relative"] < row["relative_before"]
        assert row["pulses"] == 6 * 3 * 4
    for before, after in zip(free["layers"], tight["layers"], strict=True):
        assert after["surviving"] == 4 * 3 * 4 < before["surviving"]  # down to the floor
        assert after["allocation"] == {"aperiodic": 4, "periodic": 4, "positional": 4}
    assert free["orders"]["sweep"] == sorted((0, 1), key=lambda i: read(desk / "free")[i]["mse"])


def test_the_second_selector_needs_no_training(desk):
    pyramid = sweep(config_for(desk, mixer="pyramid"), desk / "pyramid")
    none = sweep(config_for(desk, mixer="none", epochs=0.0), desk / "none")
    for good, bad in zip(pyramid["layers"], none["layers"], strict=True):
        assert 0 <= good["kl"] < bad["kl"]
        assert good["epochs"] == 0
        assert good["pulses"] is None
    assert pyramid["orders"]["kl"] == sorted((0, 1), key=lambda i: pyramid["layers"][i]["kl"])


def test_layers_together_are_layers_alone_and_a_stopped_sweep_goes_on(desk):
    config = config_for(desk, epochs=1.0, provision=4, train={"device": "cpu", "log_every": 1})
    together = sweep(config, desk / "together")
    alone = dataclasses.replace(config, together=1)
    assert sweep(dataclasses.replace(alone, max_minutes=1e-9), desk / "alone") is None
    assert not (desk / "alone" / "sweep.json").exists()
    for mine, theirs in zip(sweep(alone, desk / "alone")["layers"], together["layers"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():  # products in another order: equal to rounding
            assert theirs[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    kept = (desk / "alone" / "layer-00.json").stat().st_mtime_ns
    for name in ("sweep.json", "layer-01.json"):
        (desk / "alone" / name).unlink()
    for mine, theirs in zip(sweep(alone, desk / "alone")["layers"], together["layers"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():  # products in another order: equal to rounding
            assert theirs[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert (desk / "alone" / "layer-00.json").stat().st_mtime_ns == kept  # a finished layer is not done again


def test_sweeps_that_cannot_be_are_named(desk):
    with pytest.raises(LpaError, match="add --data"):
        sweep(config_for(desk, sources=[], held_out=[]), desk / "silent")
    with pytest.raises(LpaError, match="no mixer 'lap'"):
        sweep(config_for(desk, mixer="lap"), desk / "misspelt")
    with pytest.raises(LpaError, match="no finished sweep"):
        read(desk / "misspelt")


def test_what_a_finished_sweep_or_plan_has_not_recorded_it_records_once(desk, monkeypatch):
    monkeypatch.setenv("LPA_COMMIT", "then")
    config, out, results = config_for(desk, epochs=0.0), desk / "unrecorded", desk / "late"

    def told(kind: str) -> list[tuple[str, str]]:
        lines = (results / f"{kind}.jsonl").read_text().splitlines()
        return [(record["what"], record["commit"]) for record in map(json.loads, lines)]

    sweep(config, out)
    make_plan(config, ["none"], desk / "unsaid", measure="relative", cost=0.0)
    monkeypatch.setenv("LPA_COMMIT", "now")
    for _ in range(2):
        sweep(config, out, results)
        make_plan(config, ["none"], desk / "unsaid", measure="relative", cost=0.0, record=results)
    assert told("sweep") == [("layer 0", "then"), ("layer 1", "then")] * 2  # the sweep's, and the plan's own
    assert told("plan") == [("prediction by relative", "now")]
    make_plan(config, ["none"], desk / "unsaid", measure="relative", cost=1.0, record=results)
    assert len(told("plan")) == 2  # another budget is another prediction


def test_a_plan_comes_from_the_sweeps_of_several_mixers(desk):
    config = config_for(desk)
    found = make_plan(config, ["none", "pyramid"], desk / "plan", measure="relative", loss=0.5)
    assert json.loads((desk / "plan" / "choice.json").read_text()) == found
    loss = {row["mixer"]: row["loss"] for row in found["layers"]}
    assert found["predicted"]["relative"] == pytest.approx(sum(row["loss"] for row in found["layers"]))
    assert found["predicted"]["relative"] <= 0.5
    assert set(loss) <= {"attention", "pyramid"}  # a bias leaves all of it unexplained
    dear = make_plan(config, ["none", "pyramid"], desk / "plan", measure="relative", cost=0.0)
    assert [row["mixer"] for row in dear["layers"]] == ["none", "none"]
