"""The command line and the JSON that it writes: everything in the golden files is still there.

New commands, options and keys need no new golden files. contract.py writes them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import contract
import pytest
from schema_checks import schema_problems

GOLDEN = Path(__file__).parents[1] / "golden"
HELP = {path.stem: path.read_text() for path in sorted((GOLDEN / "help").glob("*.txt"))}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return contract.help_texts()


def test_no_command_is_gone(texts):
    assert HELP.keys() <= texts.keys()
    assert set(contract.commands_of(HELP["weft"])) == HELP.keys() - {"weft"}


@pytest.mark.parametrize("command", HELP)
def test_no_option_is_gone_and_none_changed_whether_it_takes_a_value(texts, command):
    before, now = contract.options_of(HELP[command]), contract.options_of(texts[command])
    assert len(before) >= 2
    assert before.items() <= now.items()


@pytest.mark.parametrize("command", HELP)
def test_arguments_are_in_their_places_and_no_new_one_is_required(texts, command):
    before, now = contract.arguments_of(HELP[command]), contract.arguments_of(texts[command])
    assert now[: len(before)] == before
    assert all(word.startswith("[") for word in now[len(before) :])


def test_the_list_of_commands_cuts_no_summary_off(texts):
    assert [line for line in texts["weft"].splitlines() if line.endswith("...")] == [
        "Usage: weft [OPTIONS] COMMAND [ARGS]..."
    ]


def test_every_golden_document_has_a_case():
    assert {path.stem for path in (GOLDEN / "json").glob("*.json")} == contract.CASES.keys()


@pytest.mark.parametrize("name", contract.CASES)
def test_no_key_is_gone_and_none_changed_its_type(name, tmp_path):
    if name == "run_tune_stats_job":
        pytest.importorskip("torch")
    if name.startswith("run") and shutil.which("cc") is None:
        pytest.skip("the fake driver needs a C compiler")
    case = contract.CASES[name]
    golden = json.loads((GOLDEN / "json" / f"{name}.json").read_text())
    document = case.make(tmp_path)
    assert contract.lost(golden, contract.shape(case, document)) == []
    assert schema_problems(name, document) == []


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"a": [{"b": 1}, {"b": 2}]}, [".c is gone"]),
        ({"a": [{"b": 1}, {}], "c": None}, [".a[].b was number, is optional number"]),
        ({"a": [{"b": "1"}, {"b": 2}], "c": ""}, [".a[].b was number, is number or string"]),
        ({"a": [{"b": None}], "c": 1}, [".a[].b was number, is null"]),
        ({"a": [], "c": 1}, [".a[] is gone", ".a[].b is gone"]),
        ({"a": [{"b": 1.5, "new": 1}], "c": 2, "d": {}}, []),
    ],
)
def test_losses_are_found_and_additions_are_none(now, told):
    case = contract.Case(lambda folder: None)
    before = contract.shape(case, {"a": [{"b": 1}, {"b": 0}], "c": None})
    assert contract.lost(before, contract.shape(case, now)) == told


def test_a_lost_option_and_a_flag_that_now_takes_a_value_are_found():
    text = HELP["run"]
    options = contract.options_of(text)
    assert options["-q"] is options["--quiet"] is options["--tune"] is False
    assert options["--policy"] is options["--head-start"] is True
    assert "--stats" not in contract.options_of(text.replace("--stats FILE", "--statistics FILE"))
    assert contract.options_of(text.replace("--tune     ", "--tune FILE"))["--tune"] is True
    assert contract.options_of(HELP["plan"]).keys() >= {"--sequence-parallel", "--no-sequence-parallel"}
