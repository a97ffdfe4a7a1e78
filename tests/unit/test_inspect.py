import io
import json

import pytest
from rich.console import Console
from tiny_models import CASES, make

from lpa.inspect import attention_mflop, describe, render
from lpa.mixers import MIXERS
from lpa.surgery import mixer_at, swap


def test_attention_cost_is_the_known_figure():
    """At width 768: 4.7 MFLOP a frame for the projections, 1.5 more for every 500 frames."""
    assert attention_mflop(768, 0) == pytest.approx(4.7, abs=0.05)
    assert attention_mflop(768, 500) - attention_mflop(768, 0) == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_describe_every_mixer(mixer):
    model = make("wav2vec2")
    attention = describe(model)
    swap(model, 1, mixer)
    facts = json.loads(json.dumps(describe(model)))
    kept, new = facts["layers"]
    assert kept == attention["layers"][0]
    assert (kept["mixer"], new["mixer"]) == ("attention", mixer)
    assert facts["replaced"] == 1
    assert new["mflop_per_second"]["10"] == pytest.approx(mixer_at(model, 1).mflop_per_frame() * 50, abs=1e-3)
    assert new["parameters"] == sum(p.numel() for p in mixer_at(model, 1).parameters())
    assert facts["parameters"] == sum(p.numel() for p in model.net.parameters())
    assert kept["mflop_per_second"]["60"] > 3 * kept["mflop_per_second"]["10"]
    assert kept["reach"] is None


@pytest.mark.parametrize("case", CASES)
def test_render(case):
    model = make(case)
    swap(model, 0, "conv")
    console = Console(width=120, file=io.StringIO())
    console.print(render(describe(model)))
    text = console.file.getvalue()
    assert "1 of 2 attention layers replaced" in text
    assert "−15 +15" in text
    assert "all of them" in text
    assert model.family in text
