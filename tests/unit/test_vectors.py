"""Every backend that is installed gives the committed logits (`tests/vectors`), each without the others.

The models there are small and random, and hold every mixer. The built-in model has such vectors too, where it is there.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "vectors"))

from make import CLIP, HERE, MODELS, fingerprint  # noqa: E402

from lpa import audio  # noqa: E402
from lpa.plan import Plan  # noqa: E402
from lpa.run import BACKENDS, DEFAULT, Listener  # noqa: E402

TOLERANCE = 1e-3
NEEDS = {"mlx": "mlx.core", "onnx": "onnxruntime", "torch": "torch"}
FILES = {"mlx": "weights.safetensors", "onnx": "model.onnx", "torch": "weights.safetensors"}
FOLDERS = [HERE / name for name in MODELS] + ([DEFAULT] if (DEFAULT / "plan.json").is_file() else [])


def open_exactly(backend: str, folder: Path) -> Listener:
    """In float32, whatever the folder stores."""
    if backend == "mlx":
        from lpa.run.mlx import MlxListener

        return MlxListener(folder, precision="float32")
    return BACKENDS[backend](folder)


def is_int8(path: Path) -> bool:
    """Whether a graph multiplies in int8."""
    return b"MatMulInteger" in path.read_bytes()


def read_vectors(folder: Path) -> dict[int, np.ndarray]:
    """Logits by the number of samples heard."""
    path = HERE / "default.npz" if folder == DEFAULT else folder / "vectors.npz"
    if not path.is_file():
        pytest.fail(f"{folder.name} has no vectors; make them: python tests/vectors/make.py {folder.name}")
    with np.load(path) as stored:
        made_with = str(stored["fingerprint"])
        found = {int(name): stored[name] for name in stored.files if name != "fingerprint"}
    if (folder / "weights.safetensors").is_file():
        assert made_with == fingerprint(folder), f"old vectors; type: python tests/vectors/make.py {folder.name}"
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_backend_gives_the_vectors(backend, folder):
    pytest.importorskip(NEEDS[backend], reason=f"{NEEDS[backend]} is not installed: {backend} is not tested here")
    if not (folder / FILES[backend]).is_file():
        pytest.skip(f"{folder.name} has no {FILES[backend]}, which {backend} runs")
    listener, samples = open_exactly(backend, folder), audio.read(CLIP)
    vectors = read_vectors(folder)
    assert len(vectors) > 1
    for length, wanted in vectors.items():
        found = listener.hear(samples[:length])
        assert found.shape == wanted.shape == (found.shape[0], len(listener.tokens))
        assert wanted.std() > 0.1  # something to compare with
        if backend == "onnx" and is_int8(folder / "model.onnx"):
            assert np.sqrt(np.square(found - wanted).mean()) < 0.2 * wanted.std()  # near is what int8 promises
        else:
            assert np.abs(found - wanted).max() < TOLERANCE, length


def test_the_built_in_model_in_float32_onnx(tmp_path):
    """Where its own graph is int8, one in float32 gives the vectors."""
    if not (DEFAULT / "model.onnx").is_file() or not is_int8(DEFAULT / "model.onnx"):
        pytest.skip("there is no built-in model with an int8 graph")
    pytest.importorskip("onnxscript", reason="pip install 'lpa[onnx]' to export")
    from lpa.export.onnx import export_onnx

    listener, samples = BACKENDS["onnx"](export_onnx(str(DEFAULT), tmp_path / "onnx")), audio.read(CLIP)
    for length, wanted in read_vectors(DEFAULT).items():
        assert np.abs(listener.hear(samples[:length]) - wanted).max() < TOLERANCE, length


@pytest.mark.parametrize("name", MODELS)
def test_a_tenth_less_of_any_mixer_shows(name):
    pytest.importorskip("torch", reason="changing a model needs torch")
    from lpa.run.torch import TorchListener
    from lpa.surgery import mixer_at

    listener, samples, vectors = TorchListener.load(HERE / name), audio.read(CLIP), read_vectors(HERE / name)
    length = max(vectors)
    for index in listener.model.swaps:
        less = mixer_at(listener.model, index).register_forward_hook(
            lambda _, __, found: found._replace(y=0.9 * found.y)
        )
        changed = listener.hear(samples[:length])
        less.remove()
        assert np.abs(changed - vectors[length]).max() > 3 * TOLERANCE, index


def test_every_mixer_is_in_the_vectors():
    pytest.importorskip("torch", reason="the list of mixers needs torch")
    from lpa.mixers import MIXERS

    assert {swap.mixer for name in MODELS for swap in Plan.read(HERE / name).swaps} == set(MIXERS)
    plan = Plan.read(HERE / "wav2vec2-8-of-12")
    assert (len(plan.swaps), plan.base["num_hidden_layers"]) == (8, 12)
    plan = Plan.read(HERE / "whisper-bounded")
    assert len(plan.swaps) == plan.base["encoder_layers"]
    assert not plan.base["positions"]


def test_vectors_stay_small():
    sizes = [path.stat().st_size for path in HERE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert 0 < sum(sizes) < 1.5e6
