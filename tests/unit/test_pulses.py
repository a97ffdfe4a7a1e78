"""The LPA layer: four forms of the same numbers, its gates one by one, its ablations, very long recordings."""

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mixer_cases import attention, padded, same_values_and_gradients, shake

from lpa.errors import LpaError
from lpa.mixers import build
from lpa.mixers.frames import Anchored
from lpa.mixers.lpa import LPAConfig
from lpa.mixers.pulses import Aperiodic, Periodic, Positional, Segments, causal_convolution, segment_sums
from lpa.windows import rungs

CPU = torch.device("cpu")
COUNTS = st.fixed_dictionaries(
    {f: st.integers(0, 3) for f in ("aperiodic", "periodic", "positional", "anchored", "ladder")}
)


def layer(**config):
    return shake(build("lpa", attention(16, 4), {"reach": 6, **config}))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    counts=COUNTS,
    heads=st.sampled_from([1, 2, 4, 8]),
    weights=st.sampled_from(["frame", "utterance", "static"]),
    tau=st.sampled_from([3.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_folded_is_plain_in_values_and_every_gradient(lengths, counts, heads, weights, tau, seed):
    assume(sum(counts.values()) > 0)
    mixer = layer(heads=heads, weights=weights, tau=tau, **counts)
    x, mask = padded(lengths, 16, seed)
    torch.manual_seed(seed)
    passed, skip = torch.rand(len(lengths), 5), torch.randn(x.shape)
    same_values_and_gradients(
        mixer, lambda x: mixer(x, mask, passed, skip), lambda x: mixer.definition(x, mask, passed, skip), x, 1e-5
    )


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=3), counts=COUNTS, seed=st.integers(0, 99))
def test_prefix_sums_are_the_dense_product(lengths, counts, seed):
    assume(sum(counts.values()) > 0)
    mixer = layer(hard=True, **counts)
    x, mask = padded(lengths, 16, seed)
    dense = mixer(x, mask).y
    mixer.pooling = "prefix"
    torch.testing.assert_close(mixer(x, mask).y, dense, atol=1e-5, rtol=1e-4)


def test_prefix_sums_need_hard_gates():
    mixer = layer()
    mixer.pooling = "prefix"
    with pytest.raises(LpaError, match="hard=True"):
        mixer(torch.randn(1, 9, 16))


@settings(max_examples=30, deadline=None)
@given(frames=st.integers(2, 60), seed=st.integers(0, 999))
def test_hard_is_the_limit_of_soft(frames, seed):
    torch.manual_seed(seed)
    x = torch.randn(1, frames, 16)
    valid = torch.ones(1, frames, dtype=torch.bool)
    tau = 0.001
    aperiodic, periodic, positional = shake(Aperiodic(16, 4, 5, 0)), shake(Periodic(16, 4)), shake(Positional(4, 16))
    soft, hard = aperiodic.gates(x, valid, None, tau)[0], aperiodic.gates(x, valid, None, None)[0]
    anchor, shift, half = aperiodic.locate(aperiodic.describe(x, None), valid, tau)
    hard_anchor, _, hard_half = aperiodic.locate(aperiodic.describe(x, None), valid, None)
    clear = (shift.abs() < 1e-6) & (half - hard_half < 1e-6)  # no tie for the centre
    assert (anchor == hard_anchor).all()
    distance = ((torch.arange(frames)[:, None] - anchor).abs() - half).abs()  # of each frame from its window's edge
    away = (distance > 0.02) & clear
    torch.testing.assert_close(
        soft[0][away[0] if away.dim() == 3 else away], hard[0][away[0] if away.dim() == 3 else away]
    )
    period, phase, duty = periodic.predict(x, valid)
    level = torch.cos(2 * math.pi * (torch.arange(frames)[:, None] / period - phase)) - torch.cos(math.pi * duty)
    away = level.abs() > 0.02
    torch.testing.assert_close(periodic.gates(x, valid, tau)[0][away], periodic.gates(x, valid, None)[0][away])
    away = positional.level(frames, None, CPU).abs() > 0.02
    torch.testing.assert_close(
        positional.gates(frames, None, tau, CPU)[away], positional.gates(frames, None, None, CPU)[away]
    )


@settings(max_examples=40, deadline=None)
@given(frames=st.integers(1, 300), seed=st.integers(0, 999))
def test_analytic_segments_are_the_thresholded_cosine(frames, seed):
    torch.manual_seed(seed)
    periodic = shake(Periodic(8, 6), 0.7)
    x, valid = torch.randn(2, frames, 8), torch.ones(2, frames, dtype=torch.bool)
    period, phase, duty = periodic.predict(x, valid)
    t = torch.arange(frames, dtype=torch.float64)[:, None]
    level = torch.cos(2 * math.pi * (t / period.unsqueeze(1) - phase.unsqueeze(1))) - torch.cos(
        math.pi * duty.unsqueeze(1)
    )
    start, end = periodic.segments(x, valid)
    frame = torch.arange(frames).view(1, -1, 1, 1)
    runs = ((frame >= start.unsqueeze(1)) & (frame < end.unsqueeze(1))).sum(-1)
    assert runs.max() <= 1, "runs do not overlap"
    clear = level.abs() > 1e-9
    assert (runs.bool() == (level >= 0))[clear].all()
    assert (periodic.gates(x, valid, None).bool() == (level >= 0))[clear].all()


def test_segment_sums_of_runs_outside_the_recording():
    x = torch.ones(1, 5, 2)
    runs = Segments(torch.tensor([[[-3, 4, 7]]]), torch.tensor([[[2, 9, 8]]]))
    sums, counts = segment_sums(x, runs)
    assert counts.item() == 3
    assert (sums == 3).all()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LPAConfig)])
def test_every_field_is_an_ablation(field):
    """Changing any one field changes the layer's output or what it learns, and the field survives into the layer."""
    changes = {
        "heads": 2, "aperiodic": 0, "periodic": 0, "positional": 0, "anchored": 2, "ladder": 3, "reach": 3, "right": 1,
        "kernel": 3, "bases": 4, "weights": "static", "amplitudes": False, "output_gate": False, "modulation": False,
        "coordination": False, "skip": False, "selective_init": False, "tau": 2.0, "hard": True,
    }  # fmt: skip
    base = {"anchored": 1, "ladder": 2} if field in ("reach", "right") else {}
    if field == "right":  # pulses anchored to the recording look ahead as they like
        base |= {"aperiodic": 0, "periodic": 0, "positional": 0}
    x, passed, skip = torch.randn(1, 30, 16), torch.rand(1, 48), torch.randn(1, 30, 16)

    def run(config):
        torch.manual_seed(3)
        mixer = build("lpa", attention(16, 4), {"reach": 6, **base, **config})
        shapes = {name: p.shape for name, p in mixer.named_parameters()}
        torch.manual_seed(4)
        shake(mixer)
        return mixer(x, None, passed, skip).y, shapes

    assert set(changes) == {f.name for f in dataclasses.fields(LPAConfig)}
    y, shapes = run({})
    changed, changed_shapes = run({field: changes[field]})
    assert shapes != changed_shapes or not torch.allclose(y, changed)


def test_starting_values_are_the_papers():
    source = attention(16, 4)
    mixer = build("lpa", source)
    assert torch.equal(mixer.value.weight, source.v_proj.weight)
    assert torch.equal(mixer.out.weight, source.out_proj.weight)
    assert torch.equal(mixer.aperiodic.mlp[0].weight, source.q_proj.weight[:8])
    x = torch.randn(1, 50, 16)
    gate = mixer.gate(x).sigmoid()
    assert (gate > 0.95).all(), "the output gate starts open"
    period, _, _ = Periodic(16, 12).predict(torch.zeros(1, 5, 16), torch.ones(1, 5, dtype=torch.bool))
    assert period.min().item() == pytest.approx(10, rel=1e-3)
    assert period.max().item() == pytest.approx(512, rel=1e-3)
    passed, skip = torch.rand(1, 48), torch.randn(1, 50, 16)
    assert torch.equal(mixer(x, None, passed, skip).y, mixer(x).y), "coordination and skip start at nothing"
    assert torch.equal(mixer.tilt, torch.zeros(16))


def test_gates_passed_on_are_the_mean_over_own_frames():
    mixer = layer(aperiodic=1, periodic=1, positional=1)
    x, mask = padded([20, 11], 16)
    passed = mixer(x, mask).gates
    assert passed.shape == (2, 12)
    torch.testing.assert_close(passed[1:], mixer(x[1:, :11]).gates, atol=1e-5, rtol=1e-4)
    wide, narrow = layer(coordination=True), torch.rand(2, 3)
    assert wide(x, mask, narrow).y.isfinite().all(), "a layer with fewer pulses may be the one before"


def test_hard_masks_are_made_once_for_a_length_and_anew_for_new_weights():
    positional = Positional(3, 4)
    first = positional.hard_mask(9, 9, CPU)
    assert positional.hard_mask(9, 9, CPU) is first
    with torch.no_grad():
        positional.waves.bias.add_(100)
    assert positional.hard_mask(9, 9, CPU).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_stay_right_at_an_hour(dtype):
    """180,000 frames: gates against the same layer in float64 from the same numbers."""
    frames, dim = 180_000, 8
    torch.manual_seed(0)
    x = torch.randn(1, frames, dim).to(dtype)
    x[0, 150_000:150_040] += 4
    valid = torch.ones(1, frames, dtype=torch.bool)
    periodic, positional, aperiodic = Periodic(dim, 6).to(dtype), Positional(6, 16), Aperiodic(dim, 4, 5, 0)
    exact = copy.deepcopy(periodic).double()
    for tau in (0.5, 0.01):
        off = (exact.gates(x.double(), valid, tau) - periodic.gates(x, valid, tau)).abs().max()
        assert off < 1e-3 / tau, f"off by {off} at tau {tau}"
    assert (periodic.gates(x, valid, None) != exact.gates(x.double(), valid, None)).float().mean() < 1e-4
    got = positional.float().gates(frames, None, 0.5, CPU)
    assert got[0, -1].allclose(positional.gates(1000, None, 0.5, CPU)[0, -1], atol=1e-3), "the ends are the ends"
    h = torch.randn(1, frames, dim // 2).to(dtype)
    aperiodic = aperiodic.to(dtype)
    for tau in (0.5, None):
        anchor, shift, half = aperiodic.locate(h, valid, tau)
        exact_anchor, exact_shift, exact_half = aperiodic.double().locate(h.double(), valid, tau)
        aperiodic = aperiodic.to(dtype)
        centre, exact_centre = anchor + shift, exact_anchor + exact_shift
        assert (centre - exact_centre).abs().max() < 0.05, "of 180,000 frames"
        assert (half / exact_half - 1).abs().max() < 0.01


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 16, 33])
def test_rungs_cover_the_reach_without_overlap(count):
    windows = rungs(count, 64)
    assert len(windows) == count
    assert windows[0] == (0, 1)
    sides = windows if count % 2 else windows[:-1]
    held = [frame for lo, hi in sides for frame in range(lo, hi)]
    assert len(held) == len(set(held))
    if count >= 3:
        assert min(held) == -64
        assert max(held) == 64


def test_anchored_windows_never_leave_their_reach():
    family = Anchored(8, 2, 5, 16)
    with torch.no_grad():
        family.place.weight.normal_(std=50)
    lo, hi = family.edges(torch.randn(2, 40, 8) * 10)
    assert lo.min() >= -16
    assert hi.max() <= 17
    assert (hi - lo >= 1).all()


@pytest.mark.parametrize("name", ["anchored", "ladder"])
def test_windows_of_the_frame_stay_right_at_an_hour(name):
    mixer = shake(build(name, attention(8, 2), {"heads": 2}), 0.1)
    x = torch.randn(1, 180_000, 8) + 3  # a mean makes running sums grow
    y = mixer(x).y
    late = mixer(x[:, -500:]).y
    torch.testing.assert_close(y[:, -300:], late[:, -300:], atol=1e-5, rtol=1e-4)


def test_autocast_does_not_reach_the_gates():
    """Training in bf16 moves no window: what says where a pulse is stays float32."""
    x = torch.randn(2, 300, 16)
    valid = torch.ones(2, 300, dtype=torch.bool)
    h = torch.randn(2, 300, 8)
    aperiodic, periodic, positional = shake(Aperiodic(16, 4, 5, 0)), shake(Periodic(16, 4)), shake(Positional(4, 16))
    anchored = shake(Anchored(16, 2, 5, 16))

    def gates():
        where = torch.stack([a.double() for a in aperiodic.locate(h, valid, 0.5)])
        return where, periodic.gates(x, valid, 0.5), positional.gates(300, None, 0.5, CPU), *anchored.edges(x)

    exact = gates()
    with torch.autocast("cpu", torch.bfloat16):
        trained = gates()
    assert [g.dtype for g in trained] == [g.dtype for g in exact]
    torch.testing.assert_close(trained[0], exact[0], atol=0.01, rtol=0.01)  # the mean it finds there may be bf16
    for a, b in zip(trained[1:], exact[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("frames", [1, 3, 5, 40])
def test_causal_convolution_is_its_sum(frames):
    x, kernel = torch.randn(2, frames, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for t in range(frames):
        for back in range(min(5, t + 1)):
            expected[:, t] += x[:, t - back] * kernel[:, 4 - back]
    torch.testing.assert_close(causal_convolution(x, kernel), expected)
