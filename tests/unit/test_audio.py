"""Decoding: rates, channels, and every way a file can be no use."""

import numpy as np
import pytest
import soundfile

from lpa import audio
from lpa.errors import LpaError


def tone(rate: int, seconds: float = 1.0, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def test_sixteen_bit_wav_comes_back_exactly(tmp_path):
    samples = np.random.default_rng(0).integers(-32768, 32768, 4000).astype(np.int16)
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="PCM_16")
    assert np.array_equal(audio.to_int16(audio.read(tmp_path / "a.wav")), samples)
    assert np.array_equal(audio.to_int16(audio.to_float(samples)), samples)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_are_resampled(tmp_path, rate):
    soundfile.write(tmp_path / "a.wav", tone(rate), rate, subtype="FLOAT")
    read = audio.read(tmp_path / "a.wav")
    assert read.dtype == np.float32
    assert abs(len(read) - 16000) <= 1
    inner = slice(1000, 15000)  # the filter rings at the ends
    assert np.abs(read[: len(tone(16000))][inner] - tone(16000)[inner]).max() < 1e-3


def test_channels_are_averaged(tmp_path):
    left, right = tone(16000), tone(16000, hertz=1000)
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], 1), 16000, subtype="FLOAT")
    assert np.allclose(audio.read(tmp_path / "a.wav"), (left + right) / 2, atol=1e-6)


@pytest.mark.parametrize("suffix", ["flac", "ogg", "mp3"])
def test_formats(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, tone(16000), 16000)
    assert abs(len(audio.read(path)) - 16000) < 2500  # mp3 pads
    assert audio.read(path.read_bytes()).shape == audio.read(path).shape
    assert audio.seconds(path) == pytest.approx(len(audio.read(path)) / 16000, abs=0.01)


def test_full_scale_does_not_wrap():
    assert audio.to_int16(np.array([2.0, 1.0, -1.0, -2.0], np.float32)).tolist() == [32767, 32767, -32768, -32768]


def test_errors_name_the_file(tmp_path):
    empty, nan, junk, cut = (tmp_path / n for n in ("empty.wav", "nan.wav", "junk.flac", "cut.flac"))
    soundfile.write(empty, np.zeros(0, np.float32), 16000)
    soundfile.write(nan, np.array([0, np.nan], np.float32), 16000, subtype="FLOAT")
    junk.write_bytes(b"not audio at all" * 20)
    soundfile.write(cut, np.random.default_rng(0).uniform(-1, 1, 16000), 16000)
    cut.write_bytes(cut.read_bytes()[:20])
    reasons = {
        tmp_path / "gone.wav": "not there",
        tmp_path: "not there",
        empty: "no samples",
        nan: "not numbers",
        junk: "cannot be read",
        cut: "cannot be read",
    }
    for path, reason in reasons.items():
        with pytest.raises(LpaError, match=reason) as error:
            audio.read(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(LpaError, match=r"junk\.flac"):
        audio.seconds(junk)
    with pytest.raises(LpaError, match="row 7"):
        audio.read(b"junk", name="row 7")
