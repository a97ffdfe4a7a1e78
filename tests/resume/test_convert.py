"""Conversions that are killed, stopped, diverge or lose their data end where a plain one does.

Run as a script it converts and is killed on the way: python test_convert.py CONFIG.json OUT KILLS SEED
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from lpa import families
from lpa.convert import ablate as ablation
from lpa.convert import session
from lpa.convert.config import ConvertConfig, SweepConfig, build, read
from lpa.convert.control import compare, control, control_config
from lpa.convert.loop import convert, essentials
from lpa.convert.sweep import sweep
from lpa.data import AudioBank
from lpa.errors import LpaError
from lpa.evaluate import transcribe
from lpa.surgery import save

HERE = Path(__file__).parent
WHISPER = {
    "d_model": 16,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 20,
    "max_source_positions": 200,
}


def start(config: ConvertConfig, out: Path) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            convert(config, out)
            code = 0
        finally:
            os._exit(code)
    return child


def state(out: Path) -> list:
    """How far a conversion is: finished steps, the stages of the one under way, lines in their records."""
    records = sorted(out.glob("**/train.jsonl"))
    lines = 0
    for path in records:
        with contextlib.suppress(FileNotFoundError):  # the step was finished this moment
            lines += path.read_text().count("\n")
    return [len(list(out.glob("step-*"))), [path.parent.name for path in records], lines]


def main(path: str, out: Path, kills: int, seed: int) -> None:
    """Every run is a process of its own, forked after the imports. No code can prepare for a SIGKILL."""
    torch.set_num_threads(1)
    config = build(ConvertConfig, json.loads(Path(path).read_text()))
    rng = random.Random(seed)
    seen = []
    while len(seen) < kills:
        before = now = state(out)
        child, changes = start(config, out), rng.randint(1, 2)
        while changes:
            if os.waitpid(child, os.WNOHANG)[0]:
                sys.exit(f"the conversion ended after {len(seen)} kills")
            time.sleep(0.002)
            now = state(out)
            changes -= now != before
            before = now
        time.sleep(rng.uniform(0, 0.1))  # in the midst of whatever comes next
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.append(state(out))
    code = os.waitstatus_to_exitcode(os.waitpid(start(config, out), 0)[1])
    print(json.dumps(seen))
    sys.exit(code)


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A model, and speech whose transcripts are what it makes of it: its own WER is about 0, so harm shows."""
    torch.set_num_threads(1)
    desk = tmp_path_factory.mktemp("convert")
    torch.manual_seed(0)
    model = families.create("whisper", WHISPER)
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.net.head.bias[1] += 1.0  # spaces, so that there are words
    save(model, desk / "model")
    rng = np.random.default_rng(0)
    (desk / "data").mkdir()
    lines = []
    for i in range(12):
        samples = int(rng.integers(9000, 20000))
        tone = np.sin(np.cumsum(rng.uniform(0.02, 1.0, samples // 800 + 1).repeat(800)[:samples])) * 0.3
        soundfile.write(desk / "data" / f"{i}.wav", tone, 16000)
        lines.append({"id": f"u{i}", "audio": f"{i}.wav", "text": "a", "speaker": "abc"[i % 3]})
    manifest = desk / "data" / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = transcribe(model, AudioBank([str(manifest)]), 10.0)
    manifest.write_text(
        "".join(json.dumps({**line, "text": text}) + "\n" for line, text in zip(lines, texts, strict=True))
    )
    return desk


def config_for(desk: Path, recipe: str = "paper", **changes) -> ConvertConfig:
    epochs = {"warm_epochs": 1.0, "settle_epochs": 2.0, "align_epochs": 2.0, "final_epochs": 1.0}
    given = {
        "model": str(desk / "model"),
        "sources": [str(desk / "data" / "manifest.jsonl")],
        "held_out": ["c"],
        "batch_seconds": 4.0,
        "layers": 2,
        "train": {"device": "cpu", "checkpoint_minutes": 0.0, "log_every": 1, "noise": 0.5, "speed": [0.9, 1.1]},
        "sweep_settings": {"epochs": 1.0, "provision": 4},
        **({} if recipe == "none" else epochs),
    }
    return read(recipe, **{**given, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights.safetensors")


def same(one: Path, two: Path) -> bool:
    a, b = weights(one), weights(two)
    assert (one / "plan.json").read_text() == (two / "plan.json").read_text()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moved(desk: Path, folder: Path) -> set[str]:
    """Weights of the original that a run has changed, of those it still has."""
    before, after = weights(desk / "model"), weights(folder)
    return {name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])}


def result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def plain(desk) -> Path:
    """An uninterrupted conversion with every stage, its order from a sweep."""
    convert(config_for(desk), desk / "plain")
    return desk / "plain"


def test_a_conversion_leaves_a_folder_a_step_and_a_model(desk, plain):
    found = result(plain)
    assert found["wer_before"] < 20  # the transcripts are the model's own
    names = [stage["name"] for step in found["steps"][1:] for stage in step["stages"]]
    assert names == ["warm", "settle", "align"] * 2
    assert [stage["name"] for stage in found["final"]] == ["final"]
    swept = json.loads((plain / "sweep" / "sweep.json").read_text())["orders"]["sweep"]
    assert [step["layers"][0] for step in found["steps"][1:]] == swept[:2]
    models = [families.load(plain / name) for name in ("step-01/model", "step-02/model", "model")]
    assert [sorted(m.swaps) for m in models] == [swept[:1], sorted(swept[:2]), sorted(swept[:2])]
    assert not (plain / "work").exists()
    assert not list(plain.glob(".*"))


def test_killed_conversions_end_in_the_same_weights(desk, plain):
    config = config_for(desk)
    path, out = desk / "killed.json", desk / "killed"
    path.write_text(json.dumps(config.to_dict()))
    paths = [str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "test_convert.py"), str(path), str(out), "10", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert len(seen) == 10
    assert len({str(place[:2]) for place in seen}) >= 3, seen  # in different stages
    for name in ("step-01/model", "step-02/model", "model"):
        assert same(plain / name, out / name), name
    assert result(out)["wer"] == result(plain)["wer"]


def test_two_processes_convert_as_one_does(desk):
    """A conversion, its sweep and its control, as `accelerate launch` starts them; every record once."""
    config = config_for(desk)
    given = [config.model, "--data", config.sources[0], "--held-out", "c", "--layers", "2", "--set", "batch_seconds=4"]
    epochs = [f"{name}_epochs=1" for name in ("warm", "settle", "align", "final")]
    train = 'train={device="cpu"}'
    for text in (*epochs, train, "kl_weight=1", "sweep_settings.epochs=1.0", "sweep_settings.provision=4"):
        given += ["--set", text]
    paths = [str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    environment["LPA_COMMIT"] = "abc"
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    for name, launcher in (("alone", ()), ("both", several)):
        out, noted = desk / name, ["--record", "--results", str(desk / f"{name}-results")]
        for verb, what, where in (("convert", given, out), ("control", [str(out)], desk / f"{name}-control")):
            command = [sys.executable, *launcher, "-m", "lpa", verb, *what, "--out", str(where), *noted]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr[-3000:]
    for folder in ("", "-control"):
        mine, theirs = (weights(desk / f"{name}{folder}" / "model") for name in ("alone", "both"))
        assert mine.keys() == theirs.keys()
        for key in mine:
            torch.testing.assert_close(theirs[key], mine[key], rtol=1e-4, atol=5e-5)
    for kind in ("convert", "control", "sweep"):
        told = [
            [json.loads(line)["what"] for line in (desk / f"{name}-results" / f"{kind}.jsonl").read_text().splitlines()]
            for name in ("alone", "both")
        ]
        assert told[0] == told[1]


def test_a_finished_conversion_says_so_and_another_is_refused(desk, plain, capsys):
    before = (plain / "model" / "weights.safetensors").stat().st_mtime_ns
    assert convert(config_for(desk), plain) == plain / "model"
    assert "finished" in capsys.readouterr().err
    assert (plain / "model" / "weights.safetensors").stat().st_mtime_ns == before
    with pytest.raises(LpaError, match=r"differs in ffn \(0.1 there, 0.2 now\)"):
        convert(config_for(desk, ffn=0.2), plain)


def test_data_that_vanishes_stops_a_run_and_it_goes_on_when_it_is_back(desk, plain, monkeypatch, capsys):
    config = config_for(desk)
    out, data = desk / "robbed", desk / "data"
    shutil.copytree(plain, out)
    for name in ("step-02", "model"):  # as it was after the first step
        shutil.rmtree(out / name)
    (out / "result.json").unlink()
    away = data.rename(desk / "away")
    options = ["--data", config.sources[0], "--held-out", "c", "--layers", "2", "--set", "batch_seconds=4.0"]
    epochs = [f"{name}_epochs={getattr(config, f'{name}_epochs')}" for name in ("warm", "settle", "align", "final")]
    train = 'train={device="cpu", noise=0.5, speed=[0.9, 1.1]}'  # the rest of it may differ
    for text in (*epochs, train, "sweep_settings.epochs=1.0", "sweep_settings.provision=4"):
        options += ["--set", text]
    command = ["lpa", "convert", config.model, "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", command)
    from lpa.cli import main as lpa

    with pytest.raises(SystemExit) as stopped:
        lpa()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"lpa: {config.sources[0]} is not there")
    away.rename(data)
    (data / "0.wav").rename(desk / "0.wav")  # not all of it is back
    with pytest.raises(LpaError, match="is not what this run began with"):
        convert(config, out)
    (desk / "0.wav").rename(data / "0.wav")
    assert convert(dataclasses.replace(config, max_minutes=1e-9), out) == out
    assert "time is up" in capsys.readouterr().err
    before = (out / "step-01" / "record.json").stat().st_mtime_ns
    convert(config, out)
    assert same(plain / "model", out / "model")
    assert (out / "step-01" / "record.json").stat().st_mtime_ns == before  # a finished step is not done again


def test_a_file_that_vanishes_while_speech_is_read_is_named(desk, tmp_path, monkeypatch):
    data = shutil.copytree(desk / "data", tmp_path / "data")
    config = config_for(desk, "none", sources=[str(data / "manifest.jsonl")])
    plain = session.train.open_banks

    def robbed(*arguments):
        (data / "0.wav").unlink()
        return plain(*arguments)

    monkeypatch.setattr(session.train, "open_banks", robbed)
    with pytest.raises(LpaError, match=r"0\.wav vanished while it was read; run the same command when it is back"):
        convert(config, tmp_path / "out")
    monkeypatch.undo()
    shutil.copy(desk / "data" / "0.wav", data)
    convert(config, tmp_path / "out")
    assert result(tmp_path / "out")["replaced"] == [0, 1]


@pytest.mark.parametrize("rate", [1e5, 1e36])  # far off, and not a number
def test_an_alignment_that_diverges_is_undone(desk, rate):
    harmless = {"mixer": "window", "mixer_config": {"side": 200}, "lr": 1e-6}  # so that there is something to lose
    short = {"order": "1", "layers": 0, "warm_epochs": 0.0, "final_epochs": 0.0, **harmless}
    convert(config_for(desk, **short, align_epochs=0.0), desk / f"steady-{rate}")
    convert(config_for(desk, **short, align_rate=rate), desk / f"wild-{rate}")
    step = result(desk / f"wild-{rate}")["steps"][1]
    assert [(s["name"], s["reverted"]) for s in step["stages"]] == [("settle", False), ("align", True)]
    assert step["wer"] == step["stages"][0]["wer"] == result(desk / f"steady-{rate}")["wer"] < 100
    assert same(desk / f"steady-{rate}" / "model", desk / f"wild-{rate}" / "model")


def test_an_alignment_that_helps_is_kept(desk):
    """A layer that says nothing, put right in alignment alone."""
    short = {"order": "0,1,2", "layers": 0, "progressive": False, "warm_epochs": 0.0, "settle_epochs": 0.0}
    out = desk / "helped"
    convert(config_for(desk, **short, final_epochs=0.0, align_epochs=12.0, align_rate=4.0, mixer="none"), out)
    (align,) = result(out)["steps"][1]["stages"]
    convert(config_for(desk, "none", mixer="none", layers=0), desk / "unhelped")
    assert not align["reverted"]
    assert align["wer"] <= result(desk / "unhelped")["wer"]
    assert not same(out / "model", desk / "unhelped" / "model")


def test_settling_trains_its_block_alone_and_the_control_the_same_with_attention(desk):
    out = desk / "block"
    short = {"order": "1", "layers": 0, "warm_epochs": 1.0, "align_epochs": 0.0, "final_epochs": 0.0}
    convert(config_for(desk, **short), out)
    block = {n for n in weights(desk / "model") if n.startswith("encoder.layers.1.")}
    attention = {n for n in block if ".self_attn." in n}
    assert moved(desk, out / "model") == block - attention
    control(out, desk / "block-control")
    left_in = families.load(desk / "block-control" / "model")
    assert not left_in.swaps
    assert moved(desk, desk / "block-control" / "model") == block
    both = compare(out, desk / "block-control")
    assert both["points"] == pytest.approx(both["wer"] - both["control_wer"])
    steps = [[s["steps"] for s in result(o)["steps"][1]["stages"]] for o in (out, desk / "block-control")]
    assert steps[0][1:] == steps[1]  # all but the imitation


def test_the_warm_start_trains_the_mixer_alone(desk):
    short = {"order": "1", "layers": 0, "settle_epochs": 0.0, "align_epochs": 0.0, "final_epochs": 0.0}
    convert(config_for(desk, **short), desk / "warm")
    convert(config_for(desk, "none", order="1", layers=0, mixer="lpa"), desk / "cold")
    assert moved(desk, desk / "warm" / "model") == set()
    warm, cold = weights(desk / "warm" / "model"), weights(desk / "cold" / "model")
    changed = {name for name in warm if not torch.equal(warm[name], cold[name])}
    assert len(changed) > 10
    assert all(".self_attn.mixer." in name for name in changed)


def test_swapping_alone_needs_no_data_and_trains_nothing(desk):
    out = convert(config_for(desk, "none", sources=[], held_out=[], layers=0), desk / "swapped")
    model = families.load(out)
    assert [model.swaps[i].mixer for i in range(3)] == ["pyramid"] * 3
    assert moved(desk, out) == set()
    assert result(desk / "swapped")["wer"] is None


def test_a_budget_stops_at_the_last_step_within_it(desk, capsys):
    harmless, harmful = {"mixer": "window", "config": {"side": 200}}, {"mixer": "none", "config": {}}
    swaps = [{"index": 2, **harmless}, {"index": 0, **harmful}, {"index": 1, **harmless}]
    (desk / "risky.json").write_text(json.dumps({"swaps": swaps, "predicted": None}))
    config = config_for(desk, "none", plan=str(desk / "risky.json"), progressive=True, budget=20.0, layers=None)
    convert(config, desk / "budget")
    wers = [json.loads((desk / "budget" / f"step-0{n}" / "record.json").read_text())["wer"] for n in range(3)]
    assert wers[1] <= 20 < wers[2]
    assert not (desk / "budget" / "step-03").exists()
    found = result(desk / "budget")
    assert (found["replaced"], found["wer"], found["exceeded"]) == ([2], wers[1], 2)
    assert essentials(desk / "budget")["exceeded"] == 2
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "budget" in line)
    assert said == (
        f"step 2 is beyond the budget: WER % {wers[2]:.2f} against 20; kept is step 1 (layers 2); "
        "to come further allow more with --budget, or train for longer, in another --out"
    )
    assert same(desk / "budget" / "model", desk / "budget" / "step-01" / "model")
    assert control_config(desk / "budget").order == "2"


def test_all_at_once_is_all_or_none_of_a_budget(desk, capsys):
    convert(config_for(desk, "none", mixer="none", layers=0, budget=20.0), desk / "none-of-it")
    found = result(desk / "none-of-it")
    assert (found["replaced"], found["wer"], found["exceeded"]) == ([], found["wer_before"], 1)
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "budget" in line)
    assert "kept is the model as it was; to come further" in said
    assert "or stop part of the way with --set progressive=true, in another --out" in said
    convert(config_for(desk, "none", mixer="window", layers=0, budget=1000.0), desk / "all-of-it")
    assert (result(desk / "all-of-it")["exceeded"], result(desk / "all-of-it")["replaced"]) == (None, [0, 1, 2])
    assert "budget" not in capsys.readouterr().err


def test_a_plan_made_with_positions_knows_that_they_go(desk):
    swaps = [{"index": i, "mixer": "window", "config": {"side": 4, "places": False}} for i in range(3)]
    (desk / "placed.json").write_text(json.dumps({"swaps": swaps, "predicted": None}))
    given = {"plan": str(desk / "placed.json"), "layers": None}
    for positions in (True, False):
        convert(config_for(desk, "none", **given, positions=positions), desk / f"placed-{positions}")
        model = families.load(desk / f"placed-{positions}" / "model")
        assert [model.swaps[i].config["places"] for i in range(3)] == [not positions] * 3
        assert model.swaps[0].config["side"] == 4


def test_best_distils_all_layers_at_once(desk):
    out = desk / "best"
    mixer = {"mixer": "window", "mixer_config": {"side": 1}}
    given = {"layers": 0, **mixer, "warm_epochs": 0.0, "align_epochs": 0.0, "final_epochs": 0.0}
    convert(config_for(desk, "best", **given, settle_epochs=15.0, lr=1e-3), out)
    convert(config_for(desk, "none", layers=0, **mixer), desk / "untrained")
    assert result(out)["replaced"] == [0, 1, 2]
    assert len(result(out)["steps"]) == 2
    assert not (out / "sweep").exists()  # all at once: there is no order to find
    original = families.load(desk / "model")
    audio = torch.from_numpy(soundfile.read(desk / "data" / "2.wav", dtype="float32")[0])[None]
    with torch.no_grad():
        wanted = original(audio).logits.log_softmax(-1)
        found = [families.load(folder / "model")(audio).logits.log_softmax(-1) for folder in (out, desk / "untrained")]
    near, far = (float((wanted.exp() * (wanted - f)).sum(-1).mean()) for f in found)
    assert near < far


def test_a_plan_is_carried_out_and_its_prediction_kept(desk):
    swaps = [{"index": 2, "mixer": "window", "config": {"side": 4}}, {"index": 0, "mixer": "none", "config": {}}]
    (desk / "choice.json").write_text(json.dumps({"swaps": swaps, "predicted": {"wer_points": 1.5}}))
    given = {"plan": str(desk / "choice.json"), "progressive": True, "layers": None}
    convert(config_for(desk, "none", **given), desk / "planned")
    found = result(desk / "planned")
    assert [step["layers"] for step in found["steps"]] == [[], [2], [0]]
    assert found["predicted"] == {"wer_points": 1.5}
    assert found["outcome"]["wer_points"] == pytest.approx(found["wer"] - found["wer_before"])
    assert families.load(desk / "planned" / "model").swaps[0].mixer == "none"


def test_a_conversion_goes_on_from_where_an_earlier_one_stopped(desk):
    first = convert(config_for(desk, "none", layers=1), desk / "half")
    second = convert(config_for(desk, "none", model=str(first)), desk / "whole", record=desk / "whole-results")
    assert sorted(families.load(second).swaps) == [0, 1, 2]
    assert result(desk / "whole")["replaced"] == [0, 1, 2]
    lines = [json.loads(line) for line in (desk / "whole-results" / "convert.jsonl").read_text().splitlines()]
    assert [line["figures"]["layers"] for line in lines] == [1, 3, 3]
    with pytest.raises(LpaError, match="no attention left"):
        convert(config_for(desk, "none", model=str(second)), desk / "nothing")


def test_a_few_of_the_held_out_utterances_can_do_to_judge_by(desk):
    config = config_for(desk, "none", train={"held_out_limit": 2})
    convert(config, desk / "few")
    found = json.loads((desk / "few" / "data.json").read_text())
    assert (found["training"]["utterances"], found["held_out"]["utterances"]) == (8, 2)


def test_steps_are_recorded_when_asked_for(desk):
    convert(config_for(desk, "none"), desk / "noted", record=desk / "results")
    lines = [json.loads(line) for line in (desk / "results" / "convert.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["step 0", "step 1", "final"]
    assert [line["figures"]["layers"] for line in lines] == [0, 2, 2]


def test_what_a_killed_run_has_not_recorded_it_records_when_it_is_run_again(desk, monkeypatch):
    """Killed once its result was there, and once a step was."""
    out, path = desk / "silent", desk / "late" / "convert.jsonl"

    def told() -> list[str]:
        return [json.loads(line)["what"] for line in path.read_text().splitlines()]

    convert(config_for(desk, "none"), out)
    (out / "work").mkdir()
    convert(config_for(desk, "none"), out)
    assert not (out / "work").exists()
    monkeypatch.setenv("LPA_COMMIT", "later")
    convert(config_for(desk, "none"), out, record=path.parent)
    assert told() == ["step 0", "step 1", "final"]
    assert {json.loads(line)["commit"] for line in path.read_text().splitlines()} != {"later"}  # made before
    convert(config_for(desk, "none"), out, record=path.parent)
    assert len(told()) == 3  # once each
    (out / "result.json").unlink()
    (out / "recorded.json").write_text('["step 0"]')
    convert(config_for(desk, "none"), out, record=path.parent)
    assert told()[3:] == ["step 1", "final"]


def test_a_final_tuning_that_is_undone_leaves_the_gates_as_they_were(desk):
    """Its temperature is part of what is undone: else the WER reported would be another model's."""
    short = {"order": "0", "layers": 0, "warm_epochs": 0.0, "settle_epochs": 0.0, "align_epochs": 0.0}
    hard = {"final_epochs": 1.0, "final_tau": 0.01, "keep_best": True, "final_rate": 1e5}
    out = desk / "hardened"
    convert(config_for(desk, **short, **hard), out)
    (final,) = result(out)["final"]
    assert final["reverted"]
    (kept,) = families.load(out / "model").swaps.values()
    assert kept.config["tau"] == 0.5


def test_a_layer_gets_as_many_pulses_as_the_sweep_left_it(desk):
    none = {"warm_epochs": 0.0, "settle_epochs": 0.0, "align_epochs": 0.0, "final_epochs": 0.0, "layers": 0}
    few = {"provision": 4, "theta": 9.0, "floor": 2, "epochs": 0.5}  # none is as large: the floor is left
    swept = SweepConfig(model=str(desk / "model"), sources=config_for(desk).sources, held_out=("c",), **few)
    rows = {row["layer"]: row["allocation"] for row in sweep(swept, desk / "pulses")["layers"]}
    for allocate, name in ((True, "as-left"), (False, "as-usual")):
        convert(config_for(desk, **none, sweep=str(desk / "pulses"), allocate=allocate), desk / name)
    made = {name: families.load(desk / name / "model").swaps for name in ("as-left", "as-usual")}
    for index, row in rows.items():
        assert {kind: made["as-left"][index].config[kind] for kind in row} == row
        assert {kind: made["as-usual"][index].config[kind] for kind in row} != row


def test_pulses_are_not_taken_from_another_mixers_sweep(desk):
    sweep(SweepConfig(model=str(desk / "model"), sources=config_for(desk).sources, mixer="none"), desk / "sweep-none")
    with pytest.raises(LpaError, match="is a sweep of none: how many pulses lpa needs it does not know"):
        convert(config_for(desk, order="sweep", sweep=str(desk / "sweep-none"), allocate=True), desk / "allocated")


def test_the_ablation_is_a_loop_over_recipes(desk, monkeypatch):
    monkeypatch.setattr(ablation, "SWITCHES", ablation.SWITCHES[-3:])  # a few rows tell as much as all
    none = {"warm_epochs": 0.0, "settle_epochs": 0.5, "align_epochs": 0.5, "final_epochs": 0.0, "layers": 1}
    small = {"sweep_settings": {"epochs": 0.0, "provision": 0}, "mixer_config": {"heads": 2}}
    config = config_for(desk, **none, **small)
    assert ablation.ablate(config, desk / "ablation", only=2) is None  # by another process, say
    assert [path.name for path in (desk / "ablation").iterdir()] == ["row-2"]
    with pytest.raises(LpaError, match="rows 0 to 3, and no row 4"):
        ablation.ablate(config, desk / "ablation", only=4)
    found = ablation.ablate(config, desk / "ablation")
    assert found["rows"][0]["row"] == "naive"
    assert len(found["rows"]) == 4
    assert found["rows"][1]["points"] == pytest.approx(found["rows"][1]["wer"] - found["rows"][0]["wer"])
    heads = [families.load(desk / "ablation" / f"row-{n}" / "model").swaps for n in (1, 2)]
    assert [next(iter(s.values())).config["heads"] for s in heads] == [1, 2]
    assert ablation.ablate(config, desk / "ablation") == found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
