"""What several files of tests here need."""

import io
import sys

import pytest

from lpa import cli


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command as main() does: (exit code, stdout, stderr). In this process: torch takes seconds to import."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lpa", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return call
