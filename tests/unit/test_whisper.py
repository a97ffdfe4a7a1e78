import pytest
import torch
import transformers
from tiny_models import make

from lpa.errors import LpaError
from lpa.families.whisper import LogMel


def test_log_mel_is_whispers():
    audio = 0.3 * torch.randn(1, 16000, generator=torch.Generator().manual_seed(2))
    audio[:, 4000:9000] *= 1e-6  # silence, where the floor acts
    want = transformers.WhisperFeatureExtractor()._torch_extract_fbank_features(audio.numpy())
    got, lengths = LogMel(80, "recording")(audio, torch.tensor([16000]))
    assert lengths.tolist() == [100]
    # the outermost frames see our zeros where Whisper sees a reflection
    torch.testing.assert_close(got[0, 2:98], torch.from_numpy(want[0]).T[2:98], atol=1e-4, rtol=1e-4)
    fixed, _ = LogMel(80, -2.0)(audio, torch.tensor([16000]))
    assert float(fixed.min()) == pytest.approx(0.5)
    assert float(got.min()) != pytest.approx(0.5)


def test_log_mel_peak_is_the_samples_own():
    """A click on the last sample is loudest in the frame after it, which is padding and must not set the floor."""
    audio = torch.zeros(2, 12000)
    audio[:, :8000] = 1e-4 * torch.randn(8000, generator=torch.Generator().manual_seed(4))
    audio[:, 7999] = 1
    mel = LogMel(80, "recording")
    together, lengths = mel(audio, torch.tensor([12000, 8000]))
    alone, _ = mel(audio[1:, :8000], torch.tensor([8000]))
    assert lengths.tolist() == [75, 50]
    torch.testing.assert_close(together[1:, :50], alone, atol=1e-6, rtol=0)
    assert (together[0, :50] - alone).abs().max() > 0.01
    assert (together[1, 50:] == 0).all()


def test_log_mel_stays_float32():
    model = make("whisper").to(torch.bfloat16)
    assert model.log_mel.filters.dtype == torch.float32
    features, _ = model.front(torch.randn(1, 8000))
    assert features.dtype == torch.bfloat16
    assert model(torch.randn(1, 8000)).logits.isfinite().all()


def test_fixed_floor_does_not_hear_the_rest_of_the_recording():
    audio = 0.01 * torch.randn(1, 16000, generator=torch.Generator().manual_seed(3))
    loud = audio.clone()
    loud[:, 12000:] *= 1e5
    whole = torch.tensor([16000])
    for floor, same in ((-5.0, True), ("recording", False)):
        mel = LogMel(80, floor)
        assert torch.equal(mel(audio, whole)[0][:, :60], mel(loud, whole)[0][:, :60]) is same


def test_whisper_loop_is_transformers_own_at_30_s():
    model = make("whisper", max_source_positions=1500)
    features = torch.randn(1, 3000, 80)
    with torch.no_grad():
        theirs = model.encoder(features.transpose(1, 2)).last_hidden_state
        ours = model.encode(features, torch.tensor([3000])).last
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_whisper_positions_end_somewhere():
    audio = torch.zeros(1, 16000 * 3)
    with pytest.raises(LpaError, match=r"3 s of audio, but this model has positions for 2 s"):
        make("whisper")(audio)
    assert make("whisper-fixed-floor")(audio).logits.shape[1] == 150
