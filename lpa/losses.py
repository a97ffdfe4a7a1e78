"""The training losses. Each gives a sum and a count, so that several processes can share one average."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import LpaError

MOST_FRAMES_APART = 2  # two models of one frame rate round an utterance's end differently, by this much at most


@dataclass(frozen=True)
class Part:
    """A sum and the number of things summed; sum / count is the mean."""

    sum: Tensor
    count: Tensor


def ctc(logits: Tensor, frames: Tensor, targets: Tensor, target_lengths: Tensor, blank: int, weights: Tensor) -> Part:
    """CTC loss per utterance divided by its transcript's length: sum / count is PyTorch's reduction="mean".

    logits (B, T, V), targets (B, L); frames and target_lengths (B,), on the CPU if the device is not to be waited for;
    weights (B,): 0 leaves an utterance out.
    """
    log_probs = logits.float().log_softmax(-1).transpose(0, 1)  # (T, B, V)
    losses = F.ctc_loss(log_probs, targets, frames, target_lengths, blank, reduction="none", zero_infinity=True)  # (B,)
    lengths = target_lengths.clamp(min=1).to(losses.device, non_blocking=True)
    return Part((losses / lengths * weights).sum(), weights.sum())


def posterior_kl(
    student: Tensor,
    teacher: Tensor,
    student_lengths: Tensor,
    teacher_lengths: Tensor,
    temperature: float,
    weights: Tensor,
) -> Part:
    """KL(teacher | student) of every own frame, at a temperature (times its square, so that gradients keep their size).

    student (B, T, V) and teacher (B, T', V) logits; where they differ by a frame or two the shorter counts.
    """
    student, teacher, mask = align(student, teacher, student_lengths, teacher_lengths)
    p = (teacher.float() / temperature).log_softmax(-1)
    q = (student.float() / temperature).log_softmax(-1)
    kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)  # (B, T)
    mask = mask * weights.unsqueeze(1)
    return Part((kl * mask).sum() * temperature**2, mask.sum())


def consistency(logits: Tensor, lengths: Tensor, weights: Tensor) -> Part:
    """KL of every own frame towards what is said of the same utterance otherwise augmented, which is taken as given.

    logits (2B, T, V): the same B utterances twice.
    """
    other = logits.detach().roll(len(logits) // 2, 0)
    return posterior_kl(logits, other, lengths, lengths, 1.0, weights)


def hidden_error(
    student: list[Tensor], teacher: list[Tensor], student_lengths: Tensor, teacher_lengths: Tensor, weights: Tensor
) -> Part:
    """Squared error of hidden states over the teacher's variance, averaged over layers, for every own frame.

    The variance is taken over each utterance's own frames, so that it depends on nothing else in the batch.
    """
    if not student or len(student) != len(teacher) or student[0].shape[-1] != teacher[0].shape[-1]:
        raise LpaError(
            f"hidden states cannot be compared: {_shape(student)} in the student, {_shape(teacher)} in the teacher; "
            "set hidden_weight to 0"
        )
    pairs = [align(s, t, student_lengths, teacher_lengths) for s, t in zip(student, teacher, strict=True)]
    mask = pairs[0][2] * weights.unsqueeze(1)  # (B, T)
    errors = torch.stack([_relative_error(s, t, own) for s, t, own in pairs]).mean(0)  # (B, T)
    return Part((errors * mask).sum(), mask.sum())


def reading_error(
    student: Tensor, teacher: Tensor, student_lengths: Tensor, teacher_lengths: Tensor, weights: Tensor
) -> Part:
    """The same for what the two heads read: (B, T, D) and (B, T', D'), the wider seen through a fixed projection."""
    student, teacher, mask = align(student, teacher, student_lengths, teacher_lengths)
    narrow, wide = sorted((student.shape[-1], teacher.shape[-1]))
    if narrow < wide:
        project = projection(wide, narrow).to(teacher.device, teacher.dtype)
        student, teacher = (x @ project if x.shape[-1] == wide else x for x in (student, teacher))
    mask = mask * weights.unsqueeze(1)  # (B, T)
    return Part((_relative_error(student, teacher, mask) * mask).sum(), mask.sum())


@lru_cache(maxsize=4)
def projection(wide: int, narrow: int) -> Tensor:
    """(wide, narrow): orthonormal columns of random direction, the same ones always. It keeps most of any distance."""
    random = torch.randn(wide, narrow, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(random)[0].float()


def _relative_error(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """(B, T): squared error of every frame, over the variance of the teacher's own frames."""
    student, teacher, own = student.float(), teacher.float(), mask.unsqueeze(-1)  # (B, T, D), (B, T, D), (B, T, 1)
    frames = own.sum(1, keepdim=True).clamp(min=1)  # (B, 1, 1)
    mean = (teacher * own).sum(1, keepdim=True) / frames  # (B, 1, D)
    variance = ((teacher - mean) ** 2 * own).sum((1, 2), keepdim=True) / (frames * teacher.shape[-1])  # (B, 1, 1)
    return ((student - teacher) ** 2).mean(-1) / variance.squeeze(-1).clamp(min=1e-8)


def align(
    student: Tensor, teacher: Tensor, student_lengths: Tensor, teacher_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Both (B, T, ·) cut to the shorter of the two, and the mask (B, T) of frames that are own in both."""
    frames = min(student.shape[1], teacher.shape[1])
    if abs(student.shape[1] - teacher.shape[1]) > MOST_FRAMES_APART:
        raise LpaError(
            f"the student gives {student.shape[1]} frames where the teacher gives {teacher.shape[1]}; "
            "choose a teacher with the same frame rate"
        )
    lengths = torch.minimum(student_lengths, teacher_lengths)
    mask = torch.arange(frames, device=student.device) < lengths.unsqueeze(1)  # (B, T)
    return student[:, :frames], teacher[:, :frames], mask.float()


def _shape(states: list[Tensor]) -> str:
    return f"{len(states)} layers of {states[0].shape[-1]}" if states else "none"
