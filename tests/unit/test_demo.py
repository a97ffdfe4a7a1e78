"""What `make demo` shows: the built-in model at work on a bundled clip."""

import io
import re

import pytest
from rich.console import Console

from lpa import demo, transcribe
from lpa.errors import LpaError


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200, highlight=False)


def test_the_built_in_model_hears_the_clip(console):
    demo.main(console)
    text = console.file.getvalue()
    utterance = demo.clip()
    heard = transcribe.transcribe("default", utterance.audio).text
    shown = " ".join(text.split())
    assert f"reference {utterance.text[:80]}" in shown
    assert f"heard {heard[:80]}" in shown
    wrong, words = map(int, re.search(r"(\d+) of (\d+) words wrong", text).groups())
    assert words == len(utterance.text.split())
    assert wrong <= words // 3
    assert "real-time factor" in text
    costs = re.findall(r"│ attention │ +([\d,]+) │ pyramid │ +([\d,]+) │", text)
    assert len(costs) == 6
    assert all(int(was.replace(",", "")) > int(now.replace(",", "")) for was, now in costs)
    assert "lpa transcribe" in text


def test_the_clip_is_in_the_repository():
    utterance = demo.clip()
    assert utterance.text.startswith("and mister john dashwood")


def test_outside_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "CLIPS", tmp_path / "manifest.jsonl")
    with pytest.raises(LpaError, match="run the demo in a clone"):
        demo.clip()
