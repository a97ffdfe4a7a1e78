"""The stages as data: what each trains at which rate, the recipes, the ablation's rows."""

import json

import pytest
from tiny_models import make

from lpa.convert.ablate import SWITCHES, ablate, rows
from lpa.convert.config import ConvertConfig, build, read, settle
from lpa.convert.stages import (
    Stage,
    final_stages,
    fix_temperature,
    norm_parameters,
    parameter_groups,
    rates,
    set_temperature,
    step_stages,
)
from lpa.errors import LpaError
from lpa.surgery import mixer_at, restore, save, swap

GIVEN = {"model": "m", "sources": ["d"], "held_out": ["a"]}


def paper(**changes) -> ConvertConfig:
    return read("paper", **GIVEN, **changes)


def test_the_paper_is_algorithm_one():
    config = paper()
    warm, settle_, align = step_stages(config)
    (final,) = final_stages(config)
    assert (config.lr, config.warmup) == (5e-4, 0.1)
    assert [(s.name, s.epochs) for s in (warm, settle_, align, final)] == [
        ("warm", 2),
        ("settle", 8),
        ("align", 5),
        ("final", 8),
    ]
    assert (warm.losses, settle_.losses, align.losses) == ((("mse", 1.0),), (("ctc", 1.0),), (("ctc", 1.0),))
    assert dict(settle_.trains) == {"mixer": 1.0, "norms": 1.0, "ffn": 0.1, "rest": 0.0}
    assert "ffn" not in dict(align.trains)
    assert (settle_.rate, align.rate, final.rate) == (1.0, 0.5, 0.2)
    assert (settle_.scope, align.scope, final.scope) == ("new", "replaced", "replaced")
    assert (settle_.tau, align.tau) == ((3.0, 0.5), (3.0, 0.5))
    assert (settle_.revert, align.revert, final.revert) == (False, True, False)


def test_best_distils_and_none_does_not_train():
    best = read("best", **GIVEN)
    (only,) = step_stages(best)
    assert {name for name, _ in only.losses} == {"ctc", "kl", "hidden"}
    assert not best.progressive
    none = read("none", model="m")
    assert not none.trains
    assert step_stages(none) == final_stages(none) == ()


def test_the_control_has_the_same_stages_but_no_imitation_of_itself():
    stages = step_stages(paper(keep_attention=True))
    assert stages == step_stages(paper())[1:]


@pytest.mark.parametrize("case", ["wav2vec2", "hubert-stable", "wavlm", "data2vec-audio", "whisper"])
def test_only_the_parts_a_stage_names_are_trained(case):
    model = make(case, layers=3)
    locked = {n for n, p in model.named_parameters() if not p.requires_grad}
    swap(model, 1, "lpa")
    site = f"net.{model.sites()[1].path}."
    block = site.removesuffix(".").rpartition(".")[0] + "."
    norms = {n for n in norm_parameters(model) if n.startswith(block)}
    mixer = {n for n, _ in model.named_parameters() if n.startswith(site + "mixer.")}
    ffn = {n for n, _ in model.named_parameters() if n.startswith(block) and not n.startswith(site)} - norms
    assert len(norms) == 4  # two norms, weight and bias
    assert len(ffn) == 4  # two linear layers
    assert len(mixer) > 10
    found = rates(model, step_stages(paper())[1], [1], locked)
    assert found == {**dict.fromkeys(mixer | norms, 1.0), **dict.fromkeys(ffn, 0.1)}
    found = rates(model, step_stages(paper())[2], [1], locked)
    assert found == dict.fromkeys(mixer | norms, 0.5)
    everything = rates(model, step_stages(read("best", **GIVEN))[0], [1], locked)
    front = {n for n, _ in model.named_parameters() if "feature_extractor." in n}
    assert set(everything) == {n for n, _ in model.named_parameters()} - locked - front
    assert {everything[n] for n in set(everything) - mixer - norms} == {0.3}


@pytest.mark.parametrize("case", ["wav2vec2", "whisper"])
def test_the_control_trains_the_attention_where_a_conversion_trains_the_mixer(case):
    """Exactly: the same names, but for those inside the site."""
    converted, control = make(case, layers=3), make(case, layers=3)
    locked = {n for n, p in control.named_parameters() if not p.requires_grad}
    for index in (0, 2):
        swap(converted, index, "pyramid")
    sites = [f"net.{converted.sites()[i].path}." for i in (0, 2)]
    for stage in (*step_stages(paper())[1:], *final_stages(paper()), *step_stages(read("best", **GIVEN))):
        theirs, mine = (rates(m, stage, [0, 2], locked) for m in (converted, control))
        outside = [{n: r for n, r in f.items() if not n.startswith(tuple(sites))} for f in (theirs, mine)]
        assert outside[0] == outside[1]
        assert len(outside[0]) >= 8
        attention = {n for n, _ in control.named_parameters() if n.startswith(tuple(sites))}
        assert {n for n in mine if n.startswith(tuple(sites))} == attention
        assert {mine[n] for n in attention} == {theirs[n] for n in theirs if n.startswith(tuple(sites))}


def test_layer_1_is_not_layer_11():
    model = make("wav2vec2", layers=12)
    found = rates(model, step_stages(paper())[1], [1])
    assert found
    assert all(".layers.1." in name for name in found)


def test_unknown_parts_are_named():
    with pytest.raises(LpaError, match="trains heads"):
        rates(make("wav2vec2"), Stage("odd", 1.0, (("heads", 1.0),), ()), [0])


def test_groups_have_the_rates_and_no_decay_on_vectors():
    model = make("wav2vec2")
    scales = rates(model, step_stages(paper())[1], [0])
    groups = parameter_groups(model, scales, 0.01)
    assert sum(len(g["params"]) for g in groups) == len(scales)
    assert {(g["scale"], g["weight_decay"]) for g in groups} == {(1.0, 0.0), (1.0, 0.01), (0.1, 0.0), (0.1, 0.01)}
    assert all((p.ndim > 1) == bool(g["weight_decay"]) for g in groups for p in g["params"])


def test_temperatures_are_set_on_pulses_and_saved_with_the_model(tmp_path):
    model = make("wav2vec2")
    swap(model, 0, "lpa")
    swap(model, 1, "pyramid")
    set_temperature([mixer_at(model, 0), mixer_at(model, 1)], 3.0)
    assert mixer_at(model, 0).tau == 3.0
    fix_temperature(model, [0, 1], 0.25)
    save(model, tmp_path / "m")
    assert mixer_at(restore(tmp_path / "m"), 0).tau == 0.25
    assert "tau" not in model.swaps[1].config


def test_a_recipe_has_settings_for_its_mixer_alone():
    best = read("best", **GIVEN)
    assert best.mixer_config["block"] == 128
    assert read("best", ["mixer_config.right=3"], **GIVEN).mixer_config == {**best.mixer_config, "right": 3}
    assert read("best", ["mixer_config.side=3"], **GIVEN, mixer="window").mixer_config == {"side": 3}
    several = read("best", **GIVEN, mixer="pyramid,window")
    assert (several.settings("pyramid"), several.settings("window")) == (best.mixer_config, {})


def test_recipes_take_overrides_and_know_their_keys(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "best"\nlr = 1e-3\nlayers = 3\n[mixer_config]\nblock = 16\n')
    config = read(str(path), ["settle_epochs=3.0", "train.noise=0.5"], **GIVEN, layers=None)
    assert (config.lr, config.layers, config.settle_epochs, config.kl_weight) == (1e-3, 3, 3.0, 1.0)
    assert config.mixer_config == {"block": 16}
    assert config.training(7).noise == 0.5
    for wrong, says in (
        ("settel_epochs=1", "no key 'settel_epochs'; have settle_epochs"),
        ("lr=fast", "lr must be a number"),
        ("train.nois=1.0", "no key 'nois'"),
        ("train.lr=1.0", "train.lr: the conversion decides this"),
        ("tau=[0.0, 1.0]", "tau must be two positive"),
        ("shares=[1.0, 2.0]", "as many shares"),
    ):
        with pytest.raises(LpaError, match=says):
            read("paper", [wrong], **GIVEN)
    with pytest.raises(LpaError, match="no recipe 'papr'; have best, none, paper"):
        read("papr", **GIVEN)
    assert read("paper", model="m", sources=["d"]).held_out == ()  # who is held out, the data decides
    for budget in (0.0, -1.0, float("nan")):
        with pytest.raises(LpaError, match="--budget must be above 0"):
            read("paper", **GIVEN, budget=budget)
        if budget:
            with pytest.raises(LpaError, match="budget must be 0"):
                read("paper", [f"budget={budget}"], **GIVEN)


def test_a_plan_leaves_nothing_else_to_say_what_goes_where():
    assert read("best", ["lr=1e-3"], **GIVEN, plan="choice.json").plan == "choice.json"
    with pytest.raises(LpaError, match=r"leave out --layers, --mixer, --set order=depth, --set mixer_config.block=16$"):
        read("best", ["order=depth", "mixer_config.block=16"], **GIVEN, plan="p", layers=2, mixer="window")


def test_a_folder_belongs_to_one_run(tmp_path):
    config = paper(train={"noise": 0.1, "log_every": 5})
    settle(config, tmp_path)
    settle(paper(train={"noise": 0.1, "log_every": 9}, max_minutes=3.0), tmp_path)  # changes no result
    two, same, other = (read("paper", **{**GIVEN, "held_out": names}) for names in (["b", "a"], ["a", "b"], ["a", "c"]))
    settle(two, tmp_path / "two")
    settle(same, tmp_path / "two")  # in whichever order they are named
    with pytest.raises(LpaError, match="differs in held_out"):
        settle(other, tmp_path / "two")
    with pytest.raises(LpaError, match=r"differs in lr \(0.0005 there, 0.1 now\)"):
        settle(paper(train={"noise": 0.1}, lr=0.1), tmp_path)
    with pytest.raises(LpaError, match="differs in train"):
        settle(paper(train={"noise": 0.2}), tmp_path)
    assert build(ConvertConfig, json.loads((tmp_path / "config.json").read_text())).fixed() == config.fixed()


def test_the_ablation_is_of_the_papers_pulses(tmp_path):
    with pytest.raises(LpaError, match=r"the mixer lpa, and not pyramid; start from --recipe paper"):
        ablate(read("best", **GIVEN), tmp_path / "ablation")
    assert not (tmp_path / "ablation").exists()


def test_the_ablation_adds_one_switch_a_row():
    config = paper(layers=8)
    table = rows(config)
    assert [name for name, _ in table] == ["naive", *(f"+ {name}" for name, _ in SWITCHES)]
    naive, whole = table[0][1], table[-1][1]
    assert whole == config
    off = {"selective_init": False, "aperiodic": 12, "periodic": 0, "positional": 0, "skip": False, "heads": 1}
    assert naive.mixer_config == off
    assert (naive.norms, naive.ffn, naive.align_epochs, naive.tau, naive.order) == (0, 0, 0, (0.5, 0.5), "depth")
    for (_, before), (_, after), (_, switch) in zip(table, table[1:], SWITCHES, strict=False):
        one, two = before.to_dict(), after.to_dict()
        assert {key for key in one if one[key] != two[key]} == set(switch)
