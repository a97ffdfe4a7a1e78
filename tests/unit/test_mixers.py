"""Every mixer in the registry: its contract, its forms, its padding, its memory, its errors."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixer_cases import attention, padded, same_values_and_gradients, shake

from lpa.errors import LpaError
from lpa.mixers import MIXERS, Attention, build, resolve
from lpa.mixers.base import MixerConfig, projections

NAMES = sorted(MIXERS)
TWO_FORMS = [name for name in NAMES if hasattr(MIXERS[name][0], "definition")]
SMALL = {
    "anchored": {"reach": 9},
    "ladder": {"reach": 9, "heads": 4},
    "window": {"side": 5, "block": 4},
    "dynconv": {"taps": 7},
}
SMALL["pyramid"] = {"block": 4, "pieces": [1, 1, 2], "steps": [1, 3]}


def small(name: str, dim: int = 16, heads: int = 4, **config):
    return shake(build(name, attention(dim, heads), {**SMALL.get(name, {}), **config}))


def test_registry_covers_what_the_tables_need():
    assert {"lpa", "anchored", "ladder", "pyramid", "window", "summary", "conv", "dynconv", "none"} <= set(NAMES)


@pytest.mark.parametrize("name", TWO_FORMS)
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_fast_form_is_the_definition(name, lengths, seed):
    mixer = small(name)
    x, mask = padded(lengths, 16, seed)
    same_values_and_gradients(mixer, lambda x: mixer(x, mask), lambda x: mixer.definition(x, mask), x, 1e-5)


@pytest.mark.parametrize("name", ["window", "pyramid"])
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_places_are_learned_alike_in_both_forms(name, lengths, seed):
    mixer = small(name, places=True)
    assert mixer.places.abs().min() > 0
    x, mask = padded(lengths, 16, seed)
    same_values_and_gradients(mixer, lambda x: mixer(x, mask), lambda x: mixer.definition(x, mask), x, 1e-5)


@pytest.mark.parametrize("name", ["window", "pyramid"])
def test_places_start_from_nothing(name):
    source = attention(16, 4)
    x, _ = padded([23], 16, 0)
    plain, placed = (build(name, source, {**SMALL[name], "places": places}) for places in (False, True))
    torch.testing.assert_close(placed(x).y, plain(x).y)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_batch_gives_each_sample_what_it_gives_alone(name, lengths, seed):
    mixer = small(name)
    x, mask = padded(lengths, 16, seed)
    batch = mixer(x, mask).y
    assert not batch[~mask].any(), "output at padded frames is zero"
    for row, length in enumerate(lengths):
        alone = mixer(x[row : row + 1, :length]).y[0]
        torch.testing.assert_close(batch[row, :length], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_nothing_but_padding_is_zero_and_harmless(name):
    mixer = small(name)
    x, mask = padded([7, 12], 16)
    mask = mask.clone()
    mask[0] = False
    y = mixer(x, mask).y
    assert y.isfinite().all()
    assert not y[0].any()
    torch.testing.assert_close(y[1], mixer(x[1:]).y[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_one_frame_and_no_frame(name):
    mixer = small(name)
    assert mixer(torch.randn(2, 1, 16)).y.isfinite().all()
    with pytest.raises(LpaError, match="no frames"):
        mixer(torch.randn(2, 0, 16))


@pytest.mark.parametrize("name", [n for n in NAMES if small(n).reach is not None])
def test_output_depends_on_nothing_outside_the_reach(name):
    mixer = small(name)
    before, after = mixer.reach
    x = torch.randn(1, 160, 16, requires_grad=True)
    at = 77
    y = mixer(x).y[0, at].sum() + 0 * x.sum()  # `none` looks at nothing at all
    (gradient,) = torch.autograd.grad(y, x)
    moved = gradient[0].abs().sum(-1).nonzero().flatten()
    assert name == "none" or len(moved) > 1
    if name == "none":
        moved = torch.tensor([at])
    assert at - before <= moved.min()
    assert moved.max() <= at + after


@pytest.mark.parametrize("name", ["anchored", "ladder", "window", "conv", "dynconv"])
def test_shifting_the_input_shifts_the_output(name):
    mixer = small(name)
    inside = torch.randn(1, 60, 16)
    here = torch.cat([torch.zeros(1, 30, 16), inside, torch.zeros(1, 41, 16)], 1)
    there = torch.cat([torch.zeros(1, 37, 16), inside, torch.zeros(1, 34, 16)], 1)
    torch.testing.assert_close(mixer(here).y[:, 30:90], mixer(there).y[:, 37:97], atol=1e-5, rtol=1e-4)


def test_pyramid_shifts_by_whole_blocks():
    mixer = small("pyramid")
    inside = torch.randn(1, 60, 16)
    here = torch.cat([torch.zeros(1, 32, 16), inside, torch.zeros(1, 40, 16)], 1)
    there = torch.cat([torch.zeros(1, 40, 16), inside, torch.zeros(1, 32, 16)], 1)
    torch.testing.assert_close(mixer(here).y[:, 32:92], mixer(there).y[:, 40:100], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_bounded_attention_that_reaches_everything_is_attention(heads):
    source = attention(16, heads)
    x, mask = padded([30, 17], 16)
    whole = Attention.from_attention(source)(x, mask).y
    window = build("window", source, {"side": 30})
    torch.testing.assert_close(window(x, mask).y, whole, atol=1e-5, rtol=1e-4)
    pyramid = build("pyramid", source, {"block": 32, "pieces": [32], "steps": []})
    torch.testing.assert_close(pyramid(x, mask).y, whole, atol=1e-5, rtol=1e-4)


def test_attention_itself_is_the_textbook_formula():
    source = attention(16, 2)
    x, mask = padded([9, 5], 16)
    q, k, v = (
        layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (source.q_proj, source.k_proj, source.v_proj)
    )
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask[:, None, None], -torch.inf)
    expected = source.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    got = Attention.from_attention(source)(x, mask).y
    torch.testing.assert_close(got[mask], expected[mask], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_config_survives_json(name):
    _, config = resolve(name)
    again = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config), "frozen"


@pytest.mark.parametrize("name", NAMES)
def test_cost_is_stated_and_below_long_attention(name):
    mixer = build(name, attention(64, 4))
    assert 0 <= mixer.mflop_per_frame() < (8 * 64 * 64 + 4 * 64 * 30_000) / 1e6


@pytest.mark.parametrize("name", NAMES)
def test_precision_and_gradient_follow_the_attention(name):
    mixer = build(name, attention(16, 4).to(torch.bfloat16), SMALL.get(name))
    y = mixer(torch.randn(2, 20, 16, dtype=torch.bfloat16)).y
    assert y.dtype == torch.bfloat16
    y.float().pow(2).sum().backward()
    for parameter_name, parameter in mixer.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), parameter_name


def test_unknown_names_are_told_the_choices():
    with pytest.raises(LpaError, match=r"no mixer 'lap'; have anchored, conv, .*lpa"):
        resolve("lap")
    with pytest.raises(LpaError, match="has no field sidee; have side, block"):
        resolve("window", {"sidee": 3})


@pytest.mark.parametrize(
    ("name", "config"), [("lpa", {"heads": 3}), ("dynconv", {"heads": 5}), ("ladder", {"heads": 7})]
)
def test_heads_that_do_not_divide_the_width(name, config):
    with pytest.raises(LpaError, match="heads do not divide a width of 16"):
        build(name, attention(16, 4), config)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("window", {"side": -1}, "side ≥ 0"),
        ("conv", {"taps": 4}, "no middle"),
        ("pyramid", {"pieces": [3]}, "add up to the block"),
        ("lpa", {"aperiodic": -1}, "needs pulses"),
        ("lpa", {"aperiodic": 0, "periodic": 0, "positional": 0}, "needs pulses"),
        ("lpa", {"weights": "dynamic"}, "no pulse weights"),
        ("lpa", {"tau": 0.0}, "must be positive"),
    ],
)
def test_settings_that_make_no_sense(name, config, message):
    with pytest.raises(LpaError, match=message):
        build(name, attention(16, 4), config)


def test_what_is_no_attention():
    with pytest.raises(LpaError, match="Linear is no attention"):
        projections(torch.nn.Linear(4, 4))
    assert MixerConfig.from_dict({}) == MixerConfig()


MEMORY = """
import json, torch
from lpa.bench import random_attention
from lpa.mixers import MIXERS, build
torch.set_num_threads(1)
def status(field):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(field))
def peak(mixer, frames):
    x = torch.randn(1, frames, 128)
    with torch.inference_mode():
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
        before = status("VmRSS")
        mixer(x)
        return status("VmHWM") - before
result = {}
for name in MIXERS:
    mixer = build(name, random_attention(128, 8))
    peak(mixer, 4096)
    result[name] = (peak(mixer, 4096), peak(mixer, 32768))
print(json.dumps(result))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_grows_no_faster_than_the_recording():
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for name, (short, long) in json.loads(done.stdout).items():
        assert long <= 1.15 * 8 * max(short, 1024), f"{name}: {short} kB at 4k frames, {long} kB at 32k"
