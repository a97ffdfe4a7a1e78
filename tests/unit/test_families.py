import copy
import json

import pytest
import torch
import transformers
from tiny_models import CASES, batch, make
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lpa
from lpa.errors import LpaError
from lpa.families import create
from lpa.families.base import MixerSite
from lpa.families.wav2vec2 import normalise
from lpa.mixers import MIXERS, Mixed, Mixer, projections
from lpa.surgery import swap

WITH_GROUP_NORM = [c for c in CASES if CASES[c][1].get("feat_extract_norm", "group") == "group" and "whisper" not in c]
WITH_GROUP_NORM.remove("data2vec-audio")  # it has layer norms only


def check_batch_equals_single(model):
    audio, lengths = batch()
    with torch.no_grad():
        together = model(audio, lengths, hidden=True)
        assert all(h.isfinite().all() for h in [together.logits, together.last, *together.hidden])
        for row, samples in enumerate(lengths.tolist()):
            frames = int(together.lengths[row])
            assert frames == model.frames(samples)
            if not samples:
                continue
            alone = model(audio[row : row + 1, :samples], hidden=True)
            assert alone.logits.shape[1] == frames
            for ours, theirs in zip([*together.hidden, together.logits], [*alone.hidden, alone.logits], strict=True):
                torch.testing.assert_close(ours[row, :frames], theirs[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_padded_batch_equals_single_with_attention(case):
    check_batch_equals_single(make(case))


@pytest.mark.parametrize("layers", [(0, 1), (0,)], ids=["all", "half"])
@pytest.mark.parametrize("mixer", sorted(MIXERS))
@pytest.mark.parametrize("case", CASES)
def test_padded_batch_equals_single(case, mixer, layers):
    model = make(case)
    for index in layers:
        swap(model, index, mixer)
    check_batch_equals_single(model)


@pytest.mark.parametrize("case", WITH_GROUP_NORM)
def test_group_norm_trap(case):
    """Plain Hugging Face lets the padding into the first norm; the same weights here do not."""
    model = make(case, normalise=False)
    plain = type(model.net)(copy.deepcopy(model.config))
    plain.config._attn_implementation = "eager"
    plain.load_state_dict(model.net.state_dict())
    plain.eval()
    audio, lengths = batch()
    audio, lengths = audio[[0, 3]], lengths[[0, 3]]
    mask = torch.arange(audio.shape[1]) < lengths[:, None]
    samples, frames = int(lengths[1]), model.frames(int(lengths[1]))
    with torch.no_grad():
        alone = plain(audio[1:, :samples]).logits[0]
        theirs = plain(audio * mask, attention_mask=mask.long()).logits[1, :frames]
        ours = model(audio, lengths).logits[1, :frames]
        through_net = model.net(audio * mask, attention_mask=mask.long()).logits[1, :frames]
    assert (theirs - alone).abs().max() > 1e-3
    torch.testing.assert_close(ours, alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(through_net, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("swapped", [(), (0,), (0, 1)])
@pytest.mark.parametrize("case", [c for c in CASES if "whisper" not in c])
def test_hugging_face_forward_agrees(case, swapped):
    """Those who call the network itself get the same numbers, before and after a swap."""
    model = make(case, normalise=False)
    for index in swapped:
        swap(model, index, "conv")
    audio, lengths = batch()
    audio, lengths = audio[[0, 1, 3]], lengths[[0, 1, 3]]
    mask = torch.arange(audio.shape[1]) < lengths[:, None]
    with torch.no_grad():
        ours = model(audio, lengths)
        theirs = model.net(audio * mask, attention_mask=mask.long()).logits
    for row, frames in enumerate(ours.lengths):
        torch.testing.assert_close(theirs[row, :frames], ours.logits[row, :frames], atol=1e-5, rtol=1e-4)


class Largest(TorchDispatchMode):
    """Sees every tensor any operation reads or makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, out)):
            if isinstance(value, torch.Tensor):
                # what it takes up, not what it looks like: a broadcast view is free
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return out


@pytest.mark.parametrize("swapped", [0, 1, 2])
@pytest.mark.parametrize(
    ("case", "own_loop"),
    [(c, loop) for c in ("wav2vec2", "hubert-stable", "data2vec-audio") for loop in (True, False)]
    + [("whisper-fixed-floor", True)],  # transformers' own Whisper forward takes no mask
)
def test_no_frames_squared_mask(case, swapped, own_loop):
    model = make(case)
    for index in range(swapped):
        swap(model, index, "conv")
    frames, lengths = 4000, torch.tensor([4000, 2500])
    features = torch.randn(2, frames, 80 if "whisper" in case else 16)
    with torch.no_grad(), Largest() as seen:
        if own_loop:
            model.encode(features, lengths)
        else:
            mask = torch.arange(frames) < lengths[:, None]
            model.encoder(model.trunk.feature_projection.projection(features), attention_mask=mask)
    assert 0 < seen.elements < frames**2 / 8


def test_wavlm_makes_a_bias_only_where_attention_is_left():
    model = make("wavlm", layers=3)
    attention = model.encoder.layers[0].attention
    swap(model, 0, "none")
    swap(model, 1, "none")
    site = model.encoder.layers[0].attention
    rows, frames = 2, 40
    bias = site.position.make(rows, frames)
    want = attention.compute_bias(frames, frames).unsqueeze(0).repeat(rows, 1, 1, 1).view(-1, frames, frames)
    torch.testing.assert_close(bias, want, rtol=0, atol=0)
    assert site.bias_wanted()
    undo = swap(model, 2, "none")
    assert not site.bias_wanted()
    features = torch.randn(1, 3000, 16)
    with torch.no_grad(), Largest() as seen:
        model.encode(features, torch.tensor([3000]))
    assert seen.elements < 3000**2 / 8
    undo()
    assert site.bias_wanted()


def test_wavlm_bias_reaches_the_attention_that_is_left():
    """With layer 0 gone, the output still depends on the position bias, as it does in the original."""
    model = make("wavlm")
    swap(model, 0, "none")
    audio, _ = batch()
    with torch.no_grad():
        before = model(audio[:1]).logits
        model.encoder.layers[0].attention.position.rel_attn_embed.weight.mul_(-30)
        after = model(audio[:1]).logits
    assert (before - after).abs().max() > 1e-5


class Listener(Mixer):
    """A mixer that gives out numbered gates and outputs, and keeps what it was handed."""

    def __init__(self, index: int, gates: bool):
        super().__init__()
        self.index, self.gives, self.got = index, gates, []

    @classmethod
    def from_attention(cls, attention, config):
        return cls(0, gates=False)

    def mflop_per_frame(self):
        return 0.0

    def mix(self, x, mask, gates, skip):
        self.got.append((mask, gates, skip))
        return Mixed(torch.full_like(x, self.index), x.new_full((x.shape[0], 3), self.index) if self.gives else None)


@pytest.mark.parametrize("case", ["wav2vec2", "wavlm-stable", "whisper"])
def test_gates_and_skips_are_passed_on(case):
    model = make(case, layers=7)
    heard = {}
    for index in (0, 1, 2, 4, 5):  # 3 and 6 keep attention
        heard[index] = Listener(index, gates=index in (0, 2))
        adapter = model.adapter(heard[index], index)
        setattr(model.encoder.layers[index], model.attention_name, adapter)
    audio, lengths = batch()
    for _ in range(2):  # a second pass starts with nothing of the first
        model(audio, lengths)
    for turn in range(2):
        gates = {i: m.got[turn][1] for i, m in heard.items()}
        skips = {i: m.got[turn][2] for i, m in heard.items()}
        assert gates[0] is None
        assert [int(gates[i][0, 0]) for i in (1, 2, 4, 5)] == [0, 0, 2, 2]  # of the last layer that gave any
        assert [skips[i] is None for i in (0, 1, 2, 4, 5)] == [True, True, True, False, False]
        assert int(skips[4][0, 0, 0]) == 0
        assert int(skips[5][0, 0, 0]) == 1
        mask = heard[0].got[turn][0]
        assert mask.shape == (4, model.frames(12000))
        assert mask.sum(1).tolist() == [model.frames(int(n)) for n in lengths]
    model(audio)
    assert all(m.got[-1][0] is None for m in heard.values())  # nothing padded: no mask at all


def test_a_failed_pass_leaves_nothing_behind():
    model = make("wav2vec2", layers=3)
    first, second = Listener(0, gates=True), Listener(1, gates=False)
    for mixer in (first, second):
        model.encoder.layers[mixer.index].attention = model.adapter(mixer, mixer.index)
    audio, lengths = batch()
    handle = model.encoder.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(audio, lengths)
    assert not copy.deepcopy(model).flow.running  # a copy has nothing of that pass
    handle.remove()
    model(audio, lengths)
    assert first.got[-1][1] is None


def test_a_site_outside_a_pass_says_so():
    model = make("wav2vec2")
    swap(model, 0, "none")
    with pytest.raises(LpaError, match="layer 0 was called outside"):
        model.encoder.layers[0](torch.zeros(1, 5, 32))


@pytest.mark.parametrize("case", CASES)
def test_one_frame_and_less(case):
    model = make(case)
    swap(model, 0, "conv")
    shortest = 1 if "whisper" in case else 400
    with torch.no_grad():
        out = model(torch.randn(1, shortest), hidden=True)
    assert out.logits.shape == (1, 1, 29)
    assert out.logits.isfinite().all()
    assert model.frames(shortest) == 1
    assert model.frames(shortest - 1) == 0
    with pytest.raises(LpaError, match=f"audio of {shortest - 1} samples is too short"):
        model(torch.randn(1, shortest - 1))


@pytest.mark.parametrize("case", ["wav2vec2", "whisper"])
def test_lengths_follow_the_convolutions(case):
    model = make(case)
    with torch.no_grad():
        for samples in range(400, 2000, 37):
            features, lengths = model.front(torch.zeros(1, samples))
            out = model.encode(features, lengths)
            assert features.shape[1] == int(lengths)
            assert out.last.shape[1] == int(out.lengths) == model.frames(samples)
            if case == "wav2vec2":
                assert model.frames(samples) == int(model.net._get_feat_extract_output_lengths(torch.tensor(samples)))


@pytest.mark.parametrize(
    ("audio", "lengths", "says"),
    [
        (torch.zeros(500), None, "must be \\(batch, samples\\)"),
        (torch.zeros(1, 500, dtype=torch.int16), None, "floating point"),
        (torch.zeros(2, 500), torch.tensor([500]), "one number each"),
        (torch.zeros(2, 500), torch.tensor([500, 501]), r"lengths \[500, 501\] do not fit 500 samples"),
        (torch.zeros(2, 500), torch.tensor([500, -1]), r"lengths \[500, -1\] do not fit"),
    ],
)
def test_bad_audio(audio, lengths, says):
    with pytest.raises(LpaError, match=says):
        make("whisper")(audio, lengths)


# --- create, load, copy


def test_settings_are_checked():
    for family, config, says in [
        ("wav2vec2", {"hidden_sise": 3}, "no setting hidden_sise"),
        ("wav2vec2", {"hidden_size": "wide"}, "not valid"),
        ("wav2vec2", {"hidden_size": 30, "num_attention_heads": 4}, "not valid.*divisible"),
        ("wav2vec2", {"add_adapter": True}, "add_adapter"),
        ("whisper", {"d_model": 30, "encoder_attention_heads": 4}, "not valid.*divisible"),
        ("whisper", {"mel_floor": "low"}, "mel_floor 'low'"),
        ("whispr", {}, "no family 'whispr'; have data2vec-audio, hubert, sepformer, wav2vec2, wavlm, whisper"),
    ]:
        with pytest.raises(LpaError, match=says):
            create(family, config)


@pytest.mark.parametrize("case", ["wav2vec2", "wavlm", "whisper"])
def test_copies_share_nothing(case):
    model = make(case)
    swap(model, 0, "conv")
    audio, lengths = batch()
    want = model(audio, lengths).logits.detach()  # with a graph: nothing of a pass may be left to copy
    twin = copy.deepcopy(model)
    assert twin.flow is not model.flow
    assert twin.config._attn_implementation == model.config._attn_implementation
    sites = [m for m in twin.modules() if isinstance(m, MixerSite)]
    assert sites
    assert all(s.flow is twin.flow for s in sites)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        torch.testing.assert_close(twin(audio, lengths).logits, want, rtol=0, atol=0)


def write_vocab(folder, symbols):
    (folder / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(symbols)}))


@pytest.mark.parametrize("case", [c for c in CASES if "whisper" not in c])
def test_load_hugging_face_folder(case, tmp_path):
    model = make(case)
    model.net.save_pretrained(tmp_path)
    write_vocab(tmp_path, model.tokens.symbols)
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false}')
    loaded = lpa.load(tmp_path)
    assert loaded.family == model.family
    assert loaded.tokens == model.tokens
    assert not loaded.training
    audio, _ = batch()
    plain = type(model.net).from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(loaded(audio).logits, plain(audio).logits, atol=1e-5, rtol=1e-4)
    assert loaded.settings.normalise is False


def test_a_head_wider_than_its_vocabulary(tmp_path):
    model = make("wav2vec2")
    model.net.save_pretrained(tmp_path)
    write_vocab(tmp_path, ["<pad>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWX"])  # 26 of the head's 29
    (tmp_path / "added_tokens.json").write_text('{"<s>": 26, "</s>": 27}')
    tokens = lpa.load(tmp_path).tokens
    assert tokens.symbols[25:] == ("X", "<s>", "</s>", "<28>")
    assert tokens.decode([2, 26, 27, 28, 1, 3]) == "A B"
    write_vocab(tmp_path, [*"abcdefghijklmnopqrstuvwxyz", "|", "<pad>", "ä", "ö"])
    (tmp_path / "added_tokens.json").unlink()
    with pytest.raises(LpaError, match="30 symbols, but the CTC head only 29"):
        lpa.load(tmp_path)


def test_normalisation_is_of_each_samples_own():
    audio, lengths = batch()
    together = normalise(audio, torch.arange(audio.shape[1]) < lengths[:, None])
    for row, samples in enumerate(lengths.tolist()):
        assert (together[row, samples:] == 0).all()
        if samples:
            alone = normalise(audio[row : row + 1, :samples], None)[0]
            torch.testing.assert_close(together[row, :samples], alone, atol=1e-5, rtol=1e-5)
            assert alone.mean().abs() < 1e-5
            assert alone.var(correction=0) == pytest.approx(1, abs=1e-4)


def test_normalisation_is_the_feature_extractors():
    model, bare = make("wav2vec2"), make("wav2vec2", normalise=False)
    audio, _ = batch()
    audio = audio[:1] * 3 + 1
    prepared = transformers.Wav2Vec2FeatureExtractor()(audio[0].numpy(), sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(audio).logits, bare(prepared.input_values).logits, atol=1e-5, rtol=1e-4)


def test_load_bare_encoder(tmp_path):
    make("hubert", head=False).net.save_pretrained(tmp_path)
    model = lpa.load(tmp_path)
    out = model(torch.randn(1, 4000))
    assert out.logits is None
    assert out.last.shape == (1, 12, 32)
    assert model.sites()[1].path == "encoder.layers.1.attention"


@pytest.mark.parametrize("kind", ["WhisperModel", "WhisperForConditionalGeneration"])
def test_load_whisper_checkpoint(kind, tmp_path):
    source = make("whisper")
    config = transformers.WhisperConfig(
        **{k: v for k, v in source.base().items() if k not in source.Settings.__dataclass_fields__}
        | {"vocab_size": 60, "decoder_layers": 1, "decoder_ffn_dim": 8, "decoder_attention_heads": 4}
        | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    )
    whole = getattr(transformers, kind)(config)
    whole.save_pretrained(tmp_path)
    model = lpa.load(tmp_path, dtype=torch.float32)
    encoder = whole.get_encoder().state_dict()
    assert set(model.net.state_dict()) == {f"encoder.{k}" for k in encoder}
    assert all(torch.equal(model.net.state_dict()[f"encoder.{k}"], v) for k, v in encoder.items())
    assert model(torch.randn(1, 4000)).logits is None


def test_load_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def failure(source):
        with pytest.raises(LpaError) as error:
            lpa.load(source)
        assert "\n" not in str(error.value)
        return str(error.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "neither plan.json nor config.json" in failure(empty)
    assert "no model folder" in failure(tmp_path / "nowhere")
    assert "no model folder empty/typo" in failure("empty/typo")
    assert "no model folder whisper" in failure("whisper")

    bert = tmp_path / "bert"
    transformers.BertConfig().save_pretrained(bert)
    assert "no family 'bert'; have" in failure(bert)

    model, folder = make("wav2vec2"), tmp_path / "ctc"
    model.net.save_pretrained(folder)
    assert "no vocab.json" in failure(folder)
    write_vocab(folder, ["a", "|", "<pad>"])
    (folder / "vocab.json").write_text('{"eng": {"a": 0}}')
    assert "vocab.json is not one alphabet" in failure(folder)
    write_vocab(folder, model.tokens.symbols)
    state = model.net.state_dict()
    state.pop("wav2vec2.encoder.layers.1.final_layer_norm.weight")
    model.net.save_pretrained(folder, state_dict=state)
    assert "lacks the weights wav2vec2.encoder.layers.1.final_layer_norm.weight" in failure(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(folder) in failure(folder)
    weights.unlink()
    assert str(folder) in failure(folder)


def test_unreachable_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LpaError, match="no folder nobody/nothing, and the hub has no such model or cannot be reached"):
        lpa.load("nobody/nothing")


def test_every_site_is_an_attention_mixers_can_start_from():
    for case in CASES:
        model = make(case, layers=3)
        sites = model.sites()
        assert [s.index for s in sites] == [0, 1, 2]
        for site in sites:
            attention = model.net.get_submodule(site.path)
            assert isinstance(attention, nn.Module)
            assert (projections(attention).dim, projections(attention).heads) == (site.dim, site.heads) == (32, 4)
