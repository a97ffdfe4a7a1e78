"""What the README tells a reader to type works, and the files and commands it names are those there are."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TESTED = re.findall(r"^<!-- tested -->\n```(\w+)\n(.*?)^```$", README, re.M | re.S)
sys.path.append(str(ROOT / "tests" / "unit"))  # for the small models


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """Where a reader would type: the repository's data, the `lpa` command, a small model under the README's hub id."""
    from tiny_models import make

    desk = tmp_path_factory.mktemp("desk")
    model = make("wav2vec2")
    hub = desk / "facebook" / "wav2vec2-base-960h"
    model.net.save_pretrained(hub)
    (hub / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(model.tokens.symbols)}))
    (hub / "preprocessor_config.json").write_text('{"do_normalize": true}')
    (desk / "tests").symlink_to(ROOT / "tests")
    command = desk / "bin" / "lpa"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lpa "$@"\n')
    command.chmod(0o755)
    return desk


def test_blocks_run_in_order(desk):
    path = os.pathsep.join([str(desk / "bin"), os.environ["PATH"]])
    found = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": found, "HF_HUB_OFFLINE": "1"}
    assert [language for language, _ in TESTED] == ["python", "sh"]
    for language, block in TESTED:
        run = [sys.executable, "-c"] if language == "python" else ["sh", "-ec"]
        done = subprocess.run([*run, block], cwd=desk, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    plan = json.loads((desk / "runs" / "pyramid" / "plan.json").read_text())
    assert [swap["mixer"] for swap in plan["swaps"]] == ["pyramid", "pyramid"]
    sizes = [(desk / "runs" / name / "weights.safetensors").stat().st_size for name in ("pyramid", "pyramid-int8")]
    assert sizes[1] < sizes[0]


def test_the_file_map_is_complete():
    mapped = README.split("## Where things are")[1].split("## Limits")[0]
    named = re.findall(r"^ +([\w./]+)  ", mapped, re.M)
    files = {name for name in named if name.endswith(".py")}
    there = {path.name for path in (ROOT / "lpa").rglob("*.py") if not path.name.startswith("__")}
    assert files == there
    folders = {name.rstrip("/") for name in named if name.endswith("/")} - {"results"}  # made by the first record
    assert {"mixers", "families"} <= folders
    assert all((ROOT / name).is_dir() or (ROOT / "lpa" / name).is_dir() for name in folders)


def test_every_command_and_option_exists():
    lines = re.findall(r"^(?:accelerate launch -m )?lpa ([^#\n]+)", README, re.M)
    assert len(lines) >= 8
    for line in lines:
        words = line.split()
        verb = words[: 2 if words[0] in ("data", "bench") else 1]
        text = subprocess.run(
            [sys.executable, "-m", "lpa", *verb, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert text.returncode == 0, line
        assert all(option in text.stdout for option in words if option.startswith("--")), line


def test_make_targets_and_extras_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make (\w+)", README, re.M)) == {"demo", "test"} <= targets
    extras = set(re.findall(r"pip install '\.\[(\w+)\]'", README))
    assert extras
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)


def test_every_mixer_is_named():
    from lpa.mixers import MIXERS

    table = README.split("| mixer | its windows")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(MIXERS)


def test_recipes_named_are_there():
    assert all((ROOT / name).is_file() for name in re.findall(r"recipes/[\w-]+\.toml", README))
