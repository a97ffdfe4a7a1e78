"""Records: what they carry, that lines do not mix, and that one nobody could repeat is refused."""

import json
import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from lpa import records
from lpa.errors import LpaError


def add(folder, number):
    records.write("wer", what=f"run {number}", figures={"wer": number, "pad": "x" * 2000}, folder=folder)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, which `commit` is asked about instead of the one the tests run in."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "file").write_text("one")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)
    monkeypatch.setattr(records, "__file__", str(folder / "records.py"))
    return folder


def test_a_record_says_how_it_was_made(tmp_path, repository):
    written = records.write(
        "wer", what="test", figures={"wer": 9.5}, model="m", data="d", seed=3, interval=(9.0, 10.0), folder=tmp_path
    )
    (found,) = records.read(tmp_path / "wer.jsonl")
    assert found == written
    assert found["figures"] == {"wer": 9.5}
    assert (found["model"], found["data"], found["seed"], found["interval"]) == ("m", "d", 3, [9.0, 10.0])
    assert len(found["commit"]) == 40
    assert "cores" in found["machine"]
    assert found["command"]
    assert found["date"].endswith("+00:00")


def test_a_record_names_no_machines_folders(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("sys.argv", ["/bin/lpa", "evaluate", "--model", str(tmp_path / "m"), "--limit", "2"])
    written = records.write("wer", what="test", figures={"wer": 9.5}, folder=tmp_path)
    assert written["command"] == "lpa evaluate --model ../m --limit 2"


def test_changes_are_told(repository):
    clean = records.commit()
    (repository / "file").write_text("two")
    assert records.commit() == f"{clean}+dirty"


def test_records_are_no_changes(repository):
    (repository / "bench.jsonl").write_text("{}\n")
    subprocess.run(["git", "-C", str(repository), "add", "bench.jsonl"], check=True)
    assert len(records.commit()) == 40


def test_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("LPA_COMMIT", raising=False)
    with pytest.raises(LpaError, match="lacks commit"):
        records.write("wer", what="test", figures={"wer": 1}, folder=tmp_path)
    assert not (tmp_path / "wer.jsonl").exists()
    monkeypatch.setenv("LPA_COMMIT", "abc")
    assert records.write("wer", what="test", figures={"wer": 1}, folder=tmp_path)["commit"] == "abc"


def test_many_processes_append_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("LPA_COMMIT", "abc")
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        list(pool.map(add, [tmp_path] * 24, range(24)))
    assert sorted(r["figures"]["wer"] for r in records.read(tmp_path / "wer.jsonl")) == list(range(24))


@pytest.mark.parametrize("field", ["commit", "command"])
def test_what_cannot_be_repeated_is_refused(tmp_path, repository, field):
    record = records.write("wer", what="test", figures={"wer": 1}, folder=tmp_path)
    path = tmp_path / "wer.jsonl"
    for damaged in ({**record, field: ""}, {k: v for k, v in record.items() if k != field}):
        path.write_text(json.dumps(record) + "\n" + json.dumps(damaged) + "\n")
        with pytest.raises(LpaError, match=rf"wer\.jsonl:2 lacks {field}"):
            records.read(path)


def test_damaged_files(tmp_path):
    with pytest.raises(LpaError, match="not there"):
        records.read(tmp_path / "none.jsonl")
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(LpaError, match=r"a\.jsonl:1 is not JSON"):
        records.read(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("3\n")
    with pytest.raises(LpaError, match="not a record"):
        records.read(tmp_path / "a.jsonl")


def test_a_figure_that_is_no_number_is_refused(tmp_path, repository):
    with pytest.raises(LpaError, match="not a number"):
        records.write("wer", what="test", figures={"wer": float("nan")}, folder=tmp_path)
