"""What `make demo` shows, with a model and without one."""

import io
import re

import pytest
import torch
from rich.console import Console
from tiny_models import make

from lpa import demo
from lpa.errors import LpaError
from lpa.surgery import save, swap


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200, highlight=False)


def test_without_a_model(console, tmp_path):
    demo.main(console, tmp_path / "nowhere")
    text = console.file.getvalue()
    assert "There is no trained model in models/ yet: this shows the layer at work on a small random model" in text
    costs = {name: int(cost) for name, cost in re.findall(r"│ (\w+) +│.*│ +(\d+) │\n", text)}
    assert set(costs) == {"attention", "pyramid", "window", "ladder", "lpa"}
    assert min(costs, key=costs.get) == "lpa"
    assert max(costs, key=costs.get) == "attention"
    assert "the same to the last bit" in text
    assert "lpa inspect" in text


def test_with_a_model(console, tmp_path):
    """The transcripts are those of the model as it is and of the model swapped by hand."""
    model = make("whisper", max_source_positions=400)
    torch.nn.init.normal_(model.net.head.weight)  # loud enough that frames say different things
    folder = save(model, tmp_path / "model")
    demo.main(console, folder)
    text = console.file.getvalue()
    assert "no trained model" not in text
    utterance = demo.clip()
    samples = demo.hear(utterance)
    before = demo.transcribe(model, samples)
    for site in model.sites():
        swap(model, site, "pyramid")
    after = demo.transcribe(model, samples)
    assert before != after
    shown = " ".join(re.sub(r"\s+", " ", text).split())
    for label, words in (("reference", utterance.text), ("attention", before), ("pyramid", after)):
        assert f"{label} {words[:80]}" in shown
    assert text.count("real-time factor") == 2
    assert len(re.findall(r"│ attention │ +\d+ │ pyramid │ +\d+ │", text)) == 2  # its two layers


def test_the_clip_is_in_the_repository():
    utterance = demo.clip()
    assert utterance.text.startswith("and mister john dashwood")
    assert demo.hear(utterance).shape == (1, 113600)


def test_outside_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "CLIPS", tmp_path / "manifest.jsonl")
    with pytest.raises(LpaError, match="run the demo in a clone"):
        demo.clip()


def test_a_model_without_a_head(console, tmp_path):
    folder = save(make("whisper", max_source_positions=400, head=False), tmp_path / "model")
    with pytest.raises(LpaError, match="no CTC head"):
        demo.main(console, folder)
