"""SepFormer: equal to speechbrain's, padded batches, sites and swaps, checkpoints, the loss."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_sepformer
from torch import nn

from lpa.denoise import negative_si_snr
from lpa.errors import LpaError
from lpa.families import sepformer
from lpa.families.sepformer import SepFormer, position_table
from lpa.families.speechbrain import load_speechbrain
from lpa.inspect import describe
from lpa.mixers import MIXERS, projections
from lpa.surgery import mixer_at, swap

torch.set_num_threads(1)

TINY = {"width": 16, "heads": 4, "ffn": 24, "intra_layers": 2, "inter_layers": 2, "chunk": 10}
# What the reach is bounded with: no statistics of the whole recording, no positions counted from its start.
BOUNDED = {**TINY, "norm": "cln", "inter_positions": False}
LENGTHS = [400, 15, 0, 281, 399, 16]

HYPERPARAMS = """
sample_rate: {rate}
num_spks: {speakers}
Encoder: !new:speechbrain.lobes.models.dual_path.Encoder
  kernel_size: 16
  out_channels: 16
SBtfintra: &intra !new:speechbrain.lobes.models.dual_path.SBTransformerBlock
  num_layers: 2
  d_model: 16
  nhead: 4
  d_ffn: 24
  dropout: 0
  use_positional_encoding: {positions}
  norm_before: {before}
SBtfinter: !new:speechbrain.lobes.models.dual_path.SBTransformerBlock
  num_layers: 3
  d_model: 16
  nhead: 4
  d_ffn: 24
  dropout: 0
  use_positional_encoding: {positions}
  norm_before: {before}
MaskNet: !new:speechbrain.lobes.models.dual_path.Dual_Path_Model
  num_spks: !ref <num_spks>
  in_channels: 16
  out_channels: 16
  num_layers: 2
  K: 10
  intra_model: !ref <SBtfintra>
  inter_model: !ref <SBtfinter>
  norm: {norm}
  linear_layer_after_inter_intra: false
  skip_around_intra: true
modules:
  encoder: !ref <Encoder>
  masknet: !ref <MaskNet>
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
  loadables: [!ref <Encoder>, !ref <MaskNet>]
"""

# Speechbrain asks for torchaudio on import and uses nothing of it here.
THEIRS = """
import importlib.machinery, importlib.util, sys, types
if importlib.util.find_spec("torchaudio") is None:
    sys.modules["torchaudio"] = audio = types.ModuleType("torchaudio")
    audio.__spec__, audio.__version__ = importlib.machinery.ModuleSpec("torchaudio", None), "2.9.0"
import torch
torch.set_num_threads(1)
from speechbrain.lobes.models.dual_path import Decoder, Dual_Path_Model, Encoder, SBTransformerBlock
out, norm, before, positions = sys.argv[1], sys.argv[2], sys.argv[3] == "true", sys.argv[4] == "true"
torch.manual_seed(3)
stack = lambda n: SBTransformerBlock(n, 16, 4, 24, dropout=0, use_positional_encoding=positions, norm_before=before)
parts = {
    "encoder": Encoder(16, 16),
    "masknet": Dual_Path_Model(16, 16, stack(2), stack(3), 2, norm, 10, 1, linear_layer_after_inter_intra=False),
    "decoder": Decoder(16, 1, 16, 8, bias=False),
}
for name, part in parts.items():
    for parameter in part.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    torch.save(part.eval().state_dict(), f"{out}/{name}.ckpt")
found = {f"{n}.{k}" for n, part in parts.items() for k, _ in part.named_parameters()}
cases = []
with torch.no_grad():
    for samples in (16, 100, 400, 480, 1003):
        audio = torch.randn(2, samples)
        frames = parts["encoder"](audio)
        cases.append((audio, parts["decoder"](frames * parts["masknet"](frames)[0])))
torch.save({"parameters": sorted(found), "cases": cases}, f"{out}/theirs.pt")
"""


def tiny(**changes) -> SepFormer:
    return make_sepformer(TINY, **changes)


@pytest.mark.skipif(importlib.util.find_spec("speechbrain") is None, reason="speechbrain is not installed")
@pytest.mark.parametrize(
    ("norm", "before", "positions"), [("ln", "true", "true"), ("ln", "false", "false"), ("cln", "true", "true")]
)
def test_speechbrains_own_modules_give_the_same(tmp_path, norm, before, positions):
    made = subprocess.run(
        [sys.executable, "-c", THEIRS, str(tmp_path), norm, before, positions],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    text = HYPERPARAMS.format(rate=16000, speakers=1, norm=norm, before=before, positions=positions)
    (tmp_path / "hyperparams.yaml").write_text(text)
    theirs = torch.load(tmp_path / "theirs.pt")
    model = load_speechbrain(tmp_path)
    assert sorted(model.net.state_dict()) == theirs["parameters"]
    for audio, wanted in theirs["cases"]:
        with torch.no_grad():
            found = model.clean(audio)
        assert found.shape == audio.shape
        assert wanted.abs().max() > 0.1
        torch.testing.assert_close(found[:, : wanted.shape[1]], wanted, atol=1e-5, rtol=1e-5)
        assert not found[:, wanted.shape[1] :].any()


@pytest.mark.parametrize("changes", [{}, {"norm": "cln"}, {"norm_before": False}, {"inter_positions": False}])
@pytest.mark.parametrize("mixer", ["", "lpa", "pyramid", "summary"])
def test_a_padded_batch_gives_what_each_gives_alone(changes, mixer):
    model = tiny(**changes)
    if mixer:
        for site in model.sites():
            swap(model, site, mixer)
    audio = torch.randn(len(LENGTHS), 400)  # noise in the padding, so that whatever reads it shows
    with torch.no_grad():
        together = model.clean(audio, torch.tensor(LENGTHS))
        for row, length in enumerate(LENGTHS):
            assert not together[row, length:].any()
            if length >= 16:
                alone = model.clean(audio[row : row + 1, :length])[0]
                assert alone.abs().max() > 1e-3
                torch.testing.assert_close(together[row, :length], alone, atol=2e-5, rtol=1e-4)
            else:
                assert not together[row].any()


@pytest.mark.parametrize("changes", [{}, {"norm": "cln"}])
@pytest.mark.parametrize("mixer", ["", "lpa", "pyramid", "summary"])
@pytest.mark.parametrize("lengths", [None, [1500, 700, 40]])
def test_some_sequences_at_a_time_give_what_all_at_once_give(monkeypatch, changes, mixer, lengths):
    model = tiny(**changes)
    if mixer:
        for site in model.sites():
            swap(model, site, mixer)
    heard: dict[str, list[int]] = {"intra": [], "inter": []}
    for kind in heard:
        path = getattr(model.encoder.dual_mdl[0], f"{kind}_mdl")
        path.mdl.layers[0].register_forward_hook(lambda _, given, __, kind=kind: heard[kind].append(len(given[0])))
    audio = torch.randn(3, 1500)
    own = None if lengths is None else torch.tensor(lengths)
    monkeypatch.setattr(sepformer, "AT_ONCE", 85)  # frames: 8 chunks of 10, 2 rows of 40 chunks
    wanted = model.clean(audio, own).detach()  # a gradient is wanted here: all at once
    assert heard == {"intra": [3 * 40], "inter": [3 * 10]}
    with torch.no_grad():
        found = model.clean(audio, own)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-4)
    assert {kind: (max(sizes[1:]), sum(sizes[1:])) for kind, sizes in heard.items()} == {
        "intra": (8, 3 * 40),
        "inter": (2, 3 * 10),
    }


@pytest.mark.parametrize("norm", ["ln", "cln"])
def test_gradients_know_nothing_of_it(monkeypatch, norm):
    model, audio, wanted = tiny(norm=norm), torch.randn(2, 500), torch.randn(2, 500)
    found = []
    for at_once in (1 << 20, 1):
        monkeypatch.setattr(sepformer, "AT_ONCE", at_once)
        model.zero_grad()
        negative_si_snr(model.clean(audio), wanted).mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with torch.no_grad():
            model.clean(audio)  # leaves nothing behind
    assert all(grad.abs().max() > 0 for name, grad in found[0].items() if "k_proj.bias" not in name)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_one_pass_takes_little_more_memory_than_its_frames():
    """Half a minute in a process of its own, against all at once: what a layer makes on the way is not there whole."""
    script = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path; from lpa.families import sepformer\n"
        "model = sepformer.SepFormer.create('sepformer', {'width': 32, 'heads': 2, 'ffn': 256, 'blocks': 1,"
        " 'intra_layers': 1, 'inter_layers': 1, 'norm': 'cln'})\n"
        "peak = lambda: int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) / 1024\n"
        "if sys.argv[1] == 'all': sepformer.AT_ONCE = 1 << 40\n"
        "with torch.no_grad(): model.clean(torch.randn(1, 16000)); before = peak()\n"
        "with torch.no_grad(): model.clean(torch.randn(1, 30 * 16000)); print(peak() - before)"
    )
    peaks = [
        float(subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True).stdout)
        for how in ("some", "all")
    ]
    frames = 2 * 30 * 2000 * 32 * 4 / 2**20  # MiB of the chunks, in which every frame is twice
    assert peaks[0] < 5 * frames, peaks
    assert peaks[1] > 2 * peaks[0], peaks


def test_any_length_beyond_the_stored_position_tables():
    """Speechbrain's tables end at 2500 chunks; a longer recording here is one of more chunks."""
    model = tiny(blocks=1, intra_layers=1, inter_layers=1)
    samples = 5 * 8 * 2600  # half a chunk is 5 frames of 8 samples
    with torch.no_grad():
        found = model.clean(torch.randn(1, samples))
    assert found.shape == (1, samples)
    assert found.isfinite().all()
    table = position_table(2600, 16, torch.device("cpu"))
    assert table[2599, 4].item() == pytest.approx(torch.sin(torch.tensor(2599 * 10000 ** (-4 / 16))).item(), abs=1e-3)


def test_sites_are_in_the_order_they_are_computed():
    model = tiny()
    sites = model.sites()
    assert [site.index for site in sites] == list(range(8))
    assert sites[1].path == "masknet.dual_mdl.0.intra_mdl.mdl.layers.1.self_att.att"
    assert [site.index for site in model.sites("intra")] == [0, 1, 4, 5]
    assert [site.index for site in model.sites("inter")] == [2, 3, 6, 7]
    called: list[int] = []
    for site in sites:
        module = model.net.get_submodule(site.path)
        module.register_forward_hook(lambda *_, index=site.index: called.append(index))
    model.clean(torch.randn(1, 100))
    assert called == list(range(8))
    with pytest.raises(LpaError, match="have intra, inter"):
        model.sites("both")


def test_what_a_layer_costs_a_second():
    """Within a chunk the recording's length does not count; across chunks it does. Every frame is in two chunks."""
    layers = describe(tiny())["layers"]
    within, across = layers[0]["mflop_per_second"], layers[2]["mflop_per_second"]
    assert within["10"] == within["60"] == pytest.approx((8 * 16 * 16 + 4 * 10 * 16) / 1e6 * 4000, abs=1e-3)
    assert across["60"] > 5 * across["10"]


def test_projections_are_the_attentions_own_weights():
    """Torch's attention on the same input, from the parts a mixer is built from."""
    model = tiny()
    attention = model.net.get_submodule(model.sites()[0].path)
    parts = projections(attention)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(attention.state_dict())
    x = torch.randn(2, 7, 16)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    with torch.no_grad():
        wanted = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
        torch.testing.assert_close(attention(x, mask=mask)[0], wanted, atol=1e-6, rtol=1e-5)
        stacked = torch.cat([parts.q(x), parts.k(x), parts.v(x)], -1)
        torch.testing.assert_close(
            stacked, nn.functional.linear(x, theirs.in_proj_weight, theirs.in_proj_bias), atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_swaps_in_learns_and_comes_out(mixer):
    model = tiny()
    audio = torch.randn(1, 500)
    with torch.no_grad():
        before = model.clean(audio)
    names = set(model.net.state_dict())
    undo = [swap(model, site, mixer) for site in model.sites()]
    negative_si_snr(model.clean(audio), torch.randn(1, 500)).mean().backward()
    for site in model.sites():
        for name, parameter in mixer_at(model, site.index).named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name
    assert model.clean(audio).isfinite().all()
    for back in undo:
        back()
    assert set(model.net.state_dict()) == names
    with torch.no_grad():
        assert torch.equal(model.clean(audio), before)


def test_a_window_as_wide_as_the_chunk_is_the_attention():
    model = tiny()
    audio = torch.randn(2, 700)
    with torch.no_grad():
        before = model.clean(audio)
        for site in model.sites():
            swap(model, site, "window", {"side": 40})
        torch.testing.assert_close(model.clean(audio), before, atol=1e-5, rtol=1e-4)


def test_reach_is_what_the_output_depends_on():
    assert tiny().reach is None
    model = tiny(**BOUNDED)
    assert model.reach is None  # inter attention sees every chunk
    for site in model.sites("inter"):
        swap(model, site, "window", {"side": 6})
    assert model.reach is not None
    audio = torch.randn(1, 8000)
    middle = 4000
    changed = audio.clone()
    changed[:, : middle - model.reach] = torch.randn(1, middle - model.reach)
    changed[:, middle + model.reach + 1 :] = 0
    with torch.no_grad():
        torch.testing.assert_close(model.clean(changed)[0, middle], model.clean(audio)[0, middle], atol=1e-6, rtol=0)
        near = audio.clone()
        near[:, middle - model.grid] += 10  # a chunk away: well within
        assert (model.clean(near) - model.clean(audio))[0, middle].abs() > 1e-4


def test_the_published_size():
    with torch.device("meta"):
        model = SepFormer.create("sepformer", {})
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(25.7, abs=0.1)
    assert len(model.sites("intra")) == len(model.sites("inter")) == 16


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"widht": 3}, "no setting widht"),
        ({"heads": 7}, "7 heads do not divide"),
        ({"norm": "bn"}, "have ln, cln"),
        ({"chunk": 11}, "chunk must be even"),
        ({"blocks": 0}, "blocks must be 1 or more"),
    ],
)
def test_settings_that_cannot_be(settings, said):
    with pytest.raises(LpaError, match=said):
        SepFormer.create("sepformer", {**TINY, **settings})


# --- speechbrain's folders


def write_checkpoint(folder: Path, model: SepFormer, speakers: int = 1, rate: int = 8000) -> None:
    text = HYPERPARAMS.format(rate=rate, speakers=speakers, norm="ln", before="true", positions="true")
    (folder / "hyperparams.yaml").write_text(text)
    for part in ("encoder", "masknet", "decoder"):
        state = getattr(model.net, part).state_dict()
        if part == "masknet":
            state["dual_mdl.0.intra_mdl.pos_enc.pe"] = torch.zeros(1, 2500, 16)
        torch.save(state, folder / f"{part}.ckpt")


def test_a_checkpoint_folder_loads(tmp_path):
    model = tiny(inter_layers=3, sample_rate=8000)
    write_checkpoint(tmp_path, model)
    state = torch.random.get_rng_state()
    loaded = load_speechbrain(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert loaded.config == model.config
    assert not loaded.training
    audio = torch.randn(1, 300)
    assert torch.equal(loaded.clean(audio), model.clean(audio))


def test_a_hub_id_loads_offline_from_the_hub_s_cache(tmp_path):
    """In a process of its own: where the cache is, and that nothing is fetched, is settled on import."""
    source, cache = "speechbrain/sepformer-wham16k-enhancement", tmp_path / "hub"
    folder = cache / f"models--{source.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    write_checkpoint(folder / "snapshots" / "abc", tiny(inter_layers=3, sample_rate=8000))
    script = f"from lpa.families import load; model = load({source!r}); print(model.family, model.config.inter_layers)"
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    environment = {**outside, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["sepformer", "3"], done.stderr


def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path):
    for nowhere in (tmp_path / "typo", "no/such/folder", "typo"):
        with pytest.raises(LpaError, match="no model folder"):
            load_speechbrain(nowhere)
    with pytest.raises(LpaError, match=r"has no hyperparams\.yaml"):
        load_speechbrain(tmp_path)
    write_checkpoint(tmp_path, tiny(inter_layers=3), speakers=2)
    with pytest.raises(LpaError, match="separates 2 speakers"):
        load_speechbrain(tmp_path)
    write_checkpoint(tmp_path, tiny(inter_layers=2))
    with pytest.raises(LpaError, match="does not fit its hyperparams"):
        load_speechbrain(tmp_path)
    write_checkpoint(tmp_path, tiny(inter_layers=3))
    whole = (tmp_path / "masknet.ckpt").read_bytes()
    (tmp_path / "masknet.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LpaError, match="cut short or corrupt"):
        load_speechbrain(tmp_path)
    (tmp_path / "hyperparams.yaml").write_text("a: [1")
    with pytest.raises(LpaError, match=r"hyperparams\.yaml cannot be read"):
        load_speechbrain(tmp_path)


# --- the loss


def test_loss_is_the_negative_si_snr_of_the_score():
    from lpa.score import si_snr

    torch.manual_seed(0)
    target = torch.randn(3, 300)
    estimate = 0.7 * target + 0.4 * torch.randn(3, 300) + 0.2
    lengths = torch.tensor([300, 120, 77])
    each = [si_snr(e[:n].numpy(), t[:n].numpy()) for e, t, n in zip(estimate, target, lengths, strict=True)]
    assert negative_si_snr(estimate, target, lengths).mean().item() == pytest.approx(-sum(each) / 3, abs=1e-4)
    assert negative_si_snr(estimate[:1], target[:1]).mean().item() == pytest.approx(-each[0], abs=1e-4)
    with pytest.raises(LpaError, match="must be alike"):
        negative_si_snr(estimate, target[:, 1:])


def test_loss_has_the_gradient_of_finite_differences():
    torch.manual_seed(1)
    target, lengths = torch.randn(2, 12), torch.tensor([12, 7])
    estimate = (target + 0.5 * torch.randn(2, 12)).requires_grad_()
    negative_si_snr(estimate, target, lengths).mean().backward()
    assert not estimate.grad[1, 7:].any()
    step = 1e-2
    for row, column in ((0, 3), (0, 11), (1, 5)):
        moved = torch.zeros(2, 12)
        moved[row, column] = step
        with torch.no_grad():
            up, down = (negative_si_snr(estimate + sign * moved, target, lengths).mean() for sign in (1, -1))
        assert estimate.grad[row, column].item() == pytest.approx(((up - down) / (2 * step)).item(), rel=0.02, abs=2e-3)


def test_loss_of_silence_is_finite():
    for estimate, target in ((torch.zeros(1, 50), torch.randn(1, 50)), (torch.randn(1, 50), torch.zeros(1, 50))):
        estimate.requires_grad_()
        loss = negative_si_snr(estimate, target).mean()
        loss.backward()
        assert loss.isfinite()
        assert estimate.grad.isfinite().all()


def test_it_learns():
    """A few steps on one noisy tone: the loss falls."""
    torch.manual_seed(0)
    model = SepFormer.create("sepformer", TINY).train()
    clean = torch.sin(torch.arange(800) * 0.3).repeat(2, 1)
    noisy = clean + 0.6 * torch.randn(2, 800)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        loss = negative_si_snr(model.clean(noisy), clean).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 5
