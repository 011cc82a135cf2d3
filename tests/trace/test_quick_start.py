"""`weft analyze` parses plain command lines without typer, with the same result."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st
from trace_building import GEMM, TraceBuilder

from properties import examples
from weft.cli import analyze, quick
from weft.cli.main import build_app

WORDS = st.sampled_from(
    ["a.json", "-", "--json", "--against", "--html", "--perfetto", "--comm", "out", "x=1", "--", "-x", "--help", "--html=f", "", "--js"]
)  # fmt: skip


def test_the_table_is_that_of_the_command():
    command = typer.main.get_command(build_app(["analyze"])).commands["analyze"]
    options = {p.opts[0]: p for p in command.params if p.param_type_name == "option" and p.name != "help"}
    assert set(options) == {*quick.FLAGS, *quick.LISTS, *quick.VALUES}
    for table, is_flag, multiple in (
        (quick.FLAGS, True, False),
        (quick.LISTS, False, True),
        (quick.VALUES, False, False),
    ):
        for word, name in table.items():
            assert (options[word].name, bool(options[word].is_flag), options[word].multiple) == (
                name,
                is_flag,
                multiple,
            )


@examples(300)
@given(words=st.lists(WORDS, max_size=6))
def test_what_is_plain_means_the_same_to_typer(words):
    """The quick parser gives a command line the same meaning as typer."""
    found = quick.plain_arguments(["analyze", *words])
    if found is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(analyze, "run_analysis", lambda *given: calls.append(given))
        build_app(["analyze"])(args=["analyze", *words], standalone_mode=False)
    names = ("traces", "against", "as_json", "html", "perfetto", "comm")
    by_typer = dict(zip(names, calls[0], strict=True))
    defaults = {"against": None, "as_json": False, "html": None, "perfetto": None, "comm": None}
    assert {**defaults, **found} == {**by_typer, "against": by_typer["against"] or None}


@pytest.mark.parametrize(
    "words", [["a", "--json"], ["a", "b", "--against", "c", "--against", "d"], ["-"], ["a", "--comm", "x"]]
)
def test_usual_command_lines_are_plain(words):
    assert quick.plain_arguments(["analyze", *words]) is not None


@pytest.mark.parametrize(
    "words", [[], ["--json"], ["a", "--html"], ["a", "--html", "--json"], ["a", "--help"], ["a", "--jsn"]]
)
def test_anything_else_is_left_to_typer(words):
    assert quick.plain_arguments(["analyze", *words]) is None


def test_neither_typer_nor_the_simulators_page_is_loaded(tmp_path):
    built = TraceBuilder()
    built.gpu(GEMM, 0, 1_000)
    built.collective(500, 2_000)
    path = built.write(tmp_path / "t.json")
    program = (
        "import sys\n"
        "from weft.cli.main import main\n"
        "try:\n    main(['analyze', '--json', sys.argv[1]])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'typer', 'click', 'pydantic', 'rich', 'jinja2', 'sqlite3', 'torch', 'subprocess'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stderr.strip() == "[]"
