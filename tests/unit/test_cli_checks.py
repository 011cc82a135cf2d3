"""What could not be written, or is no time, is refused before a command starts its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from weft.cli.main import main


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


@pytest.mark.parametrize("arguments", [("reproduce", "2606.09200", "--json"), ("analyze", "-")], ids=" ".join)
def test_ctrl_c_is_one_line_whichever_way_the_command_line_was_read(arguments):
    """The first is read by typer, the second without it."""
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
