import pytest
import torch

from lpa.muon import Muon, orthogonal

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(4, 24, 48), (3, 16, 48), (2, 48, 16)])
def test_all_singular_values_become_about_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before, after = torch.linalg.svdvals(x), torch.linalg.svdvals(orthogonal(x, COEFFICIENTS))
    assert (before.amax(1) / before.amin(1)).min() > 2
    assert after.min() > 0.5
    assert after.max() < 1.3


def test_it_steps_as_torch_does():
    """Which takes one matrix at a time, in bfloat16."""
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((12, 8), (12, 8), (8, 12), (10, 10))]
    runs = []
    for make in (
        lambda p: Muon(p, 0.02, 0.1),
        lambda p: torch.optim.Muon(p, 0.02, 0.1, adjust_lr_fn="match_rms_adamw"),
    ):
        parameters = [torch.nn.Parameter(x.clone()) for x in start]
        parameters.append(torch.nn.Parameter(torch.ones(3, 3)))  # never has a gradient
        optimizer, generator = make(parameters), torch.Generator().manual_seed(1)
        for _ in range(3):
            for p in parameters[:-1]:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        runs.append([p.detach() for p in parameters])
    for mine, theirs, old in zip(*runs, [*start, torch.ones(3, 3)], strict=True):
        moved = (theirs - old).norm()
        assert (mine - theirs).norm() <= 0.02 * moved
    assert torch.equal(runs[0][-1], torch.ones(3, 3))
