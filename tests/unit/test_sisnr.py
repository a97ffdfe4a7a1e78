"""SI-SNR against a second implementation, and the noises it is measured with."""

import math

import numpy as np
import pytest

from lpa.errors import LpaError
from lpa.noise import babble, coloured, gaussian, mix, power
from lpa.score import si_snr, si_snr_improvement


def by_correlation(estimate, reference) -> float:
    """SI-SNR another way: with r the correlation of the two, it is r² / (1 − r²)."""
    r = np.corrcoef(np.asarray(estimate, np.float64), np.asarray(reference, np.float64))[0, 1]
    return 10 * math.log10(r**2 / (1 - r**2))


@pytest.mark.parametrize("seed", range(5))
def test_equals_a_second_implementation(seed):
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal(1000 + seed).astype(np.float32) + 0.5
    estimate = rng.uniform(-3, 3) * reference + rng.uniform(0.01, 5) * rng.standard_normal(len(reference))
    assert si_snr(estimate, reference) == pytest.approx(by_correlation(estimate, reference), abs=1e-6)


def test_neither_scale_nor_offset_nor_sign_counts():
    rng = np.random.default_rng(0)
    reference = rng.standard_normal(500)
    estimate = reference + 0.3 * rng.standard_normal(500)
    wanted = si_snr(estimate, reference)
    for other in (7 * estimate, -estimate, estimate + 3):
        assert si_snr(other, reference) == pytest.approx(wanted, abs=1e-9)


def test_known_values():
    reference = np.array([1.0, -1.0, 1.0, -1.0])
    across = np.array([1.0, 1.0, -1.0, -1.0])
    assert si_snr(reference + 0.1 * across, reference) == pytest.approx(20)
    assert si_snr(reference + across, reference) == pytest.approx(0)
    assert si_snr(reference, reference) == math.inf
    assert si_snr(across, reference) == si_snr(np.zeros(4), reference) == -math.inf
    assert si_snr_improvement(reference + 0.1 * across, reference + across, reference) == pytest.approx(20)


def test_what_cannot_be_scored():
    with pytest.raises(LpaError, match="silent"):
        si_snr(np.ones(4), np.full(4, 2.0))
    with pytest.raises(LpaError, match="must be alike"):
        si_snr(np.ones(4), np.ones(5))


# --- noise


def speech(samples: int = 16000, seed: int = 9) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (np.sin(np.arange(samples) * 0.05) * rng.uniform(0.05, 0.3)).astype(np.float32)


@pytest.mark.parametrize("snr", [-5.0, 0.0, 5.0, 20.0])
def test_the_ratio_is_the_one_asked_for(snr):
    clean = speech()
    for noise in (gaussian(16000, 1), coloured(16000, 1.0, 1), babble([speech(3000, 1), speech(20000, 2)], 16000, 1)):
        noisy = mix(clean, noise, snr)
        assert noisy.dtype == np.float32
        assert 10 * math.log10(power(clean) / power(noisy - clean)) == pytest.approx(snr, abs=1e-3)


def test_at_five_decibels_gaussian_noise_costs_what_it_must():
    """The paper's set-up: the noisy recording has the SI-SNR that its ratio says."""
    clean = speech(160000)
    assert si_snr(mix(clean, gaussian(160000, 3), 5.0), clean) == pytest.approx(5.0, abs=0.1)


def test_seeds_decide_everything():
    voices = [speech(3000, 1), speech(5000, 2)]
    for make in (lambda s: gaussian(500, s), lambda s: coloured(500, 1.0, s), lambda s: babble(voices, 500, s)):
        assert np.array_equal(make((0, 7)), make((0, 7)))
        assert not np.array_equal(make((0, 7)), make((0, 8)))


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_colours_fall_as_they_should(exponent):
    noise = coloured(1 << 17, exponent, 0)
    spectrum = np.abs(np.fft.rfft(noise)) ** 2
    frequency = np.fft.rfftfreq(len(noise), 1 / 16000)
    low, high = (spectrum[(frequency > f) & (frequency < 2 * f)].mean() for f in (200, 3200))
    assert math.log2(low / high) / 4 == pytest.approx(exponent, abs=0.1)  # 200 Hz to 3200 Hz: four octaves
    assert power(noise) == pytest.approx(1, rel=1e-4)


def test_babble_is_its_voices():
    voice = np.sin(np.arange(700) * 2 * np.pi / 70)
    noise = babble([voice], 2000, 0)
    assert abs(np.corrcoef(noise[:1930], noise[70:])[0, 1]) == pytest.approx(1, abs=1e-6)  # it goes round without a gap
    loud, soft = np.sin(np.arange(4000) * 0.1), 0.01 * np.sin(np.arange(4000) * 0.7)
    spectrum = np.abs(np.fft.rfft(babble([loud, soft], 4000, 0)))
    peaks = [spectrum[round(w * 4000 / (2 * np.pi)) + np.arange(-3, 4)].max() for w in (0.1, 0.7)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.3)  # both are heard alike


def test_what_cannot_be_mixed():
    with pytest.raises(LpaError, match="the noise is silent"):
        mix(speech(10), np.zeros(10), 5)
    with pytest.raises(LpaError, match="must be alike"):
        mix(speech(10), np.ones(11), 5)
    with pytest.raises(LpaError, match="needs other utterances"):
        babble([], 10, 0)
    with pytest.raises(LpaError, match="silent"):
        babble([np.zeros(10)], 10, 0)
