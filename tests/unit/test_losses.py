"""Losses against their definitions, written out with loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from lpa import losses
from lpa.errors import LpaError


def naive_ctc(log_probs: torch.Tensor, target: list[int], blank: int) -> float:
    """-log of the summed probability of every frame labelling that spells the target."""
    frames, symbols = log_probs.shape
    total = 0.0
    for labels in itertools.product(range(symbols), repeat=frames):
        collapsed = [label for label, _ in itertools.groupby(labels) if label != blank]
        if collapsed == target:
            total += math.exp(sum(log_probs[t, label].item() for t, label in enumerate(labels)))
    return -math.log(total)


def test_ctc_is_the_mean_of_every_spelling():
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 4, requires_grad=True)
    frames, targets, lengths = torch.tensor([5, 6]), torch.tensor([[1, 1, 0], [2, 3, 1]]), torch.tensor([2, 3])
    part = losses.ctc(logits, frames, targets, lengths, 0, torch.ones(2))
    log_probs = logits.detach().double().log_softmax(-1)
    naive = [naive_ctc(log_probs[0, :5], [1, 1], 0) / 2, naive_ctc(log_probs[1], [2, 3, 1], 0) / 3]
    assert (part.sum / part.count).item() == pytest.approx(sum(naive) / 2, rel=1e-5)
    mean = F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), targets, frames, lengths, reduction="mean")
    torch.testing.assert_close(part.sum / part.count, mean)
    part.sum.backward()
    assert logits.grad[0, 5].abs().max() == 0  # a frame that is not its own


def test_ctc_leaves_out_what_has_no_weight_and_what_cannot_be_spelt():
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 4, requires_grad=True)
    frames, targets, lengths = torch.tensor([4, 4, 2]), torch.tensor([[1, 2], [2, 3], [1, 1]]), torch.tensor([2, 2, 2])
    part = losses.ctc(logits, frames, targets, lengths, 0, torch.tensor([1.0, 0.0, 1.0]))
    alone = losses.ctc(logits[:1], frames[:1], targets[:1], lengths[:1], 0, torch.ones(1))
    torch.testing.assert_close(part.sum, alone.sum)
    assert part.count == 2
    part.sum.backward()
    assert logits.grad[1].abs().max() == 0
    assert torch.isfinite(logits.grad).all()


def test_kl_is_that_of_every_own_frame():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 6, 3)
    part = losses.posterior_kl(student, teacher, torch.tensor([5, 3]), torch.tensor([6, 4]), 2.0, torch.ones(2))
    total = 0.0
    for row, frames in ((0, 5), (1, 3)):
        for t in range(frames):
            p, q = (teacher[row, t] / 2).softmax(-1), (student[row, t] / 2).softmax(-1)
            total += sum(p[v] * (p[v].log() - q[v].log()) for v in range(3)).item() * 4
    assert part.count == 8
    assert part.sum.item() == pytest.approx(total, rel=1e-5)
    part.sum.backward()
    assert student.grad[1, 3:].abs().max() == 0
    same = losses.posterior_kl(teacher, teacher, *[torch.tensor([6, 4])] * 2, 1.0, torch.ones(2))
    assert same.sum.abs() < 1e-5


def test_consistency_pulls_each_towards_the_other_as_it_is():
    logits = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    lengths, weights = torch.tensor([5, 3, 5, 3]), torch.tensor([1.0, 1.0, 1.0, 1.0])
    part = losses.consistency(logits, lengths, weights)
    q, total = logits.detach().log_softmax(-1), 0.0
    for one, other in ((0, 2), (2, 0), (1, 3), (3, 1)):
        for frame in range(int(lengths[one])):
            p = q[other, frame]
            total += (p.exp() * (p - q[one, frame])).sum().item()
    assert part.sum.item() == pytest.approx(total, rel=1e-5)
    assert part.count.item() == 16
    part.sum.backward()
    expected = q.exp() - q[[2, 3, 0, 1]].exp()  # of a KL by its second argument's logits
    own = (torch.arange(5) < lengths[:, None]).unsqueeze(-1)
    torch.testing.assert_close(logits.grad, expected * own)


def test_hidden_error_is_relative_to_the_teachers_variance():
    torch.manual_seed(0)
    teacher = [torch.randn(2, 5, 4) * 3 + 1 for _ in range(3)]
    student = [t + torch.randn_like(t) for t in teacher]
    lengths = torch.tensor([5, 2])
    part = losses.hidden_error(student, teacher, lengths, lengths, torch.ones(2))
    total = 0.0
    for s, t in zip(student, teacher, strict=True):
        for row, frames in enumerate(lengths.tolist()):
            own = t[row, :frames]
            variance = ((own - own.mean(0)) ** 2).mean()
            total += sum(((s[row, f] - t[row, f]) ** 2).mean() / variance for f in range(frames)).item() / 3
    assert part.count == 7
    assert part.sum.item() == pytest.approx(total, rel=1e-5)


def test_hidden_states_are_the_same_whatever_shares_the_batch():
    torch.manual_seed(0)
    teacher, student = [torch.randn(3, 5, 4)], [torch.randn(3, 5, 4)]
    lengths = torch.tensor([5, 3, 4])
    whole = losses.hidden_error(student, teacher, lengths, lengths, torch.ones(3))
    rows = [
        losses.hidden_error(
            [student[0][i : i + 1]], [teacher[0][i : i + 1]], lengths[i : i + 1], lengths[i : i + 1], one
        )
        for i, one in enumerate(torch.ones(3, 1))
    ]
    torch.testing.assert_close(whole.sum, torch.stack([r.sum for r in rows]).sum())


@pytest.mark.parametrize("width", [3, 4, 6])
def test_what_the_heads_read_is_compared_at_any_width(width):
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 6, 4), torch.randn(2, 5, width, requires_grad=True)
    lengths, fewer = torch.tensor([6, 3]), torch.tensor([5, 3])
    part = losses.reading_error(student, teacher, fewer, lengths, torch.ones(2))
    seen, target = student.detach(), teacher[:, :5]
    if width < 4:
        target = target @ losses.projection(4, width)
    if width > 4:
        seen = seen @ losses.projection(width, 4)
    expected = losses.hidden_error([seen], [target], fewer, fewer, torch.ones(2))
    torch.testing.assert_close((part.sum, part.count), (expected.sum, expected.count))
    part.sum.backward()
    assert student.grad[1, 3:].abs().max() == 0
    assert student.grad[1, :3].abs().min() > 0


def test_models_that_cannot_be_compared_are_refused():
    lengths, one = torch.tensor([9]), torch.ones(1)
    with pytest.raises(LpaError, match="9 frames where the teacher gives 6"):
        losses.posterior_kl(torch.randn(1, 9, 3), torch.randn(1, 6, 3), lengths, lengths, 1.0, one)
    with pytest.raises(LpaError, match="2 layers of 4 in the student, 1 layers of 4 in the teacher"):
        losses.hidden_error([torch.randn(1, 9, 4)] * 2, [torch.randn(1, 9, 4)], lengths, lengths, one)
