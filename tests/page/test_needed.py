"""The tests of pages skip without a browser, but not where one is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", ["test_page.py", "test_show_page.py"])
@pytest.mark.parametrize("needed", ["", "1"])
def test_no_browser_is_an_error_where_one_is_needed(file, needed):
    environment = {**os.environ, "PATH": "", "LPA_NEED_BROWSER": needed}
    command = [sys.executable, "-m", "pytest", "-rs", str(HERE / file), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert "chromium is not installed" in done.stdout
    assert done.returncode == (pytest.ExitCode.INTERRUPTED if needed else pytest.ExitCode.NO_TESTS_COLLECTED)
