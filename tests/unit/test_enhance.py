"""`lpa enhance`: blocks against one pass, lengths, rates, channels, memory, bad files, model folders."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tiny_models import make_sepformer

from lpa.enhance import DEPTHS, Level, clean, enhance, enhance_file, enhance_files, load, margin_of, run
from lpa.errors import LpaError
from lpa.families.sepformer import SepFormer
from lpa.score import si_snr_improvement
from lpa.surgery import save, swap

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
TINY = {"width": 16, "heads": 4, "ffn": 24, "blocks": 1, "intra_layers": 1, "inter_layers": 1, "chunk": 10}


def tiny(**changes) -> SepFormer:
    return make_sepformer(TINY, **changes)


def bounded() -> SepFormer:
    """Nothing in it sees the whole recording."""
    model = tiny(norm="cln", inter_positions=False)
    for site in model.sites("inter"):
        swap(model, site, "window", {"side": 2})
    return model


def noise(samples: int, channels: int = 1) -> np.ndarray:
    shape = (samples, channels) if channels > 1 else (samples,)
    return (0.2 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def pieces(samples: np.ndarray, size: int):
    return (samples[i : i + size] for i in range(0, len(samples), size))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save(tiny(), tmp_path_factory.mktemp("models") / "tiny"))


# --- blocks


@pytest.mark.parametrize("samples", [1, 15, 799, 4000, 4801, 12345, 16000])
@pytest.mark.parametrize("size", [700, 100000])
def test_blocks_give_what_one_pass_gives(samples, size):
    model = bounded()
    audio = noise(samples)[:, None]
    assert model.reach is not None
    margin = (model.reach + 200) / 16000
    parts = list(clean(model, pieces(audio, size), Level(1), block=0.1, margin=margin))
    assert (len(parts) > 3) == (samples > 7000)
    found, wanted = np.concatenate(parts), run(model, audio)
    assert np.abs(wanted).max() > 1e-4
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_bounded_model_enhances_twenty_seconds_as_one_pass_would(tmp_path):
    """The file as users get it, with no margin named: the model's own reach decides. All its attention is replaced."""
    model = tiny(norm="cln", inter_positions=False, chunk=50)
    for kind, mixer, config in (("intra", "pyramid", {}), ("inter", "window", {"side": 3})):
        for site in model.sites(kind):
            swap(model, site, mixer, config)
    assert 0.1 < margin_of(model) < 2
    audio = noise(20 * 16000)
    soundfile.write(tmp_path / "long.wav", audio, 16000, subtype="FLOAT")
    folder = save(model, tmp_path / "model")
    assert enhance_files([str(tmp_path / "long.wav")], str(folder), tmp_path / "out", block=4.0) == 0
    found = soundfile.read(tmp_path / "out" / "long.wav", dtype="float32")[0]
    whole = run(model, audio[:, None])[:, 0]
    level = Level(1)
    level.compare(audio[:, None], whole[:, None])
    level.peak = np.abs(whole).max(keepdims=True)
    wanted = whole * level.gain()
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_a_model_that_sees_everything_hears_a_second_more():
    assert margin_of(tiny()) == 1.0
    far = tiny(norm="cln", inter_positions=False)
    swap(far, far.sites("inter")[0], "window", {"side": 5000})
    assert far.reach is not None
    assert margin_of(far) == 1.0  # a margin of minutes would take the memory that blocks save


def test_without_a_margin_blocks_differ():
    """So that the test above can fail."""
    model = bounded()
    audio = noise(16000)[:, None]
    found = np.concatenate(list(clean(model, [audio], Level(1), block=0.1, margin=0.001)))
    assert np.abs(found - run(model, audio)).max() > 1e-3


def test_one_block_goes_over_into_the_next():
    """A model that sees everything gives something else in every block: no jump, but a fade, where they meet."""
    model, audio = tiny(), noise(16000)[:, None]
    found = np.concatenate(list(clean(model, [audio], Level(1), block=0.1, margin=0.05)))
    assert found.shape == audio.shape
    first, second = run(model, audio[:2400]), run(model, audio[800:4000])  # 1600 each, and 800 more on either side
    assert np.abs(first[1440:1760] - second[640:960]).max() > 1e-3
    rise = (np.arange(320)[:, None] + 0.5) / 320  # 20 ms, with its middle where the blocks meet
    np.testing.assert_allclose(found[:1440], first[:1440], atol=1e-6)
    np.testing.assert_allclose(found[1440:1760], (1 - rise) * first[1440:1760] + rise * second[640:960], atol=1e-6)
    np.testing.assert_allclose(found[1760:3040], second[960:2240], atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("samples", [1, 30, 5000, 30001])
def test_as_many_samples_come_out_at_every_rate(rate, samples):
    model = tiny()
    for channels in (1, 2):
        audio = noise(samples, channels)
        found = enhance(model, audio, rate, block=0.2, margin=0.02)
        assert found.shape == audio.shape
        assert np.isfinite(found).all()


def test_channels_are_cleaned_each_for_itself():
    model = tiny()
    both = noise(3000, 2)
    found = enhance(model, both, 16000, block=0.1, margin=0.02)
    for channel in range(2):
        alone = enhance(model, both[:, channel], 16000, block=0.1, margin=0.02)
        np.testing.assert_allclose(found[:, channel], alone, atol=1e-6)


def test_the_level_is_that_of_the_speech_in_the_input():
    """A model of any scale, and of either sign, gives the same."""
    model, audio = tiny(), noise(4000)
    wanted = enhance(model, audio, 16000)
    assert 0 < float(wanted @ audio) == pytest.approx(float(wanted @ wanted), rel=1e-3)
    with torch.no_grad():
        model.net.decoder.weight.mul_(-37)
    np.testing.assert_allclose(enhance(model, audio, 16000), wanted, atol=1e-5)


def test_nothing_clips():
    level = Level(2)
    level.compare(np.array([[1.0, 1.0]]), np.array([[0.5, 1.0]]))
    level.peak = np.array([0.8, 0.2])
    np.testing.assert_allclose(level.gain(), [2 / 1.6, 1 / 1.6], rtol=1e-6)


def test_what_is_no_audio():
    for bad in (np.zeros(0, np.float32), np.array([np.nan], np.float32), np.zeros((1, 1, 1), np.float32)):
        with pytest.raises(LpaError, match="must be finite"):
            enhance(tiny(), bad, 16000)


# --- files


@pytest.mark.parametrize(
    ("name", "form", "written", "depth"),
    [
        ("a.wav", None, "a.wav", "PCM_24"),
        ("a.flac", None, "a.flac", "PCM_24"),
        ("a.wav", "flac", "a.flac", "PCM_24"),
        ("a.ogg", None, "a.wav", "PCM_16"),
    ],
)
def test_a_file_keeps_its_rate_channels_length_and_depth(tmp_path, folder, capsys, name, form, written, depth):
    source = tmp_path / name
    soundfile.write(source, noise(9001, 2), 22050, subtype=None if name.endswith("ogg") else "PCM_24")
    assert enhance_files([str(source)], folder, tmp_path / "out", form=form) == 0
    result = soundfile.info(tmp_path / "out" / written)
    assert (result.samplerate, result.channels, result.frames) == (22050, 2, soundfile.info(source).frames)
    assert result.subtype == depth
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / written)
    heard = soundfile.read(source, dtype="float32")[0]
    found = soundfile.read(tmp_path / "out" / written, dtype="float32")[0]
    np.testing.assert_allclose(found, enhance(load(folder), heard, 22050), atol=1e-4)
    assert os.listdir(tmp_path / "out") == [written]  # nothing left lying about


def test_progress_is_told_to_the_end(tmp_path, folder):
    soundfile.write(tmp_path / "a.wav", noise(200_000), 16000)
    told: list[float] = []
    enhance_file(load(folder), tmp_path / "a.wav", tmp_path / "b.wav", block=0.5, progress=told.append)
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == 12.5


def test_a_wav_too_large_for_its_form_is_written_in_a_larger_one(tmp_path, folder, monkeypatch):
    """A wav counts its bytes in 32 bits: 13 hours of 16 bit at 48 kHz; RF64 is the same with 64."""
    for channels, depth in ((1, "PCM_16"), (2, "PCM_24")):
        soundfile.write(tmp_path / "a.wav", noise(3000, channels), 16000, subtype=depth)
        size = 3000 * channels * DEPTHS[depth]
        for largest, form in ((size, "WAV"), (size - 1, "RF64")):
            monkeypatch.setattr("lpa.enhance.LARGEST_WAV", largest)
            assert enhance_files([str(tmp_path / "a.wav")], folder, tmp_path / "out") == 0
            found = soundfile.info(tmp_path / "out" / "a.wav")
            assert (found.format, found.frames, found.subtype) == (form, 3000, depth)


def test_one_bad_file_does_not_stop_the_rest(tmp_path, folder, capsys):
    soundfile.write(tmp_path / "good.wav", noise(3000), 16000)
    (tmp_path / "text.wav").write_text("no audio")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, np.float32), 16000)
    soundfile.write(tmp_path / "nan.wav", np.full(100, np.nan, np.float32), 16000, subtype="FLOAT")
    names = ["text.wav", "empty.wav", "nan.wav", "gone.wav", "good.wav"]
    assert enhance_files([str(tmp_path / n) for n in names], folder, tmp_path / "out") == 4
    said = capsys.readouterr()
    lines = said.err.strip().splitlines()
    assert [name in line for name, line in zip(names, lines, strict=False)] == [True] * 4
    assert len(lines) == 4
    assert os.listdir(tmp_path / "out") == ["good.wav"]


def test_what_would_overwrite_is_said_before_any_work(tmp_path, folder):
    for name in ("a.wav", "b.wav"):
        soundfile.write(tmp_path / name, noise(1000), 16000)
    before = (tmp_path / "a.wav").read_bytes()
    with pytest.raises(LpaError, match="one of the files to enhance"):
        enhance_files([str(tmp_path / "a.wav")], folder, tmp_path)
    with pytest.raises(LpaError, match="would both be"):
        enhance_files([str(tmp_path / "a.wav"), str(tmp_path / "x" / "a.wav")], folder, tmp_path / "out")
    with pytest.raises(LpaError, match="have flac, wav"):
        enhance_files([str(tmp_path / "a.wav")], folder, tmp_path / "out", form="mp3")
    for block in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(LpaError, match="is no block"):
            enhance_files([str(tmp_path / "a.wav")], folder, tmp_path / "out", block=block)
    with pytest.raises(LpaError, match="cannot be made a folder"):
        enhance_files([str(tmp_path / "a.wav")], folder, tmp_path / "b.wav")
    assert (tmp_path / "a.wav").read_bytes() == before
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, folder):
    soundfile.write(tmp_path / "a.wav", noise(3000), 8000)

    def lpa(*words):
        return subprocess.run(
            [sys.executable, "-m", "lpa", "enhance", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )

    good, out = str(tmp_path / "a.wav"), str(tmp_path / "out")
    assert lpa(good, "-o", out, "--model", folder).returncode == 0
    assert soundfile.info(tmp_path / "out" / "a.wav").frames == 3000
    mixed = lpa(good, "gone.wav", "-o", out, "--model", folder)
    assert mixed.returncode == 1
    assert mixed.stderr.strip() == "lpa: gone.wav is not there; check the path"


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_recording(tmp_path):
    """Ten minutes against one, each in a process of its own; long frames, so that it is quick."""
    folder = str(save(tiny(kernel=320), tmp_path / "model"))
    script = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path; from lpa.enhance import enhance_files\n"
        "assert not enhance_files([sys.argv[1]], sys.argv[2], Path(sys.argv[3]), block=4.0)\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    peaks = []
    for minutes in (1, 10):
        source = tmp_path / f"{minutes}.wav"
        soundfile.write(source, np.tile(noise(160000), 6 * minutes), 16000)
        words = [sys.executable, "-c", script, str(source), folder, str(tmp_path / "out")]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 15, peaks  # MiB; nine more minutes alone are 33 as float32


# --- model folders


@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
def test_a_saved_model_is_the_model(tmp_path, weights):
    model = tiny()
    swap(model, 0, "pyramid")
    swap(model, 1, "summary")
    save(model, tmp_path / "m", weights)
    save(model, tmp_path / "m", weights)  # over itself
    loaded = load(tmp_path / "m")
    assert loaded.config == model.config
    assert loaded.swaps == model.swaps
    assert not loaded.training
    audio = torch.randn(1, 400)
    with torch.no_grad():
        found, wanted = loaded.clean(audio), model.eval().clean(audio)
    if weights == "float32":
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, atol=0.1 * float(wanted.abs().max()), rtol=0)
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_the_built_in_model_cleans_a_real_voice():
    """In white noise at 5 dB; a voice it has never heard."""
    clean, rate = soundfile.read(ROOT / "tests" / "data" / "librivox" / "austen-0870.flac", dtype="float32")
    noisy = clean + noise(len(clean)) / 0.2 * clean.std() * 10 ** (-5 / 20)
    gain = si_snr_improvement(enhance(load("default"), noisy, rate), noisy, clean)
    assert gain > 5.0


def test_folders_that_are_no_enhancement_models(tmp_path):
    sys.path.append(str(ROOT / "tests" / "unit"))
    from tiny_models import make

    save(make("whisper"), tmp_path / "whisper")
    with pytest.raises(LpaError, match="holds a whisper model"):
        load(tmp_path / "whisper")
    with pytest.raises(LpaError, match="is no SepFormer folder"):
        load(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(LpaError, match="is no model folder"):
        save(tiny(), tmp_path / "mine")
    with pytest.raises(LpaError, match="cannot use device"):
        load(save(tiny(), tmp_path / "m"), device="abacus")
