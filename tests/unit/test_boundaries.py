"""Who may import what, how fast help is, and what no file of the repository may name. Each in a process of its own."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_TORCH = (
    *("audio", "bench", "bench.commands", "bench.model", "bench.peers", "bench.roofline"),
    *("cli", "data", "errors", "ggml", "journal"),
    *("noise", "plan", "recipe", "records", "score", "sources", "tokens", "windows"),
    *("align", "export", "formats", "run", "run.field", "run.front", "run.onnx", "stream", "transcribe"),
    *("report", "report.page", "report.readme"),
    *("convert.commands", "convert.config", "convert.order", "convert.planner", "convert.progress", "convert.table"),
)
VERBS = [
    *("inspect", "evaluate", "train", "import-whisper", "compact", "transcribe", "export", "enhance"),
    *("data", "data check", "bench", "bench layer", "bench model", "bench peers", "bench roofline", "bench transcribe"),
    "bench enhance",
]
VERBS += ["report", "show"]
VERBS += ["sweep", "convert", "control", "ablate", "plan", "table"]
HELP_SECONDS = 0.3
# A path of one machine, or a host that packages are fetched from.
PRIVATE = re.compile(
    r"(?<![\w.~-])/(?:work|root|home|Users|mnt)/\w"
    r"|\b(?:pypi\.org|pythonhosted\.org|npmjs\.(?:com|org)|registry\.[a-z]+\.(?:org|com|io)\b)"
)


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def imported_by(module: str) -> set[str]:
    """The packages that are loaded once a module has been imported, in a fresh process."""
    found = python("-c", f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})")
    assert found.returncode == 0, found.stderr
    return set(found.stdout.split())


@pytest.mark.parametrize("module", ["lpa", *(f"lpa.{name}" for name in NO_TORCH)])
def test_imports_no_torch(module):
    assert not imported_by(module) & {"torch", "transformers", "accelerate"}


def test_lpa_itself_imports_nothing_heavy():
    assert not imported_by("lpa") & {"numpy", "typer", "rich", "soundfile"}


def test_mixers_know_torch_and_nothing_of_transformers():
    assert imported_by("lpa.mixers") & {"torch", "transformers"} == {"torch"}


def test_help_is_instant():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        found = python("-m", "lpa", "--help")
        seconds.append(time.perf_counter() - start)
        assert found.returncode == 0, found.stderr
    assert all(verb.split()[0] in found.stdout for verb in VERBS)
    assert min(seconds) < HELP_SECONDS, f"lpa --help took {min(seconds):.2f} s at best"


def test_every_verb_is_known_here():
    """So that the next test leaves none out."""
    listed = []
    for group in ((), ("data",), ("bench",)):
        text = python("-m", "lpa", *group, "--help").stdout
        listed += [
            " ".join([*group, name]) for name in re.findall(r"^  ([a-z][\w-]*) ", text.split("Commands:")[1], re.M)
        ]
    assert sorted(listed) == sorted(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb):
    found = python("-m", "lpa", *verb.split(), "--help")
    assert found.returncode == 0, found.stderr
    assert f"lpa {verb} " in found.stdout
    assert len(found.stdout.split("Options:")[0].split("\n\n")[1]) > 10  # a sentence on what it does


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("see " + "/".join(["", "home", "ann", "x"]), True),
        ("https://" + ".".join(["pypi", "org"]) + "/simple", True),
        ("tests/work/x and ../home/y, a registry. of mixers", False),
    ],
)
def test_private_names_are_recognised(text, named):
    assert bool(PRIVATE.search(text)) is named


def test_no_file_names_a_machine_or_a_registry():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not in a git clone: there is no list of files to look through")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or b"\0" in (data := path.read_bytes())[:8192]:
            continue  # deleted but not committed yet, or not text
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), 1):
            found += [f"{name}:{number}: {match[0]}" for match in PRIVATE.finditer(line)]
    assert not found, "\n".join(found)
