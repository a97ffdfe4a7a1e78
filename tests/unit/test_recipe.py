"""Recipes: read, overridden, refused, kept."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lpa import recipe
from lpa.convert.config import read as read_conversion
from lpa.errors import LpaError
from lpa.recipe import Source, TrainConfig

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_toml_and_overrides(tmp_path):
    path = write(tmp_path, 'model = "m"\nlr = 1\n[[sources]]\npath = "{data}/x"\nshare = 2\n[paths]\ndata = "d"\n')
    changes = [
        "steps=7",
        "schedule=linear",
        "speed=[0.5, 2]",
        "paths.data=/e",
        "lr_scale.net.head.*=5",
        'held_out=["1"]',
    ]
    config = recipe.read(path, changes)
    assert (config.steps, config.schedule, config.speed, config.lr) == (7, "linear", (0.5, 2.0), 1.0)
    assert config.sources == (Source("{data}/x", 2.0),)
    assert config.resolve(config.sources[0].path) == "/e/x"
    assert config.lr_scale == {"net.head.*": 5.0}
    assert config.held_out == ("1",)
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_the_environment_says_where_things_are(tmp_path, monkeypatch):
    path = write(tmp_path, 'model = "{models}/m"\n[paths]\nmodels = "here"\n')
    assert recipe.read(path).resolve("{models}/m") == "here/m"
    monkeypatch.setenv("LPA_MODELS", "there")
    assert recipe.read(path).resolve("{models}/m") == "there/m"
    assert recipe.read(path, ["paths.models=given"]).resolve("{models}/m") == "given/m"
    with pytest.raises(LpaError, match=r"nothing says where 'data' is; add --set paths.data=DIR"):
        recipe.read(path).resolve("{data}/x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "m"\nstep = 5', "no key 'step'; have steps"),
        ('model = "m"\nxyzzy = 5', "no key 'xyzzy'; have .*batch_seconds"),
        ('model = "m"\nsteps = 1.5', "steps must be a whole number, not 1.5"),
        ('model = "m"\nlr = "fast"', "lr must be a number, not 'fast'"),
        ('model = "m"\nspeed = 2', "speed must be two numbers, not 2"),
        ('model = "m"\nspeed = [1, 2, 3]', "speed must be two numbers"),
        ('model = "m"\nspeed = [1.1, 0.9]', "speed must be a range"),
        ('model = "m"\nheld_out = "84"', "held_out must be a list, not '84'"),
        ('model = "m"\nschedule = "step"', "no schedule 'step'; have constant, cosine, linear"),
        ('model = "m"\nema = 2', "ema must be between 0 and 1"),
        ('model = "m"\nsteps = 0', "steps must be at least 1"),
        ('model = "m"\nkl_weight = 1', "need a `teacher`"),
        ('model = "m"\nctc_weight = 0', "every loss has weight 0"),
        ('model = "m"\n[[sources]]\npth = "x"', "sources has no key 'pth'; have path"),
        ('model = "m"\n[[sources]]\npath = "x"\nrescan = true', "cannot be a `rescan` one"),
        ("steps = 5", "needs `model`"),
        ('model = "m"\nfamily = "whisper"', "one of the two"),
        ("steps = ", "is not TOML"),
    ],
)
def test_a_bad_recipe_is_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(LpaError, match=message) as caught:
        recipe.read(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_bad_overrides_are_refused(tmp_path):
    path = write(tmp_path, 'model = "m"')
    with pytest.raises(LpaError, match="--set steps: write key=value"):
        recipe.read(path, ["steps"])
    with pytest.raises(LpaError, match="model is no table"):
        recipe.read(path, ["model.x=1"])
    with pytest.raises(LpaError, match="no key 'stepz'; have steps"):
        recipe.read(path, ["stepz=1"])
    with pytest.raises(LpaError, match="no recipe"):
        recipe.read(tmp_path / "none.toml")


def test_a_run_folder_keeps_to_its_config(tmp_path):
    config = TrainConfig(model="m", lr=1e-3)
    recipe.settle(config, tmp_path / "run")
    recipe.settle(dataclasses.replace(config, log_every=3, max_minutes=1.0, paths={"a": "b"}), tmp_path / "run")
    with pytest.raises(LpaError, match=r"differs in seed \(0 there, 1 now\), lr \(0.001 there, 0.5 now\)"):
        recipe.settle(dataclasses.replace(config, lr=0.5, seed=1), tmp_path / "run")


def test_every_option_has_help():
    for cls in (TrainConfig, Source):
        assert all(f.metadata["help"] for f in dataclasses.fields(cls))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_recipes_here_are_whole(path):
    if "recipe" in tomllib.loads(path.read_text()):  # of a conversion
        assert len(read_conversion(str(path), model="m").held_out) == 4
        return
    config = recipe.read(path)
    named = [config.model, config.teacher, *(s.path for s in config.sources)]
    assert all("{" not in config.resolve(p) for p in named)
    assert len(config.held_out) == 4


def test_there_are_recipes():
    assert {"whisper-base-ctc", "wav2vec2-12"} <= {p.stem for p in RECIPES}


def test_reading_a_recipe_needs_no_torch():
    code = "import sys, lpa.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
