"""What the tests of mixers share: small attentions, padded batches, comparisons of values and gradients."""

import torch
from torch import Tensor, nn

from lpa.bench import random_attention


def attention(dim: int, heads: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return random_attention(dim, heads)


def shake(mixer: nn.Module, size: float = 0.2) -> nn.Module:
    """Move every parameter off its starting value, so that nothing is hidden by a zero."""
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return mixer


def padded(lengths: list[int], dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of the given lengths, its padding full of large numbers, and its mask."""
    torch.manual_seed(seed)
    frames = max(lengths)
    mask = torch.arange(frames) < torch.tensor(lengths)[:, None]
    x = torch.randn(len(lengths), frames, dim)
    return torch.where(mask.unsqueeze(-1), x, 1e3), mask


def same_values_and_gradients(mixer: nn.Module, fast, slow, x: Tensor, tolerance: float) -> None:
    """Both forms give the same output, and the same gradient of every parameter and of the input."""
    x = x.clone().requires_grad_()
    wanted = [x, *mixer.parameters()]
    names = ["input", *(name for name, _ in mixer.named_parameters())]
    torch.manual_seed(1)
    ys, gradients = [], []
    for form in (fast, slow):
        y = form(x).y
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        ys.append(y)
        gradients.append(torch.autograd.grad((y * probe).sum(), wanted, allow_unused=True))
    torch.testing.assert_close(ys[0], ys[1], atol=tolerance, rtol=tolerance)
    for name, a, b in zip(names, *gradients, strict=True):
        assert (a is None) == (b is None), f"{name} has a gradient in one form only"
        if a is not None:
            size = max(1.0, b.abs().max().item())
            assert (a - b).abs().max().item() <= 10 * tolerance * size, f"gradient of {name} differs"
