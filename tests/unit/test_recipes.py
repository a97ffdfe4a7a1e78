"""The scripts in recipes/: those that make training data, the voice on torch and in ONNX Runtime, the table of runs."""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import book_text
import convert_table
import dictionary_text
import onnx_in_torch
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


def test_lines_of_a_book_end_with_clauses():
    text = 'He had, it is said, 3 dogs. "Come," said Mr. Brown; "and sit by the fire, if you will." II. The end of it.'
    found = [line for p in book_text.paragraphs(text) for line in book_text.lines(p, random.Random(1))]
    assert found
    assert all(book_text.SHORT <= len(book_text.words(line)) <= book_text.LONG for line in found)
    assert not any(set(line) & set('3"()') or "II" in line for line in found)
    assert any("mister Brown" in line for line in found)


def test_no_seven_words_in_a_row_are_shared():
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    assert list(book_text.runs(words)) == [tuple(words[:7]), tuple(words[1:])]
    assert not list(book_text.runs(words[:6]))


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
def test_the_voice_on_torch_says_what_onnx_runtime_says(tmp_path, monkeypatch):
    """Three lines of different lengths at once, each in its own voice, as the whole network gives it alone."""
    pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    network = tmp_path / "voice.onnx"
    speak.rebuild(VOICE, network)
    voice = speak.CudaVoice(network, VOICE / "voice.json", seed=5, device="cpu")
    rng = np.random.default_rng(0)
    lines = [rng.integers(20, 60, size) for size in (9, 30, 16)]
    monkeypatch.setattr(
        torch, "lerp", lambda one, *_: one
    )  # no mixed voices, and no noise: it is drawn otherwise there
    monkeypatch.setattr(torch, "randn_like", lambda x, **_: torch.zeros(x.shape))
    (z, who, frames), speakers = voice.plan(lines, np.random.default_rng(1))
    mask = (torch.arange(z.shape[-1]) < frames[:, None]).float()[:, None]
    with torch.inference_mode():
        waves = voice.decode(voice.flow(z, mask, who), mask, who)[:, 0].numpy()
    drawn = np.random.default_rng(1)
    lengths = [drawn.uniform(low, high, (3, 1, 1)) for low, high in ((0.4, 0.8), (0.85, 1.4))][1].ravel()
    session = ort.InferenceSession(str(network), providers=["CPUExecutionProvider"])
    for wave, line, speaker, length, count in zip(waves, lines, speakers, lengths, frames.tolist(), strict=True):
        scales = np.array([0.0, length, 0.0], np.float32)
        inputs = {"input": line[None], "input_lengths": np.array([len(line)]), "scales": scales, "sid": [speaker]}
        expected = session.run(None, inputs)[0].ravel()
        assert len(expected) == 256 * count
        np.testing.assert_allclose(wave[: len(expected)], expected, atol=2e-4)
        assert not wave[len(expected) :].any()


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("Gather", [np.arange(12.0).reshape(3, 4), np.array([[-1, 0]])], {"axis": 1}),
        ("Gather", [np.arange(12.0).reshape(3, 4), np.array(2)], {"axis": 0}),
        ("Slice", [np.arange(20.0).reshape(4, 5), *(np.array([v]) for v in (-1, -9999, 1, -1))], {}),
        ("Slice", [np.arange(20.0).reshape(4, 5), *(np.array([v]) for v in (1, -1, 1, 2))], {}),
        ("Pad", [np.ones((2, 3)), np.array([0, 1, 0, 2]), np.array(5.0)], {"mode": "constant"}),
        ("ScatterND", [np.zeros((3, 2)), np.array([[0, 1], [2, 0]]), np.array([4.0, 6.0])], {}),
        ("GatherND", [np.arange(6.0).reshape(3, 2), np.array([[0, 1], [2, 0]])], {}),
        ("GatherElements", [np.arange(6.0).reshape(3, 2), np.array([[0], [-1], [1]])], {"axis": -1}),
        ("Expand", [np.ones((3, 1)), np.array([2, 1, 4])], {}),
        ("Reshape", [np.arange(6.0).reshape(3, 2), np.array([0, -1, 1])], {}),
        ("Where", [np.array([[True], [False]]), np.ones((1, 3)), np.zeros((2, 3))], {}),
        ("ReduceSum", [np.arange(6.0).reshape(3, 2), np.array([1])], {"keepdims": 0}),
        ("ReduceMean", [np.arange(6.0).reshape(3, 2)], {"axes": [-1]}),
        ("CumSum", [np.arange(6.0).reshape(3, 2), np.array(1)], {}),
        ("Div", [np.array([7, -7]), np.array([2, 2])], {}),
        ("Transpose", [np.arange(6.0).reshape(1, 3, 2)], {"perm": [0, 2, 1]}),
        ("Clip", [np.arange(6.0), np.array(2.0)], {}),
        ("Squeeze", [np.ones((2, 1, 3)), np.array([1])], {}),
        ("Unsqueeze", [np.ones((2, 3)), np.array([0, -1])], {}),
    ],
)
def test_operators_are_those_of_onnx_runtime(operator, inputs, attributes):
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    inputs = [x.astype(np.float32) if x.dtype == np.float64 else x for x in inputs]
    names = [f"x{i}" for i in range(len(inputs))]
    types = [onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for x in inputs]
    given = [
        onnx.helper.make_tensor_value_info(*about) for about in zip(names, types, map(np.shape, inputs), strict=True)
    ]
    kind = types[1] if operator == "Where" else types[0]
    made = onnx.helper.make_tensor_value_info("y", kind, None)
    node = onnx.helper.make_node(operator, names, ["y"], **attributes)
    graph = onnx.helper.make_graph([node], "one", given, [made])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 15)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, dict(zip(names, inputs, strict=True)))
    tensors = {name: torch.from_numpy(x) if x.ndim else torch.tensor(x) for name, x in zip(names, inputs, strict=True)}
    (found,) = onnx_in_torch.Graph(model, ["y"], "cpu")(**tensors)
    np.testing.assert_allclose(found.numpy(), expected)


def test_lines_of_like_length_share_a_shard_and_none_is_lost():
    lens = np.random.default_rng(0).integers(5, 200, 5000)
    order = speak.in_shards(lens)
    assert sorted(order) == list(range(5000))
    spans = [np.ptp(lens[order[i : i + speak.SIZE]]) for i in range(0, 4096, speak.SIZE)]
    assert np.mean(spans) < 12


@pytest.fixture
def table(tmp_path) -> argparse.Namespace:
    paths = {name: tmp_path / name for name in ("data", "models", "enhance", "runs", "cache", "results")}
    training = {"synthetic": tmp_path / "more", "epochs": 2.0, "lr": 1e-4, "scale": 0.5, "set": ["batch_seconds=24"]}
    return argparse.Namespace(**paths, **training, device="cpu", limit=8, kinds="whole,join,chunk,tau", batch=600)


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
    for name in (
        "all-0",
        "default-0-control",
        "ablate/row-7",
        "paper-all/step-12",
        "default-0/step-01",
        "enhance-inter",
    ):
        (table.runs / name / "model").mkdir(parents=True)
        (table.runs / name / "model" / "plan.json").touch()
    jobs = convert_table.measurements(table)
    measured = [(job.name.split()[0], job.command[2].removeprefix(f"{table.runs}/")) for job in jobs]
    assert sorted(measured) == [
        ("chunk", "ablate/row-7/model"),
        ("chunk", "default-0-control/model"),
        ("join", "ablate/row-7/model"),
        ("join", "all-0/model"),
        ("join", "default-0-control/model"),
        ("tau", "ablate/row-7/model"),
        ("whole", "ablate/row-7/model"),
        ("whole", "all-0/model"),
        ("whole", "default-0-control/model"),
        ("whole", "paper-all/step-12/model"),
    ]
    (table.runs / "claims").mkdir()
    assert convert_table.claimed(jobs[0], table)
    assert not convert_table.claimed(jobs[0], table)  # by one lane only
    jobs[0].makes.parent.mkdir(parents=True)
    jobs[0].makes.touch()
    assert len(convert_table.measurements(table)) == len(jobs) - 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_built_in_models_recipe_is_what_made_it(seed):
    """Its record says so: all that decides the result."""
    root = Path(__file__).parents[2]
    lines = (root / "results" / "convert.jsonl").read_text().splitlines()
    (made,) = (
        record
        for record in map(json.loads, lines)
        if record["what"] == "final" and record["model"] == "models/whisper-base-ctc" and record["seed"] == seed
        if record["config"]["mixer"] == "pyramid" and not record["config"]["positions"]
    )
    recipe = read(str(root / "recipes" / "default.toml"), model=made["model"], seed=seed)
    train = {key: value for key, value in made["config"]["train"].items() if key != "cache"}
    then = {**made["config"], "train": train, "max_minutes": 0.0}
    assert {key: value for key, value in recipe.to_dict().items() if key in then} == then
