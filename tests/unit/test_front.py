"""The numpy front end gives the networks what the torch one does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make

from lpa import audio
from lpa.errors import LpaError
from lpa.families import features
from lpa.run import Facts
from lpa.run.front import AT_ONCE, Processor, mel_filters
from lpa.surgery import save

CLIPS = sorted((Path(__file__).parents[1] / "data" / "librivox").glob("*.flac"))
NOISE = np.random.default_rng(0).normal(size=40000).astype(np.float32) * 0.1


def processor(model, folder) -> Processor:
    return Processor.read(save(model, folder))


@pytest.mark.parametrize("case", ["whisper", "whisper-fixed-floor"])
def test_log_mel_is_torchs(case, tmp_path):
    model = make(case)
    front = processor(model, tmp_path / "m")
    clips = [audio.read(path) for path in CLIPS] + [NOISE[:n] for n in (1, 159, 160, 161, 401, 40000)]
    clips.append(np.zeros(5000, np.float32))
    assert len(clips) == 12
    for samples in clips:
        wanted, frames = model.front(torch.from_numpy(samples).unsqueeze(0))
        found = front.prepare(samples)
        assert found.dtype == np.float32
        assert found.shape == wanted.shape == (1, int(frames), 80)
        assert np.abs(found - wanted.numpy()).max() < 1e-4


def test_long_audio_is_the_same_in_pieces(tmp_path):
    """A spectrogram is made a few thousand frames at a time; the seams must not show."""
    front = processor(make("whisper-fixed-floor"), tmp_path / "m")
    samples = np.random.default_rng(1).normal(size=160 * (AT_ONCE + 100)).astype(np.float32)
    at = 160 * (AT_ONCE - 50)
    whole, part = front.prepare(samples)[0], front.prepare(samples[at:])[0]
    assert np.abs(whole[AT_ONCE - 40 :] - part[10:]).max() < 1e-5


@pytest.mark.parametrize("normalise", [True, False])
def test_waveform_is_torchs(normalise, tmp_path, monkeypatch):
    model = make("wav2vec2", normalise=normalise)
    front = processor(model, tmp_path / "m")
    for samples in (0.3 + NOISE, NOISE[:400], np.zeros(4000, np.float32), audio.read(CLIPS[0])):
        heard = []

        def convolve(audio, *rest, heard=heard):
            heard.append(audio)
            return features.convolve_batch(audio, *rest)

        monkeypatch.setattr("lpa.families.wav2vec2.convolve_batch", convolve)
        model.front(torch.from_numpy(samples).unsqueeze(0))
        found = front.prepare(samples)
        assert found.shape == (1, len(samples))
        assert found.dtype == np.float32
        assert np.abs(found - heard[0].numpy()).max() < 1e-4


def test_filters_are_the_familys():
    assert np.array_equal(mel_filters(400, 80), make("whisper").log_mel.filters.numpy())


def test_facts_are_the_models(tmp_path):
    for case in ("wav2vec2", "whisper", "whisper-fixed-floor"):
        model = make(case)
        facts = Facts.of(model.family, model.base(), 1)
        assert model.frames(facts.shortest) == 1
        assert model.frames(facts.shortest - 1) == 0
        assert (facts.heads, facts.attention) == (4, 1)
    assert Facts.of("whisper", make("whisper").base(), 0).longest == 2.0
    assert facts.longest is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tokens": 1}'])
def test_a_damaged_processor_is_one_line(text, tmp_path):
    (tmp_path / "processor.json").write_text(text)
    with pytest.raises(LpaError, match=r"processor\.json"):
        Processor.read(tmp_path)
    with pytest.raises(LpaError, match=r"no processor\.json"):
        Processor.read(tmp_path / "elsewhere")
