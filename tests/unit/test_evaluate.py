"""Evaluation: right figures from a real model, and the padding bug of naive decoding, reproduced and caught."""

import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch

from lpa.data import AudioBank
from lpa.errors import LpaError
from lpa.evaluate import (
    Joined,
    by_length,
    check_batching,
    evaluate,
    evaluate_folder,
    evaluate_folders,
    full_precision,
    greedy,
    own_logits,
    set_gates,
    show,
    write_record,
)
from lpa.families import create
from lpa.run.field import Field
from lpa.score import score
from lpa.surgery import mixer_at, save, swap

SECONDS = [0.3, 1.7, 0.5, 0.9, 2.0, 0.4, 1.1, 0.7, 1.4, 0.6]
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "max_source_positions": 200,
}  # fmt: skip
WAV2VEC2 = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def placeless():
    """Without positions, and without the one place of all frames, that drowns what a random network hears."""
    model = network()
    model.drop_positions()
    torch.nn.init.zeros_(model.encoder.embed_positions.weight)
    for convolution in (model.encoder.conv1, model.encoder.conv2):
        torch.nn.init.normal_(convolution.weight)  # loud, so that frames differ
    return model


def network(family: str = "whisper"):
    """Fresh weights, with a head loud enough that frames say different things."""
    torch.manual_seed(0)
    model = create(family, WHISPER if family == "whisper" else WAV2VEC2)
    head = model.net.head if family == "whisper" else model.net.lm_head
    torch.nn.init.normal_(head.weight)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten utterances by two speakers, in LibriSpeech's layout."""
    root = tmp_path_factory.mktemp("speech")
    rng = np.random.default_rng(0)
    for speaker, lengths in (("1", SECONDS[:5]), ("2", SECONDS[5:])):
        chapter = root / "dev" / speaker / "1"
        chapter.mkdir(parents=True)
        for number, seconds in enumerate(lengths):
            time = np.arange(round(16000 * seconds)) / 16000
            tone = np.sin(2 * np.pi * (200 + 300 * rng.random()) * time * (1 + time)) + 0.3 * rng.normal(size=len(time))
            soundfile.write(chapter / f"{speaker}-1-{number}.flac", 0.2 * tone, 16000)
        lines = [f"{speaker}-1-{i} SOME WORDS" for i in range(5)]
        (chapter / f"{speaker}-1.trans.txt").write_text("\n".join(lines))
    return root


@pytest.fixture
def bank(folder):
    return AudioBank([str(folder)])


def alone(model, bank) -> list[str]:
    """Every utterance run by itself: the definition of what a transcript is."""
    return [greedy(model, own_logits(model, bank, np.array([i]))[0]) for i in range(len(bank))]


@pytest.mark.parametrize("family", ["whisper", "wav2vec2"])
def test_figures(bank, family):
    model = network(family).train()
    model.eval()
    bank.texts = alone(model, bank)
    model.train()
    seen = []
    found = evaluate(model, bank, batch_seconds=6, progress=lambda *p: seen.append(p))
    assert found.hypotheses == bank.texts
    assert any(bank.texts)
    assert (found.score.wer, found.score.cer) == (0, 0)
    assert found.checked == 10
    assert found.largest_difference < 1e-4
    assert found.audio_seconds == pytest.approx(sum(SECONDS))
    assert found.real_time_factor == found.wall_seconds / found.audio_seconds
    assert seen[-1] == (10, 10)
    assert model.training  # left as it was
    bank.texts[4] += " more words"
    found = evaluate(model, bank, check=0)
    assert found.score.wer == pytest.approx(100 * 2 / found.score.words)
    assert found.checked == 0
    assert json.loads(json.dumps(found.to_dict()))["utterances"] == 10


class NaiveDecoding(torch.nn.Module):
    """The bug: frames of padding are decoded as if they were the sample's own."""

    def __init__(self, model):
        super().__init__()
        self.model, self.tokens = model, model.tokens

    def forward(self, audio, lengths):
        output = self.model(audio, lengths)
        return replace(output, lengths=torch.full_like(output.lengths, output.logits.shape[1]))


class NaiveAttention(NaiveDecoding):
    """Its other half: decoding stops where it should, but the model has listened to the padding."""

    def forward(self, audio, lengths):
        right = self.model(audio, lengths)
        return replace(self.model(audio), lengths=right.lengths)


@pytest.mark.parametrize(
    ("bug", "reason"), [(NaiveDecoding, "frames alone but"), (NaiveAttention, "alone and in a batch differ by")]
)
def test_the_padding_bug_is_caught(bank, bug, reason):
    model = network()
    bank.texts = alone(model, bank)
    broken = bug(model).eval()
    assert alone(broken, bank) == bank.texts  # one at a time there is no padding, and nothing to see
    padded = [greedy(model, logits) for logits in own_logits(broken, bank, np.arange(10))]
    assert score(bank.texts, padded).cer > 1  # in a batch the same model looks worse than it is
    with pytest.raises(LpaError, match=reason) as error:
        evaluate(broken, bank)
    assert any(name in str(error.value) for name in bank.ids)
    assert evaluate(model, bank).score.wer == 0


def test_a_transcript_that_changes_in_its_batch_is_caught(bank, monkeypatch):
    """The check runs batches of its own; what evaluation itself decoded is compared as well."""
    model = network()
    monkeypatch.setattr("lpa.evaluate.transcribe", lambda *_: ["something else"] * 10)
    with pytest.raises(LpaError, match="alone but 'something else' in a batch"):
        evaluate(model, bank)


def test_a_model_that_is_not_a_number_fails(bank):
    model = network()
    with torch.no_grad():
        model.net.head.bias.fill_(float("nan"))
    with pytest.raises(LpaError, match="differ by nan"):
        evaluate(model, bank)


def test_the_check_spreads_over_lengths(bank):
    _, checked = check_batching(network(), bank, 4)
    lengths = sorted(bank.lengths[i] for i in checked)
    assert len(checked) == 4
    assert (lengths[0], lengths[-1]) == (bank.lengths.min(), bank.lengths.max())


def test_batches_by_length():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    batches = list(by_length(lengths, 250))
    assert sorted(np.concatenate(batches)) == list(range(500))
    assert all(lengths[b].max() * len(b) <= 250 for b in batches)
    assert [b.tolist() for b in by_length(np.array([7, 9]), 3)] == [[1], [0]]


def test_precision_is_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32 == before[1]
    finally:
        torch.set_float32_matmul_precision(before[0])


def test_a_model_folder_on_a_data_folder(folder, tmp_path, capsys):
    save(network(), tmp_path / "model")
    out = tmp_path / "hypotheses.jsonl"
    report = evaluate_folder(str(tmp_path / "model"), str(folder), limit=4, out=str(out), device="cpu")
    assert report["utterances"] == 4
    assert report["batch_check"]["utterances"] == 4
    assert report["bad"] == []
    assert json.loads(json.dumps(report))["wer"] == report["wer"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["1-1-0", "1-1-3", "2-1-1", "2-1-4"]  # both speakers
    again = score([line["reference"] for line in lines], [line["hypothesis"] for line in lines])
    assert again.wer == report["wer"]
    assert capsys.readouterr().out == ""  # the bar is on stderr, so that --json stays clean
    whole = evaluate_folder(str(tmp_path / "model"), str(folder), speakers=("2",), device="cpu")
    assert whole["utterances"] == 5
    with pytest.raises(LpaError, match="limit must be at least 1"):
        evaluate_folder(str(tmp_path / "model"), str(folder), limit=0)


def test_a_model_without_a_head(bank):
    with pytest.raises(LpaError, match="no CTC head"):
        evaluate(create("whisper", {**WHISPER, "head": False}), bank)


def test_joined_utterances_are_the_same_speech(bank):
    for seconds in (0.1, 1.5, 3.0, 100.0):
        joined = Joined(bank, seconds)
        assert np.array_equal(np.concatenate([joined.clip(i) for i in range(len(joined))]), bank.samples)
        assert " ".join(joined.texts) == " ".join(bank.texts)
        assert [len(joined.clip(i)) for i in range(len(joined))] == joined.lengths.tolist()
    assert Joined(bank, 0.1).ids == bank.ids  # an utterance is never cut
    assert Joined(bank, 100.0).ids == ["1-1-0..1-1-4", "2-1-0..2-1-4"]  # nor do speakers mix
    lengths = Joined(bank, 3.0).lengths / 16000
    assert len(lengths) == 3  # 5.4 s of the first speaker, 4.2 s of the second
    assert all(1.5 <= length <= 4.5 for length in lengths)
    with pytest.raises(LpaError, match="above 0"):
        Joined(bank, 0.0)


def test_joined_recordings_are_heard_whole_or_in_chunks(folder, tmp_path):
    """The tiny model has positions for 4 s: what is longer is heard in chunks and marked."""
    bounded, free = network(), placeless()
    for model, name in ((bounded, "bounded"), (free, "free")):
        save(model, tmp_path / name)
    both = [str(tmp_path / "bounded"), str(tmp_path / "free")]
    found = evaluate_folders(both, str(folder), join=[1.0, 6.0], device="cpu", batch_seconds=12)
    assert [(r["model"], r["join_seconds"]) for r in found] == [(m, s) for m in both for s in (1.0, 6.0)]
    assert [r["chunk_seconds"] for r in found] == [None, 4.0, None, None]
    assert len({r["words"] for r in found}) == 1
    assert len({r["audio_seconds"] for r in found}) == 1
    assert "joined to 6 s" in show(found[1], several=True)
    assert "in chunks of 4 s" in show(found[1], several=True)
    (cut,) = evaluate_folders(both[1:], str(folder), join=[6.0], chunk=3.0, device="cpu", batch_seconds=12)
    assert cut["chunk_seconds"] == 3.0
    with pytest.raises(LpaError, match="too short to hear a word in"):
        evaluate_folders(both[1:], str(folder), chunk=0.5)
    with pytest.raises(LpaError, match="cannot share one --out"):
        evaluate_folders(both, str(folder), out=tmp_path / "all.jsonl")


def test_rounding_is_told_from_a_leak(bank):
    """What float32 rounds differently in a batch is the same in float64; the model is as it was after either."""
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LpaError, match="alone and in a batch differ"):
        check_batching(model, bank, 16, tolerance=1e-9)
    found = evaluate(model, bank, tolerance=1e-9)
    assert found.largest_difference <= 1e-9
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_chunks_say_what_the_whole_says_where_reach_is_bounded(bank, monkeypatch):
    """Two mixers see 2 frames either side: away from its edges a chunk hears what one pass hears."""
    model = placeless()
    model.log_mel.floor = -5.0  # and not the recording's own
    for index in range(2):
        swap(model, index, "window", {"side": 1})
    joined = Joined(bank, 100.0)
    whole = evaluate(model, joined, check=0)
    asked = evaluate(model, joined, batch_seconds=5, chunk=2.5)
    assert (asked.chunk_seconds, asked.hypotheses) == (2.5, whole.hypotheses)
    monkeypatch.setattr(type(model), "longest", 2.0)
    cut = evaluate(model, joined, batch_seconds=5, chunk=2.5)  # more than it can hear
    assert (whole.chunk_seconds, cut.chunk_seconds) == (None, 2.0)
    assert cut.checked > 2
    assert cut.hypotheses == whole.hypotheses
    assert all(cut.hypotheses)


def test_a_model_is_evaluated_as_if_it_saw_less_far_ahead(folder, tmp_path, monkeypatch):
    heard = []

    def listen(model, *arguments, **options):
        heard.append(Field.of(model.family, model.base(), tuple(model.swaps.values())).ahead / 16000)
        return evaluate(model, *arguments, **options)

    monkeypatch.setattr("lpa.evaluate.evaluate", listen)
    model = placeless()
    model.settings = replace(model.settings, mel_floor=-5.0)
    for index in range(2):
        swap(model, index, "window", {"side": 20})
    name = str(save(model, tmp_path / "model"))
    found = evaluate_folders([name], str(folder), latency=[2.0, 0.2, 0.1], device="cpu")
    assert [r["latency"] for r in found] == [2.0, 0.2, 0.1]
    assert 0.8 < heard[0] < 1.0  # as far as it looks anyway
    assert 0.1 < heard[1] <= 0.2
    assert 0.03 < heard[2] <= 0.1
    assert "0.2 s ahead" in show(found[1], several=True)


def test_gates_are_evaluated_at_other_temperatures(folder, tmp_path, monkeypatch):
    model = network()
    swap(model, 0, "lpa")
    swap(model, 1, "window")
    save(model, tmp_path / "run" / "model")
    found = evaluate_folders([str(tmp_path / "run" / "model")], str(folder), tau=["0.5", "0.01", "hard"], device="cpu")
    assert [r["tau"] for r in found] == ["0.5", "0.01", "hard"]
    assert [r["batch_check"]["utterances"] for r in found] == [0, 0, 0]  # checked once, at its own temperature
    with monkeypatch.context() as patched:
        patched.setattr("lpa.evaluate.TOLERANCE", -1.0)
        with pytest.raises(LpaError, match="alone and in a batch differ"):
            evaluate_folders([str(tmp_path / "run" / "model")], str(folder), tau=["hard"], device="cpu")
    set_gates(model, "hard")
    assert mixer_at(model, 0).hard
    set_gates(model, "0.1")
    assert (mixer_at(model, 0).hard, mixer_at(model, 0).tau) == (False, 0.1)
    for wrong, says in (("soft", "a number, or hard"), ("0", "above 0")):
        with pytest.raises(LpaError, match=says):
            set_gates(model, wrong)
    with pytest.raises(LpaError, match="no gates"):
        set_gates(network(), "0.5")


def test_records_say_what_was_heard_and_what_it_was_made_with(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LPA_COMMIT", "abc")
    model = network()
    swap(model, 0, "lpa")
    save(model, tmp_path / "run" / "model")
    (tmp_path / "run" / "config.json").write_text('{"seed": 7}')
    (tmp_path / "run" / "order.json").write_text("{}")
    name = str(tmp_path / "run" / "model")
    for result in evaluate_folders([name], str(folder), join=[2.0], tau=["hard"], device="cpu"):
        write_record(result, tmp_path)
    (record,) = [json.loads(line) for line in (tmp_path / "evaluate.jsonl").read_text().splitlines()]
    assert (record["seed"], record["tau"], record["figures"]["seconds"]) == (7, "hard", 2.0)
    assert next(iter(record["figures"])) == "wer"
    assert record["network"] == {"family": "whisper", "layers": 2, "replaced": 1, "mixers": ["lpa"]}
    assert 1 < record["figures"]["mean_seconds"] < 4
