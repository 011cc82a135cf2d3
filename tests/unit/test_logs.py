"""Diagnostics: silent by default, on stderr on request, and never a failure of the program."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**_environment(), **env},
    )


def _environment():
    import os

    return {k: v for k, v in os.environ.items() if k != "WEFT_LOG"}


SAY = "import logging; from weft import logs; logs.show(); logging.getLogger('weft.tuning').debug('a trial')"


def test_nothing_is_shown_and_no_handler_added_unless_asked():
    done = run(SAY + "; print(logging.getLogger('weft').handlers)")
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", True), ("DEBUG", True), ("1", True), ("warning", False)]
)
def test_the_variable_chooses_the_level(level, shown):
    assert ("weft.tuning: a trial" in run(SAY, WEFT_LOG=level).stderr) == shown


def test_a_line_is_printed_once_also_where_the_program_logs():
    code = "import logging; logging.basicConfig(level=0); " + SAY + "; logs.show('debug')"
    assert run(code, WEFT_LOG="debug").stderr.count("a trial") == 1


def test_a_closed_stderr_is_not_the_programs_problem():
    code = "import sys, os; from weft import logs; logs.show('debug'); os.close(2); sys.stderr.close(); "
    code += "import logging; logging.getLogger('weft').debug('x'); print('on it goes')"
    assert "on it goes" in run(code).stdout


def test_the_option_shows_what_the_command_decides():
    command = [
        sys.executable,
        "-m",
        "weft",
        "-v",
        "tune",
        "cb-ar",
        "--device",
        "sim:h100",
        "--iterations",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
    assert "weft.tuning.lab: cb-ar on sim:h100" in done.stderr
