"""A training run that is killed, split over processes, stopped, or fed while it runs ends where a plain one does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from lpa.errors import LpaError
from lpa.recipe import TrainConfig
from lpa.train import make_accelerator, parameter_groups, rate, starting_model, train

HERE = Path(__file__).parent
WHISPER = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 20,
    "max_source_positions": 200,
}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def speech(rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """A second or so of tones, and words for it."""
    samples = int(rng.integers(9000, 22000))
    tone = np.sin(np.arange(samples) * rng.uniform(0.02, 0.4)) * 0.3 + rng.standard_normal(samples) * 0.01
    return (tone * 32767).astype(np.int16), " ".join(rng.choice(WORDS, 2))


def write_speakers(folder: Path, count: int, seed: int = 0) -> Path:
    """A manifest with `count` utterances of each of three speakers."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    lines = []
    for i in range(3 * count):
        samples, text = speech(rng)
        soundfile.write(folder / f"{i}.wav", samples, 16000)
        lines.append({"id": f"u{i}", "audio": f"{i}.wav", "text": text, "speaker": "abc"[i % 3]})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "manifest.jsonl"


def write_shard(path: Path, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    clips, texts = zip(*(speech(rng) for _ in range(count)), strict=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, audio=np.concatenate(clips), lengths=np.array([len(c) for c in clips]), text=np.array(texts))
    part.replace(path)


def config_for(tmp_path: Path, name: str, **changes) -> TrainConfig:
    manifest = tmp_path / "real" / "manifest.jsonl"
    if not manifest.exists():
        write_speakers(manifest.parent, 6)
        write_shard(tmp_path / "made" / "a.npz", 8, seed=1)
    settings = {
        "family": "whisper",
        "model_config": WHISPER,
        "sources": [
            {"path": str(manifest), "share": 0.5},
            {"path": str(tmp_path / "made"), "share": 0.5, "rescan": True},
        ],
        "held_out": ["c"],
        "out": str(tmp_path / name),
        "device": "cpu",
        "steps": 14,
        "batch_seconds": 8.0,
        "lr": 2e-3,
        "ema": 0.9,
        "speed": [0.9, 1.1],
        "gain_db": [-3, 3],
        "noise": 0.5,
        "time_masks": 10.0,
        "time_mask_seconds": 0.1,
        "feature_masks": 1,
        "log_every": 1,
        "eval_every": 5,
        "checkpoint_minutes": 0.0,
    }
    return TrainConfig.from_dict({**settings, **changes})


def run_script(script: str, config: TrainConfig, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    path = Path(config.out).with_suffix(".json")
    path.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, *launcher, str(HERE / script), str(path), *arguments]
    paths = [str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.out) / "model" / "weights.safetensors")


def records(config: TrainConfig, key: str) -> dict[int, float]:
    """The values of one key by step; a step that was recorded twice is a fault."""
    lines = [json.loads(line) for line in (Path(config.out) / "train.jsonl").read_text().splitlines()]
    found = [(line["step"], line[key]) for line in lines if key in line]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> TrainConfig:
    """An uninterrupted run, with dropout and both optimisers, in one process."""
    config = config_for(
        tmp_path_factory.mktemp("plain"), "run", model_config={**WHISPER, "dropout": 0.1}, optimizer="muon"
    )
    run_script("run_train.py", config)
    return config


def test_killed_runs_end_in_the_same_weights(plain):
    killed = dataclasses.replace(plain, out=plain.out + "-killed")
    steps = json.loads(run_script("kill_train.py", killed, "4", "7"))
    assert len(steps) == 4
    assert all(0 < step < plain.steps + 3 for step in steps)
    mine, theirs = weights(plain), weights(killed)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert records(plain, "loss") == records(killed, "loss")
    assert records(plain, "wer") == records(killed, "wer")
    assert list(records(plain, "loss")) == list(range(1, plain.steps + 1))


def test_training_moves_weights_and_lowers_the_loss(plain):
    fresh = starting_model(plain).net.state_dict()
    moved = [name for name, tensor in weights(plain).items() if not torch.equal(tensor, fresh[name])]
    assert len(moved) > len(fresh) / 2
    losses = list(records(plain, "loss").values())
    assert np.mean(losses[-3:]) < losses[0]


def test_a_finished_run_says_so(plain, capsys):
    before = (Path(plain.out) / "model" / "weights.safetensors").stat().st_mtime_ns
    train(plain)
    assert "finished" in capsys.readouterr().err
    assert (Path(plain.out) / "model" / "weights.safetensors").stat().st_mtime_ns == before
    with pytest.raises(LpaError, match=r"differs in lr \(0.002 there, 0.5 now\)"):
        train(dataclasses.replace(plain, lr=0.5))


def test_two_processes_agree_with_one(tmp_path):
    teacher = config_for(tmp_path, "teacher", steps=1, eval_every=0)
    train(teacher)
    distilled = {
        "teacher": str(Path(teacher.out) / "model"),
        "kl_weight": 0.5,
        "hidden_weight": 0.5,
        "temperature": 2.0,
        "batch_seconds": 2.2,  # one to three utterances: unequal shares, at times none
        "seed": 3,
    }
    one, two = (config_for(tmp_path, name, **distilled) for name in ("one", "two"))
    run_script("run_train.py", one)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")  # as accelerate launch does it
    run_script("run_train.py", two, launcher=launcher)
    assert [json.loads((Path(c.out) / "finished.json").read_text())["processes"] for c in (one, two)] == [1, 2]
    for part in ("loss", "ctc", "kl", "hidden"):
        first, second = records(one, part), records(two, part)
        assert first.keys() == second.keys()
        np.testing.assert_allclose(list(second.values()), list(first.values()), rtol=1e-5, atol=1e-5)
    # AdamW hides a wrong scale of the gradient, so look at the gradient itself, before rounding has been amplified
    assert records(two, "grad_norm")[1] == pytest.approx(records(one, "grad_norm")[1], rel=1e-5)
    np.testing.assert_allclose(list(records(one, "wer").values()), list(records(two, "wer").values()))
    mine, theirs = weights(one), weights(two)
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], rtol=1e-5, atol=1e-5)


def test_bf16_trains_much_the_same(tmp_path):
    exact, half = (config_for(tmp_path, p, precision=p, steps=5, eval_every=0) for p in ("fp32", "bf16"))
    for config in (exact, half):
        run_script("run_train.py", config)
    first, second = (np.array(list(records(c, "loss").values())) for c in (exact, half))
    assert not np.array_equal(first, second)
    np.testing.assert_allclose(second, first, rtol=0.02)


def test_shards_that_appear_are_heard_and_what_cannot_be_learnt_is_listed(tmp_path):
    config = config_for(tmp_path, "grown", max_minutes=1e-9, log_every=6, eval_every=0, steps=30)
    (tmp_path / "made" / "a.npz").unlink()
    manifest = tmp_path / "real" / "manifest.jsonl"
    line = {"id": "hasty", "audio": "0.wav", "text": "far too many words " * 20, "speaker": "a"}
    manifest.write_text(manifest.read_text() + json.dumps(line) + "\n")
    assert train(config) == Path(config.out)  # time was up at the first record: no model yet
    assert records(config, "loss").keys() == {6}
    assert "hasty" in (Path(config.out) / "left_out.jsonl").read_text()
    write_shard(tmp_path / "made" / "b.npz", 8, seed=2)
    train(dataclasses.replace(config, max_minutes=0.0))
    known = torch.load(Path(config.out) / "checkpoint.pt", weights_only=True)["cursor"]["parts"]
    assert known == {"0": 12, "1/b.npz": 8}
    assert records(config, "loss").keys() == {6, 12, 18, 24, 30}


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    with pytest.raises(LpaError, match="not a number"):
        train(config_for(tmp_path, "broken", lr=1e30, warmup=0.0, clip=0.0))


def test_lr_rises_and_falls_as_the_recipe_says(tmp_path):
    config = config_for(tmp_path, "rates", steps=100, warmup=0.1, schedule="linear", lr_floor=0.1)
    values = [rate(config, step) for step in range(100)]
    assert np.argmax(values) == 10
    assert all(np.diff(values[:11]) > 0)
    assert all(np.diff(values[10:]) < 0)
    assert values[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rate(config, 100) == pytest.approx(0.1)
    assert rate(dataclasses.replace(config, schedule="cosine"), 55) == pytest.approx(0.1 + 0.9 * 0.5)


def test_a_run_by_the_clock_ends_its_schedule_in_time(tmp_path):
    config = config_for(
        tmp_path, "clock", steps=10**6, minutes=0.03, log_every=1, eval_every=0, lr_floor=0.0, max_minutes=0.015
    )
    train(config)
    assert not (Path(config.out) / "finished.json").exists()  # interrupted half way: the clock goes on from there
    train(dataclasses.replace(config, max_minutes=0.0))
    seconds, rates = list(records(config, "seconds").values()), list(records(config, "lr").values())
    assert 1.8 <= seconds[-1] < 6
    assert np.argmax(rates) < len(rates) - 1
    assert rates[-1] < max(rates) / 2
    assert (Path(config.out) / "model" / "plan.json").is_file()


def test_compiled_layers_train_like_plain_ones(tmp_path):
    plain, compiled = (
        config_for(tmp_path, name, steps=2, eval_every=0, compile=name == "compiled") for name in ("plain", "compiled")
    )
    for config in (plain, compiled):
        train(config)
    assert list(records(compiled, "loss").values()) == pytest.approx(list(records(plain, "loss").values()), rel=1e-4)


def test_lr_scale_groups_and_freezes(tmp_path):
    config = config_for(tmp_path, "groups", lr_scale={"net.encoder.conv*": 0.0, "net.head.*": 5.0})
    model = starting_model(config)
    groups = parameter_groups(model, config)
    scales = {id(p): g["scale"] for g in groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        wanted = 5.0 if "head" in name else 1.0
        frozen = "conv" in name or "embed_positions" in name
        assert scales.get(id(parameter)) == (None if frozen else wanted), name
    assert {g["weight_decay"] for g in groups} == {0.0, config.weight_decay}
    with pytest.raises(LpaError, match="no parameter is named like 'lm_haed"):
        parameter_groups(model, config_for(tmp_path, "groups", lr_scale={"lm_haed.*": 1.0}))


def test_precision_is_float32_without_a_gpu(tmp_path):
    assert make_accelerator(config_for(tmp_path, "p")).mixed_precision == "no"
