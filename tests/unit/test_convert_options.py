"""What a conversion can be asked for: mixers that differ by layer, no positions, minutes, a front end heard once.

And what it does unasked: speakers held out, a folder for one run at a time.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from lpa import families
from lpa.convert import order
from lpa.convert.config import ConvertConfig, read
from lpa.convert.control import control_config
from lpa.convert.loop import convert
from lpa.convert.positions import diagonal_sums, inputs_of, scores_of_distances, told_by_position, without_positions
from lpa.convert.session import CLAIM, HELD_OUT_WORDS, Claim, Session, held_out_of, started
from lpa.errors import LpaError
from lpa.mixers.attention import Pyramid, PyramidConfig, Window, WindowConfig
from lpa.mixers.base import projections
from lpa.surgery import mixer_at, save
from lpa.windows import PACE

WHISPER = {
    "d_model": 16, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 20,
    "max_source_positions": 200,
}  # fmt: skip
WAV2VEC2 = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "conv_dim": [8] * 7,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
ONE_STAGE = {"warm_epochs": 0.0, "settle_epochs": 1.0, "align_epochs": 0.0, "final_epochs": 0.0}


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A tiny model of each family, and nine short recordings by three speakers."""
    torch.set_num_threads(1)
    desk = tmp_path_factory.mktemp("desk")
    for name, family, config in (("whisper", "whisper", WHISPER), ("wav2vec2", "wav2vec2", WAV2VEC2)):
        torch.manual_seed(0)
        model = families.create(family, config)
        with torch.no_grad():
            for parameter in model.net.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        save(model, desk / name)
    rng = np.random.default_rng(0)
    lines = []
    for i in range(9):
        samples = int(rng.integers(9000, 20000))
        tone = np.sin(np.cumsum(rng.uniform(0.02, 1.0, samples // 800 + 1).repeat(800)[:samples])) * 0.3
        soundfile.write(desk / f"{i}.wav", tone, 16000)
        lines.append({"id": f"u{i}", "audio": f"{i}.wav", "text": "a b", "speaker": "abc"[i % 3]})
    (desk / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return desk


def config_for(desk: Path, recipe: str, *, model: str = "whisper", **changes) -> ConvertConfig:
    given = {
        "model": str(desk / model),
        "sources": [str(desk / "manifest.jsonl")],
        "held_out": [] if recipe == "none" else ["c"],
        "batch_seconds": 4.0,
        **({} if recipe == "none" else ONE_STAGE),
        **changes,
        "train": {"device": "cpu", "log_every": 1, **changes.get("train", {})},
    }
    return read(recipe, **given)


def result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def test_mixers_may_differ_by_layer(desk):
    settings = {"window": {"side": 3}, "ladder": {"heads": 2}}
    given = {"mixer": "window, pyramid,ladder", "mixer_config": settings}
    convert(config_for(desk, "none", **given), desk / "several")
    swaps = families.load(desk / "several" / "model").swaps
    assert [swaps[i].mixer for i in range(3)] == ["window", "pyramid", "ladder"]
    assert (swaps[0].config["side"], swaps[2].config["heads"]) == (3, 2)
    convert(config_for(desk, "none", **given, order="2,0", layers=0), desk / "two")
    assert [s["layers"] for s in result(desk / "two")["steps"]] == [[], [2, 0]]
    assert families.load(desk / "two" / "model").swaps[2].mixer == "ladder"
    for wrong, says in (
        ({"mixer": "window,pyramid"}, "names 2 mixers for 3 layers"),
        ({"mixer": "window,pyramid,piramid"}, "piramid"),
        ({"mixer": "window,pyramid,ladder", "order": "kl", "progressive": True}, "no one sweep"),
        ({"order": "2,0", "layers": 3}, "order 2,0 names 2 layers; 3 cannot be replaced"),
    ):
        with pytest.raises(LpaError, match=says):
            convert(config_for(desk, "none", **wrong), desk / f"wrong-{len(says)}")


def test_positions_fade_out_and_the_model_runs_at_any_length(desk, monkeypatch):
    lent = []
    plain = families.FAMILIES["whisper"].add_positions

    def listen(self, x):
        lent.append((self.settings.positions, self.training, self.fading))
        return plain(self, x)

    monkeypatch.setattr(families.FAMILIES["whisper"], "add_positions", listen)
    given = {"positions": False, "settle_epochs": 4.0, "fade": 0.5, "mixer": "ladder"}
    convert(config_for(desk, "best", **given), desk / "placeless")
    heard = [fading for positions, training, fading in lent if training and not positions]
    assert heard[0] == 1.0
    assert heard == sorted(heard, reverse=True)
    assert 0.4 * len(heard) <= sum(f == 0 for f in heard) <= 0.6 * len(heard)
    assert {fading for positions, training, fading in lent if not training} == {0.0}
    model = families.load(desk / "placeless" / "model")
    assert json.loads((desk / "placeless" / "model" / "plan.json").read_text())["base"]["positions"] is False
    assert model(torch.randn(1, 16000 * 6)).logits.shape[1] == 300  # positions ended at 4 s
    assert control_config(desk / "placeless").positions
    assert model.encoder.embed_positions.weight.shape == (1, 16)


def test_a_student_without_positions_is_not_asked_for_them(desk):
    """Layers that hear nothing add the same everywhere: then positions are all that the hidden states differ by."""
    teacher, student = families.load(desk / "whisper"), families.load(desk / "whisper")
    student.drop_positions()
    for model in (teacher, student):
        for layer in model.encoder.layers:
            layer.self_attn.out_proj.weight.data.zero_()
            layer.fc2.weight.data.zero_()
    batches = [
        (torch.randn(8, 32000, generator=torch.Generator().manual_seed(i)), torch.full((8,), 32000)) for i in range(4)
    ]
    told = told_by_position(teacher, batches)
    assert told.shape == (3, 200, 16)
    assert told[:, :100].mean(1).abs().max() < 0.02
    audio, lengths = torch.randn(8, 32000, generator=torch.Generator().manual_seed(9)), torch.full((8,), 32000)
    asked = without_positions(lambda student, teacher, batch: teacher.hidden, student, told)
    course = lambda states: torch.stack(states) - torch.stack(states).mean(2, keepdim=True)  # noqa: E731 (less its mean)
    with torch.no_grad():
        wanted = teacher(audio, lengths, hidden=True)
        for fading in (0.0, 0.5):
            student.fading = fading
            said = student(audio, lengths, hidden=True)
            far = (course(said.hidden) - course(wanted.hidden)).square().mean()
            near = (course(said.hidden) - course(asked(said, wanted, None))).square().mean()
            assert near < 0.01 * far


def test_diagonal_sums():
    scores = torch.randn(2, 7, 7)
    wanted = [scores.diagonal(d, 1, 2).sum(-1) for d in range(-6, 7)]
    torch.testing.assert_close(diagonal_sums(scores), torch.stack(wanted, 1))


def test_scores_of_distances_make_up_for_positions(desk):
    """Attention to near frames, told by their positions, goes on without them."""
    teacher, other = families.load(desk / "whisper"), families.load(desk / "whisper")
    for model in (teacher, other):
        for layer in model.encoder.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.data.copy_(1.5 * torch.eye(16))  # frames seek those that are like them
                if projection.bias is not None:
                    projection.bias.data.zero_()
    heard = [(torch.randn(1, 48000, generator=torch.Generator().manual_seed(i)), torch.tensor([48000])) for i in (0, 1)]
    scores = scores_of_distances(teacher, other, heard)
    assert [s.shape for s in scores] == [(2, 801)] * 3

    @torch.no_grad()
    def near(model, scored: torch.Tensor | None = None) -> float:
        """The share of its attention that a frame of the first layer has within 5 frames."""
        with inputs_of(model, 0) as inputs:
            model(*heard[0])
        x = inputs[0][0]
        source = projections(mixer_at(teacher, 0))
        q, k = (p(x).unflatten(-1, (2, 8)).transpose(0, 1) for p in (source.q, source.k))
        distance = torch.arange(len(x)) - torch.arange(len(x)).unsqueeze(1)
        score = q @ k.transpose(1, 2) * 8**-0.5 + (0.0 if scored is None else scored[:, distance + 400])
        return float((score.softmax(-1) * (distance.abs() <= 5)).sum((1, 2)).mean() / len(x))

    free = families.load(desk / "whisper")
    free.drop_positions()
    wanted, with_scores, without = near(teacher), near(free, scores[0]), near(free)
    assert wanted > 2 * without
    assert with_scores == pytest.approx(wanted, rel=0.25)


def test_places_are_those_of_the_distances():
    torch.manual_seed(0)
    attention = families.create("whisper", WHISPER).encoder.layers[0].self_attn
    scores = torch.randn(2, 2 * 9 + 1)
    window = Window.from_attention(attention, WindowConfig(side=12, places=True))
    window.add_places(scores)
    torch.testing.assert_close(PACE * window.places[:, 12 - 9 : 12 + 10], scores)
    torch.testing.assert_close(PACE * window.places[:, 0], scores[:, 0])
    config = PyramidConfig(block=4, pieces=(1, 3), steps=(1,), places=True)
    pyramid = Pyramid.from_attention(attention, config)
    pyramid.add_places(scores)
    for number, (lo, hi) in enumerate(zip(*(edges.tolist() for edges in pyramid.windows()), strict=True)):
        for frame in range(4):
            seen = torch.stack([scores[:, min(max(at - frame, -9), 9) + 9] for at in range(lo, hi)])
            torch.testing.assert_close(PACE * pyramid.places[:, frame, number], seen.exp().mean(0).log())


def test_positions_go_with_the_last_step_and_only_where_there_are_any(desk):
    convert(config_for(desk, "none", positions=False, progressive=True, mixer="window"), desk / "stepwise")
    state = load_file(desk / "stepwise" / "model" / "weights.safetensors")
    assert all(state[f"encoder.layers.{i}.self_attn.mixer.places"].abs().max() > 0 for i in range(3))
    with pytest.raises(LpaError, match="add --data"):
        convert(config_for(desk, "none", positions=False, mixer="window", sources=[]), desk / "silent")
    plans = [json.loads((desk / "stepwise" / f"step-0{n}" / "model" / "plan.json").read_text()) for n in (1, 2, 3)]
    assert [plan["base"]["positions"] for plan in plans] == [True, True, False]
    with pytest.raises(LpaError, match="no position embedding"):
        convert(config_for(desk, "none", model="wav2vec2", positions=False), desk / "nothing-to-fade")


def test_fading_falls_to_nothing():
    assert [order.fading(0.5, step, 8) for step in (0, 2, 4, 7)] == [1.0, 0.5, 0.0, 0.0]
    assert order.fading(0.0, 0, 8) == 0.0


def test_minutes_are_shared_out_over_the_stages(desk):
    epochs = {"warm_epochs": 2.0, "settle_epochs": 4.0, "align_epochs": 1.0, "final_epochs": 1.0}
    seconds = 3.0
    given = {**epochs, "layers": 1, "order": "depth", "mixer": "window", "minutes": seconds / 60}
    convert(config_for(desk, "paper", **given), desk / "timed")
    found = result(desk / "timed")
    stages = [*found["steps"][1]["stages"], *found["final"]]
    shares = {stage["name"]: stage["seconds"] / seconds for stage in stages}
    for name, want in (("warm", 2 / 8), ("settle", 4 / 8), ("align", 1 / 8), ("final", 1 / 8)):
        assert want <= shares[name] <= want + 0.4, shares  # a step is begun before the time is up, and then finished
    assert all(stage["steps"] >= 1 for stage in stages)
    with pytest.raises(LpaError, match="minutes"):
        config_for(desk, "best", minutes=-1.0)


def test_a_conversion_records_its_sweep_and_its_network(desk, monkeypatch):
    monkeypatch.setenv("LPA_COMMIT", "abc")
    given = {"mixer": "window", "order": "kl", "layers": 1, "sweep_settings": {"epochs": 0.0}}
    convert(config_for(desk, "none", **given), desk / "swept", record=desk / "records")
    swept, made = (
        [json.loads(line) for line in (desk / "records" / f"{kind}.jsonl").read_text().splitlines()]
        for kind in ("sweep", "convert")
    )
    assert [r["figures"]["layer"] for r in swept] == [0, 1, 2]
    assert all(r["config"]["mixer"] == "window" and r["figures"]["mse"] > 0 for r in swept)
    assert [r["what"] for r in made] == ["step 0", "step 1", "final"]
    assert made[-1]["network"] == {"layers": 3, "mixers": ["window"]}
    assert (made[-1]["figures"]["training_steps"], made[-1]["figures"]["training_seconds"]) == (0, 0)


MASKS = {"time_masks": 20.0, "time_mask_seconds": 0.3, "feature_masks": 1}


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "weights.safetensors")


def apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    return sum(float((one[name] - two[name]).abs().sum()) for name in one)


@pytest.mark.parametrize("model", ["whisper", "wav2vec2"])
def test_a_front_end_heard_once_changes_nothing_but_rounding(desk, model, monkeypatch):
    given = {"model": model, "settle_epochs": 3.0, "train": MASKS, "lr": 1e-3}
    cls = families.FAMILIES[model]
    plain, calls = cls.front, []
    monkeypatch.setattr(cls, "front", lambda *a: calls.append(1) or plain(*a))
    counts = []
    for name, gigabytes in (("each", 0.0), ("once", 0.1)):
        calls.clear()
        convert(config_for(desk, "best", **given, front_gb=gigabytes), desk / f"{model}-{name}")
        counts.append(len(calls))
    convert(config_for(desk, "best", **{**given, "train": {}}, front_gb=0.1), desk / f"{model}-unmasked")
    convert(config_for(desk, "none", model=model), desk / f"{model}-start")
    each, once, unmasked, start = (weights(desk / f"{model}-{n}") for n in ("each", "once", "unmasked", "start"))
    assert apart(each, once) < 0.01 * apart(each, start)
    assert apart(unmasked, once) > 5 * apart(each, once)  # masks are put on what is kept
    assert result(desk / f"{model}-each")["wer"] == pytest.approx(result(desk / f"{model}-once")["wer"], abs=10)
    assert counts[1] < counts[0] / 2


@pytest.mark.parametrize("model", ["whisper", "wav2vec2"])
def test_what_is_kept_is_what_the_front_end_says(desk, model):
    config = config_for(desk, "best", model=model, front_gb=0.1)
    session = Session(config, desk / f"{model}-session")
    network = session.load(config.model)
    session.listen(network)
    feed, index = session.feed, np.array([4, 1, 2])
    kept, lengths = feed.clean(index)
    batch = feed.batch(session.training(1), network.frames, torch.zeros(5, 9), 0, index, 0, 1)
    feed.kept = None
    with torch.no_grad():
        wanted, own = network.front(*feed.clean(index))
    assert lengths.tolist() == own.tolist() == batch.lengths.tolist()
    torch.testing.assert_close(kept, wanted, atol=1e-3, rtol=1e-3)
    assert torch.equal(batch.audio[:, : kept.shape[1]], kept)
    assert batch.audio[:, kept.shape[1] :].abs().sum() == 0
    assert batch.frames.tolist() == [network.frames(int(n)) for n in feed.bank.lengths[index]]


def test_a_front_end_is_kept_of_plain_audio_and_within_bounds(desk):
    for train in ({"speed": [0.9, 1.1]}, {"noise": 0.5}, {"gain_db": [-3, 3]}):
        with pytest.raises(LpaError, match="plain audio"):
            config_for(desk, "best", front_gb=1.0, train=train)
    with pytest.raises(LpaError, match="GB of memory"):
        convert(config_for(desk, "best", front_gb=1e-5), desk / "too-much")


@pytest.mark.parametrize("model", ["whisper", "wav2vec2"])
def test_a_front_end_is_heard_once_for_all_runs_that_share_a_cache(desk, tmp_path, model, monkeypatch):
    cls = families.FAMILIES[model]
    plain, calls = cls.front, []
    monkeypatch.setattr(cls, "front", lambda *a: calls.append(1) or plain(*a))

    def listen(name: str, front_gb: float = 0.1, **changes) -> list[torch.Tensor]:
        given = {"model": model, "front_gb": front_gb, "train": {"cache": str(tmp_path / "cache")}, **changes}
        session = Session(config_for(desk, "best", **given), tmp_path / name)
        calls.clear()
        session.listen(session.load(desk / model))
        return [session.feed.clean(np.array([2, 0]))[0], session.held.clean(np.array([1]))[0]]

    def files() -> set[Path]:
        return set((tmp_path / "cache").glob("front-*.safetensors"))

    first = listen("first")
    assert calls
    assert len(files()) == 2  # of what is trained on, and of what is held out
    again = listen("again", seed=1)
    assert not calls
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    kept = files()
    for file in kept:  # as a full disk leaves them
        file.write_bytes(file.read_bytes()[:100])
    mended = listen("mended")
    assert calls
    assert all(torch.equal(a, b) for a, b in zip(first, mended, strict=True))
    assert files() == kept
    listen("others", held_out=["b"])
    assert calls  # another bank
    assert kept < files()
    largest = max(file.stat().st_size for file in kept)
    listen("bounded", front_gb=2.2 * largest / 2**30, batch_seconds=3.0)
    assert not kept & files()  # the oldest go
    assert sum(file.stat().st_size for file in files()) <= 2.2 * largest
    assert not list((tmp_path / "cache").glob("*.part"))


def test_what_cannot_begin_leaves_nothing_and_may_be_put_right(desk, tmp_path):
    out = tmp_path / "runs" / "first"
    with pytest.raises(LpaError, match="there is nothing to train on; add --data"):
        convert(config_for(desk, "best", sources=[]), out)
    assert not out.exists()
    with pytest.raises(LpaError, match="has no position embedding"):
        convert(config_for(desk, "best", model="wav2vec2", positions=False), out)
    assert not out.exists()
    with pytest.raises(LpaError, match="GB of memory"):
        convert(config_for(desk, "best", front_gb=1e-5), out)
    assert not out.exists()
    convert(config_for(desk, "none"), out)
    with pytest.raises(LpaError, match="differs in"):
        convert(config_for(desk, "none", seed=5), out)
    assert (out / "result.json").is_file()  # what has been made stays


# --- speakers held out


def test_a_tenth_of_the_speakers_is_held_out_whatever_else_there_is():
    said = Counter({f"speaker {i}": 100 for i in range(20)})
    chosen = held_out_of([said])
    assert chosen == ("speaker 2", "speaker 15")  # in every run and on every machine
    names = list(said)
    random.Random(0).shuffle(names)
    assert held_out_of([Counter({name: 70 for name in names})]) == chosen
    halves = [Counter({name: 50 for name in half}) for half in (names[:10], names[10:])]
    assert held_out_of(halves) == chosen
    assert held_out_of([said + Counter({"": 5000})]) == chosen  # what nobody is named for


def test_enough_is_left_to_train_on():
    many = Counter({f"speaker {i}": 2000 for i in range(100)})
    assert len(held_out_of([many])) == HELD_OUT_WORDS // 2000
    for name in "abcdefghij":
        others = Counter({other: 10 for other in "abcdefghij" if other != name})
        assert name not in held_out_of([others, Counter({name: 10})])  # the other source has nobody else
        assert name not in held_out_of([others + Counter({name: 80})])  # nearly half of the words
    assert held_out_of([Counter({"a": 30, "b": 10, "c": 20})]) == ("b",)  # each more than a fifth: the least of them
    assert held_out_of([Counter({"a": 10, "": 10})]) == ("a",)


@pytest.mark.parametrize(
    ("said", "names"), [([{"a": 10}], "a"), ([{"a": 10}, {"b": 10}], "[ab], [ab]"), ([{"": 10}], "none")]
)
def test_too_few_speakers_to_hold_one_out(said, names):
    with pytest.raises(LpaError, match=rf"too few to hold one out \({names}\); add --data with other speakers"):
        held_out_of([Counter(words) for words in said])


def test_speakers_are_held_out_unasked_and_a_run_keeps_them(desk, capsys):
    out = desk / "unasked"
    convert(config_for(desk, "best", held_out=[], mixer="window"), out)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("held out")]
    (chosen,) = json.loads((out / "config.json").read_text())["held_out"]
    assert said == [f"held out, to measure on: {chosen} (33% of the words); for others name them with --held-out"]
    heard = json.loads((out / "data.json").read_text())
    assert (heard["training"]["utterances"], heard["held_out"]["utterances"]) == (6, 3)
    for names in ([], [chosen]):
        convert(config_for(desk, "best", held_out=names, mixer="window"), out)  # it is the same run
    other = "abc".replace(chosen, "")[0]
    with pytest.raises(LpaError, match="differs in held_out"):
        convert(config_for(desk, "best", held_out=[other], mixer="window"), out)
    assert control_config(out).held_out == (chosen,)
    convert(config_for(desk, "none", held_out=[]), desk / "unasked-none")
    assert json.loads((desk / "unasked-none" / "config.json").read_text())["held_out"] == []  # nothing is trained


def test_a_voice_alone_cannot_be_trained_and_measured_on(desk, tmp_path):
    lines = (desk / "manifest.jsonl").read_text().splitlines()[::3]
    text = "".join(line.replace('"audio": "', f'"audio": "{desk}/') + "\n" for line in lines)
    (tmp_path / "one.jsonl").write_text(text)
    with pytest.raises(LpaError, match=r"too few to hold one out \(a\)"):
        convert(config_for(desk, "best", held_out=[], sources=[str(tmp_path / "one.jsonl")]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- a folder for one run at a time


def test_a_second_run_in_a_folder_is_told_of_the_first(desk, tmp_path):
    config, out = config_for(desk, "none"), tmp_path / "out"
    with started(config, out):
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(LpaError, match=rf"process {os.getpid()} on .+ is at work in .*out; wait for its end, or"):
            convert(config, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    convert(config, out)
    assert not (out / CLAIM).exists()


def test_a_killed_run_leaves_its_folder_free(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            claim = Claim(tmp_path / "out")
            (tmp_path / "claimed").write_text(str(claim.path))
            time.sleep(60)
        finally:
            os._exit(1)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "claimed").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(LpaError, match=f"process {child} on"):
            Claim(tmp_path / "out")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / "out" / CLAIM).is_file()  # it could not tidy up
    claim = Claim(tmp_path / "out")
    with pytest.raises(LpaError, match=f"process {os.getpid()} on"):
        Claim(tmp_path / "out")
    claim.release()


def test_a_folder_that_is_something_else_stays_as_it_is(desk, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LpaError, match=r"cannot be a run folder \(.+\); choose another --out"):
        convert(config_for(desk, "none"), tmp_path / "file")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 16}')
    with pytest.raises(LpaError, match="hidden_size"):
        convert(config_for(desk, "best", held_out=[]), tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    assert (tmp_path / "file").read_text() == "mine"


# --- the commands


def lpa(monkeypatch, *words) -> None:
    from lpa.cli import main

    monkeypatch.setattr(sys, "argv", ["lpa", *map(str, words)])
    main()


def test_a_conversion_answers_programs(desk, tmp_path, monkeypatch, capsys):
    def answer(*words) -> dict:
        data = ("--data", desk / "manifest.jsonl", "--set", "train.device=cpu", "--json")
        with pytest.raises(SystemExit) as ended:
            lpa(monkeypatch, "convert", desk / "whisper", *data, *words)
        assert not ended.value.code
        return json.loads(capsys.readouterr().out)

    out = tmp_path / "out"
    found = answer("--recipe", "none", "--mixer", "window", "--layers", "2", "--out", out)
    kept = result(out)
    assert found == {
        "finished": True,
        "model": str(out / "model"),
        "measure": "wer",
        "wer": kept["wer"],
        "wer_before": kept["wer_before"],
        "replaced": [0, 1],
        "attention_kept": False,
        "exceeded": None,
        "predicted": None,
        "outcome": kept["outcome"],
        "held_out": [],
    }
    stopped = answer("--recipe", "best", "--max-minutes", "1e-9", "--out", tmp_path / "stopped")
    assert stopped == {"finished": False, "out": str(tmp_path / "stopped")}


def test_who_interrupts_is_told_that_nothing_is_lost(desk, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lpa.convert.loop.convert", interrupted)
    for rank, said in (("0", 1), ("1", 0)):  # of several processes one speaks
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stopped:
            lpa(monkeypatch, "convert", desk / "whisper", "--recipe", "none", "--out", tmp_path / "out")
        assert stopped.value.code
        assert capsys.readouterr().err.count("stopped; the same command goes on where it was") == said


def test_a_plan_names_its_mixers_in_one_word_or_several(desk, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LPA_COMMIT", "abc")
    out, results = tmp_path / "plan", tmp_path / "results"

    def plan(*words) -> dict:
        given = ("--out", out, "--data", desk / "manifest.jsonl", "--measure", "relative", "--json")
        few = ("--set", "train.device=cpu", "--set", "batch_seconds=4.0", "--set", "mixer_config.window={side = 2}")
        with pytest.raises(SystemExit) as ended:
            lpa(monkeypatch, "plan", desk / "whisper", *given, *few, "--record", "--results", results, *words)
        assert not ended.value.code
        return json.loads(capsys.readouterr().out)

    found = plan("--mixer", "none, window", "--mixer", "pyramid,none", "--mflop", "1e9")
    assert found == json.loads((out / "choice.json").read_text())
    swept = {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/sweep.json")}
    assert sorted(swept) == ["none", "pyramid", "window"]
    layers = {name: sweep["layers"][0] for name, sweep in swept.items()}
    assert layers["window"]["config"]["side"] == 2
    assert layers["pyramid"]["config"]["pieces"] == read("best", model="m").mixer_config["pieces"]
    # one of them is trained, so all are measured on speakers that it does not hear
    runs = [json.loads((out / name / "config.json").read_text()) for name in (*swept, "")]
    assert len(runs[0]["held_out"]) == 1
    assert all(run["held_out"] == runs[0]["held_out"] for run in runs)
    assert layers["none"]["epochs"] == 2
    assert plan("--mixer", "none,window,pyramid", "--mflop", "1e9") == found
    (record,) = (json.loads(line) for line in (results / "plan.jsonl").read_text().splitlines())  # once, not twice
    assert record["figures"]["relative"] == found["predicted"]["relative"]
    assert record["config"]["mixer"] == "none,window,pyramid"
    assert record["choice"] == [row["mixer"] for row in found["layers"]]
    assert len((results / "sweep.jsonl").read_text().splitlines()) == 3 * 3
    cheap = plan("--mixer", "none,window", "--mflop", "0")
    assert [row["mixer"] for row in cheap["layers"]] == ["none"] * 3
    assert len((results / "plan.jsonl").read_text().splitlines()) == 2


def test_gates_can_harden_in_the_final_tuning(desk):
    given = {"order": "0", "layers": 0, "mixer_config": {"heads": 2}, "final_epochs": 1.0, "final_tau": 0.05}
    convert(config_for(desk, "paper", **given), desk / "hardened")
    models = [families.load(desk / "hardened" / name) for name in ("step-01/model", "model")]
    assert [mixer_at(model, 0).tau for model in models] == [0.5, 0.05]
    with pytest.raises(LpaError, match="final_tau"):
        config_for(desk, "paper", final_tau=-1.0)
