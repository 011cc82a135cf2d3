"""Queries that run in a child process: a broken driver or library crashes the child, not `weft doctor`.

`ask_child` starts the child; `answer_query` runs in it and writes one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.errors import UnavailableError, WeftError
from weft.gpu.driver import load_driver
from weft.gpu.placement import measure_placement
from weft.gpu.priority import measure_priority
from weft.gpu.probe import Gpu, cuda_gpus, probe

CHILD_LIMIT_S = 25.0
"""Time limit of a query, in seconds."""
MARK = "weft-answer "
"""Prefix of the line with the answer: libraries may write other lines to stdout."""


def ask_child(topic: str, *arguments: str, limit_s: float = CHILD_LIMIT_S) -> dict[str, Any]:
    """The answer of the child. Raises UnavailableError with the reason if it fails, crashes or hangs."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    start = "import sys; from weft.doctor.child import answer_query; answer_query(sys.argv[1:])"
    command = [sys.executable, "-c", start, topic, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"no answer within {limit_s:.0f} s; is the driver hung?") from None
    if done.returncode:
        reason = _last_line(done.stderr)
        raise UnavailableError(
            f"the test process {_ended(done.returncode)}" + (f": {reason}" if reason else "")
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise UnavailableError("the test process exited without an answer")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    if "error" in result:
        raise UnavailableError(result["error"])
    return result


def _ended(code: int) -> str:
    try:
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    except ValueError:
        return f"was killed by signal {-code}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _gpus() -> dict[str, Any]:
    try:
        driver = load_driver()
        gpus = cuda_gpus(driver)
    except UnavailableError as error:
        return {"cuda": None, "cuda_error": str(error), "gpus": [_summary(gpu) for gpu in probe()]}
    cuda = {"version": list(driver.cuda_version()), "green_contexts": driver.has("cuGreenCtxCreate")}
    return {"cuda": cuda, "cuda_error": None, "gpus": [_summary(gpu) for gpu in gpus]}


def _summary(gpu: Gpu) -> dict[str, Any]:
    facts = ("vendor", "arch", "sms", "memory_bytes")
    return {k: v for k, v in asdict(gpu).items() if k != "spec"} | {k: getattr(gpu.spec, k) for k in facts}


def _priority() -> dict[str, Any]:
    effect = measure_priority(load_driver())
    return asdict(effect) | {"ratio": effect.ratio, "conclusive": effect.conclusive}


def _placement() -> dict[str, Any]:
    effect = measure_placement(load_driver())
    return asdict(effect) | {"works": effect.works}


def _nccl(library: str) -> dict[str, Any]:
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"{library} does not load as NCCL: {error}") from error
    if failed:
        raise UnavailableError(f"ncclGetVersion of {library} failed with {failed}")
    return {"version": version.value}


TOPICS: dict[str, Callable[..., dict[str, Any]]] = {
    "gpus": _gpus,
    "priority": _priority,
    "placement": _placement,
    "nccl": _nccl,
}
"""Queries by name."""


def answer_query(arguments: list[str]) -> None:
    """Run a query in this process and print its answer; `arguments`: topic, then its arguments."""
    try:
        result = TOPICS[arguments[0]](*arguments[1:])
    except WeftError as error:
        result = {"error": str(error)}
    sys.stdout.write(f"\n{MARK}{json.dumps(result)}\n")
