"""Muon, for the matrices inside a model's layers: a step turns them by the same amount in every direction."""

from __future__ import annotations

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch's Muon with matrices of one shape taken together: on a GPU a step is some hundred kernels, not thousands.

    A rate means what AdamW's does: an update has the size that AdamW's usually has.
    """

    def __init__(self, params, lr: float, weight_decay: float = 0.0):
        super().__init__(params, lr, weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, same in shapes.items():
                update = orthogonal(self.direction(same, group["momentum"]), group["ns_coefficients"])
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(same, list(update.to(same[0].dtype).unbind()), alpha=-rate)

    def direction(self, same: list[Tensor], momentum: float) -> Tensor:
        """(N, R, C): where Nesterov's momentum points."""
        gradients = [p.grad for p in same if p.grad is not None]
        averages = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in same]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        return torch.stack(torch._foreach_lerp(gradients, averages, momentum))


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int = 5) -> Tensor:
    """(N, R, C), each matrix with all its singular values made about 1, by Newton and Schulz's iteration."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x.bfloat16() if x.is_cuda else x.float()
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
