"""Augmentation: the same for the same step, whole for every split of a batch, and never in the padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lpa import augment
from lpa.recipe import TrainConfig

FULL = TrainConfig(
    family="whisper",
    seed=3,
    speed=(0.9, 1.1),
    gain_db=(-6.0, 6.0),
    noise=0.5,
    room=0.5,
    time_masks=4.0,
    feature_masks=2,
    max_seconds=20.0,
)
CPU = torch.device("cpu")
NOTHING = TrainConfig(family="whisper")
SECONDS = np.array([1.0, 4.0, 9.5, 20.0])


def fields(draws: augment.Draws) -> dict[str, np.ndarray]:
    return vars(draws)


def flat_audio(lengths: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(0)
    audio = torch.from_numpy(rng.integers(-20000, 20000, int(lengths.sum())).astype(np.int16))
    return audio, np.cumsum(lengths) - lengths


def test_draws_depend_on_seed_and_step_alone():
    first, again = augment.draw(FULL, 7, SECONDS), augment.draw(FULL, 7, SECONDS)
    other = augment.draw(FULL, 8, SECONDS)
    for name, value in fields(first).items():
        assert np.array_equal(value, fields(again)[name])
    assert not np.array_equal(first.speed, other.speed)
    rows = first.rows(np.array([1, 3]))
    for name, value in fields(first).items():
        assert np.array_equal(value[[1, 3]], fields(rows)[name])


def test_draws_stay_within_the_recipe():
    for step in range(50):
        draws = augment.draw(FULL, step, SECONDS)
        assert (draws.speed >= 0.9 * 4096 - 1).all()
        assert (draws.speed <= 1.1 * 4096 + 1).all()
        assert draws.lengths(np.array([320000] * 4))[3] <= 320000  # 20 s may be the longest: it is not slowed
        assert (np.abs(20 * np.log10(draws.gain)) <= 6.001).all()
        present = draws.noise[draws.noise > 0]
        assert ((present <= 10**-0.5) & (present >= 0.01)).all()
        assert (draws.time_masks.sum(-1) <= 1).all()
        assert (draws.time_masks[:, :, 1] * SECONDS[:, None] <= 0.5 + 1e-9).all()
        counts = (draws.time_masks[:, :, 1] > 0).sum(1)
        assert ((counts >= np.floor(0.4 * SECONDS)) & (counts <= np.ceil(0.4 * SECONDS))).all()
        assert (draws.feature_masks[:, :, 1] <= 0.2).all()


def test_a_recipe_without_augmentation_changes_nothing():
    lengths = np.array([300, 500])
    audio, starts = flat_audio(lengths)
    draws = augment.draw(NOTHING, 0, lengths / 16000)
    assert np.array_equal(draws.lengths(lengths), lengths)
    batch = augment.gather(audio, starts, lengths, draws.speed, 512)
    assert torch.equal(batch[0, :300], audio[:300].float() / 32768)
    assert torch.equal(batch[1, :500], audio[300:].float() / 32768)
    assert augment.perturb(batch, torch.from_numpy(lengths), draws, augment.surroundings(0, CPU)) is batch
    assert augment.mask_features(batch, torch.from_numpy(lengths), draws) is batch


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(3500, 4700), st.integers(0, 64))
def test_gather_at_a_speed_is_the_curve_through_the_samples(lengths, speed, more):
    lengths = np.array(lengths)
    audio, starts = flat_audio(lengths)
    speeds = np.full(len(lengths), speed)
    heard = (lengths - 1) * 4096 // speed + 1
    batch = augment.gather(audio, starts, lengths, speeds, int(heard.max()) + more)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        clip = audio[start : start + length].double().numpy() / 32768
        for n in range(heard[row]):
            place = n * speed / 4096
            f = place - int(place)
            a, b, c, d = clip[np.clip(int(place) + np.arange(-1, 3), 0, length - 1)]
            cubic = b + 0.5 * f * (c - a + f * (2 * a - 5 * b + 4 * c - d + f * (3 * (b - c) + d - a)))
            assert batch[row, n].item() == pytest.approx(cubic, abs=1e-5)
        assert batch[row, heard[row] :].abs().sum() == 0


def test_a_tone_played_faster_is_a_higher_tone():
    tone = (np.sin(np.arange(16000) * 0.2) * 20000).astype(np.int16)
    speed = np.array([round(1.1 * 4096)])
    heard = augment.gather(torch.from_numpy(tone), np.array([0]), np.array([16000]), speed, 14000)[0].numpy()
    wanted = np.sin(np.arange(14000) * 0.2 * speed[0] / 4096) * 20000 / 32768
    assert np.abs(heard - wanted).max() < 2e-3


def test_noise_is_at_its_level_and_coloured():
    around = augment.surroundings(0, CPU)
    bank = around.noise
    torch.testing.assert_close(bank.square().mean(1), torch.ones(len(bank)))
    power = torch.fft.rfft(bank).abs().square()
    low, high = power[:, 5000:10000].mean(1), power[:, 50000:100000].mean(1)  # ten times the frequency
    slopes = (low / high).log10()
    torch.testing.assert_close(slopes, torch.tensor(augment.NOISE_COLOURS), atol=0.05, rtol=0)
    audio, lengths = torch.zeros(2, 40000), torch.tensor([40000, 30000])
    audio[0], audio[1, :30000] = torch.randn(40000) * 0.1, torch.randn(30000) * 0.01
    draws = augment.draw(NOTHING, 0, np.array([2.5, 1.9]))
    draws.noise[:] = 0.1
    noisy = augment.perturb(audio, lengths, draws, around)
    for row, length in enumerate(lengths.tolist()):
        ratio = (noisy - audio)[row, :length].square().mean() / audio[row, :length].square().mean()
        assert 10 * ratio.log10() == pytest.approx(-20, abs=1.5)
    assert noisy[1, 30000:].abs().sum() == 0


def test_a_room_is_a_convolution_that_begins_at_once():
    rooms = augment.surroundings(0, CPU).rooms
    torch.testing.assert_close(rooms.square().sum(1), torch.ones(len(rooms)))
    assert (rooms[:, :32].square().sum(1) > 0.4).all()  # most of it within 2 ms: the words stay where they are
    assert len(rooms.unique(dim=0)) == len(rooms)
    torch.manual_seed(0)
    audio, numbers = torch.randn(3, 6000), torch.tensor([[2], [0], [7]])
    heard = augment.in_rooms(audio, numbers, rooms)
    assert torch.equal(heard[1], audio[1])
    for row in (0, 2):
        wanted = np.convolve(audio[row].double(), rooms[numbers[row, 0] - 1].double())[:6000]
        torch.testing.assert_close(heard[row].double(), torch.from_numpy(wanted), atol=1e-5, rtol=1e-5)
    draws = augment.draw(FULL, 1, np.full(400, 2.0))
    assert 150 < (draws.room > 0).sum() < 250
    assert draws.room.max() <= len(rooms)


def test_every_process_hears_its_rows_of_the_batch():
    lengths = np.array([4000, 9000, 7000])
    audio, starts = flat_audio(lengths)
    around = augment.surroundings(FULL.seed, CPU)
    whole = augment.draw(FULL, 5, lengths / 16000)

    def hear(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        draws = whole.rows(rows)
        heard = draws.lengths(lengths[rows])
        batch = augment.gather(audio, starts[rows], lengths[rows], draws.speed, int(heard.max()))
        own = torch.from_numpy(heard)
        batch = augment.perturb(batch, own, draws, around)
        features = torch.arange(40.0).repeat(len(rows), int(heard.max()) // 100 + 1, 1) + batch[:, ::100, None][:, :1]
        return batch, augment.mask_features(features, own // 100, draws)

    together = hear(np.arange(3))
    alone = hear(np.array([2]))
    for both, one in zip(together, alone, strict=True):
        torch.testing.assert_close(both[2:, : one.shape[1]], one)


def test_masks_are_the_mean_and_leave_the_padding():
    torch.manual_seed(0)
    features, lengths = torch.randn(2, 100, 20), torch.tensor([100, 40])
    draws = augment.draw(NOTHING, 0, np.array([1.0, 0.4]))
    draws = augment.Draws(
        **{
            **fields(draws),
            "time_masks": np.array([[[0.1, 0.2], [0.0, 0.0]], [[0.5, 0.5], [0.0, 0.0]]]),
            "feature_masks": np.array([[[0.5, 0.1]], [[0.0, 0.0]]]),
        }
    )
    masked = augment.mask_features(features, lengths, draws)
    expected = features.clone()
    expected[0, 10:30] = expected[0, :, 10:12] = features[0].mean()
    expected[1, 20:40] = features[1, :40].mean()
    torch.testing.assert_close(masked, expected)
    assert torch.equal(masked[1, 40:], features[1, 40:])
