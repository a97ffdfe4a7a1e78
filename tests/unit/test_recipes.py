"""The scripts in recipes/: those that make training data, the voice on torch and in ONNX Runtime, the table of runs."""

import argparse
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import convert_table
import dictionary_text
import speak
import splice

from lpa.align import Word
from lpa.audio import RATE
from lpa.cli import app
from lpa.convert.config import read

VOICE = Path(os.environ.get("LPA_VOICE", "../shared/data/voice"))


def test_lines_of_a_dictionary():
    text = "to change into curd; as, rennet coagulates milk. The X9 thing, so formed"
    assert list(dictionary_text.lines(text)) == ["to change into curd, as, rennet coagulates milk"]
    assert not list(dictionary_text.lines("a b c d e f. one two 3 four five six"))  # letters and digits: read out how?


def test_no_seven_words_in_a_row_are_shared():
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    assert list(dictionary_text.runs(words)) == [tuple(words[:7]), tuple(words[1:])]
    assert not list(dictionary_text.runs(words[:6]))


def test_exchanged_keeps_short_words():
    found = dictionary_text.exchanged("it is the longest sentence here " * 20, ["zebra"], random.Random(0)).split()
    assert found.count("zebra") > 5
    assert found.count("it") == found.count("the") == 20


def test_phrases_are_cut_where_it_is_quiet_and_only_what_is_read_right(monkeypatch):
    clip = np.full(2 * RATE, 1000, np.int16)
    clip[RATE - 400 : RATE] = 0  # the gap between the first word and the second
    words = (Word("one", 0.2, 0.7, 1.0), Word("two", 1.2, 1.4, 1.0), Word("tree", 1.6, 1.8, 1.0))
    monkeypatch.setattr(splice, "WORDS", (1, 1))
    found = splice.phrases(clip, words, "one two three", np.random.default_rng(0))
    assert [text for _, text in found] == ["one", "two"]  # `tree` is not what was said
    assert RATE - 400 <= len(found[0][0]) <= RATE


def test_joined_fades_and_loses_no_more_than_the_fade():
    one, two = np.full(1000, 100, np.int16), np.full(2000, 300, np.int16)
    whole = splice.joined([one, two])
    assert len(whole) == 3000 - splice.FADE
    assert whole[0] == 100
    assert whole[-1] == 300
    assert (np.diff(whole.astype(int)) >= 0).all()  # no click


@pytest.mark.skipif(not (VOICE / "skeleton.onnx").is_file(), reason="needs the voice; set LPA_VOICE")
def test_the_voice_on_torch_says_what_onnx_runtime_says(tmp_path):
    """Three lines of different lengths at once, each as the whole network gives it alone."""
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    network = tmp_path / "voice.onnx"
    speak.rebuild(VOICE, network)
    speak.CudaVoice.cut(network)
    voice = speak.CudaVoice(network, VOICE / "voice.json", seed=5, device="cpu")
    rng = np.random.default_rng(0)
    plans = [voice.run(rng.integers(20, 60, size), rng)[0] for size in (9, 30, 16)]
    inputs = [*speak.PLAN, "/Cast_2_output_0"]
    onnx.utils.extract_model(network, tmp_path / "rest.onnx", inputs, ["output"], check_model=False)
    rest = ort.InferenceSession(str(tmp_path / "rest.onnx"), providers=["CPUExecutionProvider"])
    frames = torch.tensor([plan.shape[-1] for plan, _ in plans])
    z = torch.zeros(3, plans[0][0].shape[1], int(frames.max()))
    for row, (plan, _) in zip(z, plans, strict=True):
        row[:, : plan.shape[-1]] = torch.from_numpy(plan[0])
    mask = (torch.arange(z.shape[-1]) < frames[:, None]).float()[:, None]
    who = torch.from_numpy(np.concatenate([who for _, who in plans]))
    with torch.inference_mode():
        waves = voice.decode(voice.flow(z, mask, who), mask, who)[:, 0].numpy()
    for wave, (plan, speaker) in zip(waves, plans, strict=True):
        ones = np.ones((1, 1, plan.shape[-1]), np.float32)
        expected = rest.run(None, dict(zip(inputs, (plan, speaker, ones), strict=True)))[0].ravel()
        np.testing.assert_allclose(wave[: len(expected)], expected, atol=2e-4)
        assert not wave[len(expected) :].any()


@pytest.fixture
def table(tmp_path) -> argparse.Namespace:
    paths = {name: tmp_path / name for name in ("data", "models", "runs", "cache", "results")}
    training = {"synthetic": tmp_path / "more", "epochs": 2.0, "lr": 1e-4, "scale": 0.5, "set": ["batch_seconds=24"]}
    return argparse.Namespace(**paths, **training, device="cpu", limit=8, batch=600)


def test_the_table_of_runs_is_of_commands_that_there_are(table):
    jobs = convert_table.Table(table).all_jobs()
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    verbs = typer.main.get_command(app).commands
    for place, job in enumerate(jobs):
        verb, *arguments = job.command
        given = verbs[verb].make_context(verb, [*arguments, "--max-minutes", "1"]).params  # an unknown option raises
        if verb == "convert":
            shared = {name: given[name] for name in ("model", "mixer")}
            config = read(given["recipe"], given["overrides"], **shared, sources=given["data"], held_out=["1"])
            assert config.trains == (given["recipe"] != "none")
        if job.after is not None:  # what it waits for is made by a job that lanes have taken before
            assert job.after.parent in [other.makes.parent for other in jobs[:place]]


def test_what_is_finished_is_measured_once(table):
    for name in ("all-0", "default-0-control", "ablate/row-7", "ablate/row-7/step-03", "default-0/step-01"):
        (table.runs / name / "model").mkdir(parents=True)
        (table.runs / name / "model" / "plan.json").touch()
    jobs = convert_table.measurements(table)
    measured = [(job.name.split()[0], job.command[2].removeprefix(f"{table.runs}/")) for job in jobs]
    assert sorted(measured) == [
        ("join", "all-0/model"),
        ("tau", "ablate/row-7/model"),
        ("whole", "ablate/row-7/model"),
        ("whole", "ablate/row-7/step-03/model"),
        ("whole", "all-0/model"),
        ("whole", "default-0-control/model"),
    ]
    jobs[0].makes.parent.mkdir(parents=True)
    jobs[0].makes.touch()
    assert len(convert_table.measurements(table)) == len(jobs) - 1
