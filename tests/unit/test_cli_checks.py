"""Outputs that cannot be written and invalid times are refused before a command starts its work."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from weft.cli.main import main
from weft.errors import UnavailableError


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    output = capsys.readouterr()
    assert (ended.value.code, output.out, len(output.err.splitlines())) == (2, "", 1)
    return output.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("reproduce", "2606.09200", "--html"),
        ("tune", "cb-ar", "--device", "sim:a40", "--out"),
        ("tune", "cb-ar", "--device", "sim:a40", "--html"),
        ("explore", "--gemm", "8192x8192x8192", "--device", "sim:h100", "--html"),
        ("calibrate", "--out"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path, arguments):
    assert f"{arguments[-1]} {tmp_path}: cannot write" in refused(capsys, *arguments, str(tmp_path))
    nowhere = tmp_path / "none" / "file"
    assert "there is no folder" in refused(capsys, *arguments, str(nowhere))


@pytest.mark.parametrize("option", ["--html", "--perfetto"])
def test_analyze_refuses_it_before_a_trace_is_read(capsys, tmp_path, option):
    trace = tmp_path / "trace.json"
    trace.write_text("nonsense")
    nowhere = tmp_path / "none" / "file"
    assert "there is no folder" in refused(capsys, "analyze", str(trace), option, str(nowhere))


@pytest.mark.parametrize("seconds", ["nan", "-1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("reproduce", "2512.10236", "--budget"),
        ("tune", "cb-ar", "--device", "sim:a40", "--budget"),
        ("bench", "quick", "--device", "sim:h100", "--budget"),
        ("bench", "quick", "--device", "sim:h100", "--deadline"),
        ("calibrate", "--budget"),
    ],
    ids=" ".join,
)
def test_what_is_no_time_is_refused(capsys, arguments, seconds):
    expected = f"weft: {arguments[-1]} {seconds}: give more than 0 seconds\n"
    assert refused(capsys, *arguments, seconds) == expected


def test_a_reading_that_is_not_known_names_all_readings(capsys):
    text = refused(capsys, "tune", "cb-ar", "--device", "sim:a40", "--reading", "nope")
    assert "use auto, lab or paper" in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("top nojob --policy broken.json", "policy broken.json"),
        ("top nojob --policy broken.json --off", "exclude each other"),
        ("doctor --job nojob", "no running job 'nojob'"),
        ("doctor --trace nowhere.json", "nowhere.json: no such file"),
        ("analyze nowhere.json --comm (", "--comm '(' is not a regular expression"),
        ("report nowhere --out nowhere/page.html", "--out nowhere/page.html: cannot write"),
        ("calibrate --gpu nogpu", "no GPU preset named 'nogpu'"),
        ("calibrate --gpu broken.json --out broken.json", "--out broken.json is the profile to start from"),
        ("explore --characterize --ranks 0", "ranks 0 is not valid"),
        ("explore --gemm 64x64x64 --device cuda --ranks 0", "ranks 0 is not valid"),
        ("explore --characterize --collective nosuch", "collective 'nosuch'"),
        ("bench quick --device sim:nogpu", "no GPU preset named 'nogpu'"),
        ("bench quick --device cuda --out broken.json", "broken.json is not a folder"),
        ("bench quick --device cuda --out broken.json/x", "broken.json is not a folder"),
        ("tune cb-ar --device sim:h100 --out x --html x", "--html x: --out writes there too"),
        ("run --tune --stats x --html x -- true", "--html x: --stats writes there too"),
        ("run --trace-steps 5 -- true", "--trace-steps needs --trace DIR"),
        ("top nojob --off --samples 2", "--samples counts"),
        ("plan --model llama3-8b --gpus 8 --html x.sh --launch x.sh", "--html writes there too"),
        ("plan --model gpt-175b --gpus 64 --tp 8 --launch x.toml --chakra c", "torchtitan has no flavor"),
        ("store export nowhere/x.json --store store.db", "store export nowhere/x.json: cannot write"),
    ],
)
def test_an_argument_that_is_wrong_in_itself_is_the_first_error(capsys, tmp_path, monkeypatch, line, said):
    """It is reported before anything is searched, measured, started or written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.monitor.jobs.running_jobs", list)
    monkeypatch.setattr("weft.doctor.diagnose", lambda **_: pytest.fail("the machine was examined first"))
    (tmp_path / "broken.json").write_text("{}")
    assert said in refused(capsys, *line.split())
    assert [path.name for path in tmp_path.iterdir()] == ["broken.json"]


def test_bench_without_a_gpu_says_that_and_nothing_else(capsys, tmp_path, monkeypatch):
    def no_gpu(*_: object, **__: object) -> None:
        raise UnavailableError("this machine has no GPU")

    monkeypatch.setattr("weft.execute.devices.open_executor", no_gpu)
    assert "no GPU" in refused(capsys, "bench", "quick", "--device", "cuda", "--out", str(tmp_path / "out"))


def test_no_result_and_no_store_is_overwritten(capsys, tmp_path):
    result = tmp_path / "plan.json"
    result.write_text('{"kind": "plan", "step_time_s": 1.0}')
    before = result.read_text()
    assert "is one of the results" in refused(capsys, "report", str(tmp_path), "--out", str(result))
    assert result.read_text() == before
    store = tmp_path / "store.db"
    store.touch()
    assert "the store itself" in refused(capsys, "store", "export", str(store), "--store", str(store))


@pytest.mark.parametrize("arguments", [("reproduce", "2606.09200", "--json"), ("analyze", "-")], ids=" ".join)
def test_ctrl_c_is_one_line_whichever_way_the_command_line_was_read(arguments):
    """typer parses the first, the quick parser the second."""
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "weft", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        awaited = b"weft.reproduce.resource_aware" if arguments[0] == "reproduce" else b"weft.trace"
        for line in process.stderr:  # until the command is at work
            if line.endswith(awaited + b"\n"):
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    said = [line for line in error.splitlines() if not line.startswith(b"import time:")]
    assert (process.returncode, out, said) == (130, b"", [b"weft: interrupted"])


def test_weft_alone_shows_its_help_line_by_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert any(line.split()[:1] == ["analyze"] for line in output.err.splitlines())


@pytest.mark.parametrize(
    "words",
    [
        "run --policy /dev/zero -- true",
        "plan --model llama3-8b --gpus 8 --cluster /dev/zero",
        "plan --gpus 8 --config /dev/zero",
        "store import /dev/zero --store none.db",
    ],
)
def test_a_file_without_an_end_is_refused(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert re.search(r"/dev/zero.* over \d+ MiB", refused(capsys, *words.split()))


def shell(script: str, tmp_path, **more: str) -> subprocess.CompletedProcess[str]:
    """`@` in a script stands for `weft`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script.replace("@", f"{sys.executable} -m weft")],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path), **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("words", ["--version", "schema policy", "node", "store --json --store none.db"])
def test_a_full_disk_is_one_line_and_a_reader_that_is_gone_is_none(tmp_path, words):
    full = shell(f"@ {words} > /dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (
        2,
        "weft: cannot write to standard output: No space left on device\n",
    )
    gone = shell(f"{{ sleep 0.1; @ {words}; }} | true", tmp_path)
    assert (gone.returncode, gone.stderr) == (1, "")


@pytest.mark.parametrize("columns", ["0", "1", "2"])
def test_a_terminal_without_a_size_gets_the_usual_width(tmp_path, columns):
    words = f"@ {PLAN}"
    narrow, usual = (
        shell(words, tmp_path, COLUMNS=columns),
        shell(words, tmp_path, COLUMNS="80"),
    )
    assert (narrow.returncode, narrow.stdout) == (0, usual.stdout), narrow.stderr
    assert shell("@ run -q -- sh -c 'echo $COLUMNS'", tmp_path, COLUMNS=columns).stdout == f"{columns}\n"


PLAN = "plan --model llama3-8b --gpus 64 --sharding zero3"


@pytest.mark.parametrize(
    "words", [PLAN, f"{PLAN} --json", "tune none.json --json", "-v doctor", "--version", "schema policy"]
)
def test_a_closed_standard_output_is_one_line_before_any_work(tmp_path, words):
    done = shell(f"@ {words} >&-", tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "weft: standard output is closed; redirect it to a file or /dev/null\n",
    )


def test_a_standard_output_that_is_only_for_reading_is_one_line(tmp_path):
    done = shell(f"@ {PLAN} 1< /dev/null", tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "weft: cannot write to standard output: Bad file descriptor\n",
    )


def test_closed_streams_do_not_stop_top(tmp_path):
    assert shell("@ top --samples 1 >&-", tmp_path).returncode == 0
    master, slave = pty.openpty()
    try:
        done = shell(f"@ top --samples 1 <&- > {os.ttyname(slave)}", tmp_path)
    finally:
        os.close(slave)
        os.close(master)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_current_folder_that_is_gone_is_named(tmp_path):
    done = shell("mkdir gone; cd gone; rmdir ../gone; @ run --trace out -- true", tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "current folder" in done.stderr


def test_schemas_are_listed_without_docstrings(tmp_path):
    done = shell("@ schema", tmp_path, PYTHONOPTIMIZE="2")
    assert (done.returncode, "policy" in done.stdout.split()) == (0, True), done.stderr
