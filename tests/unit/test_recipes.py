"""The scripts in recipes/ that make training data; the voice on torch against the voice in ONNX Runtime."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import dictionary_text
import speak
import splice

from lpa.align import Word
from lpa.audio import RATE

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
