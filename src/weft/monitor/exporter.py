"""`weft run --metrics`: a process, separate from the job, that serves the job's metrics to Prometheus.

There is one process per `weft run`, not one per rank. It reads the job's folder, so it runs no code in the
program. Under torchrun there is one `weft run` and one port per node. If each rank has its own `weft run`
(srun, mpirun, `torchrun --no-python weft run …`), the local rank is added to the port.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import UnavailableError, UsageError

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
READY = "ready"
_START_S = 30.0


@dataclass(frozen=True)
class Address:
    """Where metrics are served."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def metrics_address(text: str, env: Mapping[str, str]) -> Address:
    """`PORT` or `HOST:PORT` with the local rank added. Raises UsageError; the host must be an IP address."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"--metrics {text!r} is not a port; give one such as 9400, or 0.0.0.0:9400")
    host = host.strip("[]") or "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(f"--metrics {text!r}: {host!r} is not an IP address, such as 127.0.0.1") from None
    local = next((int(env[name]) for name in LOCAL_RANKS if env.get(name, "").isdecimal()), 0)
    if int(port) + local > 65535:
        raise UsageError(f"--metrics {text}: local rank {local} has no port left; give a lower one")
    return Address(host, int(port) + local)


class Exporter:
    """The process that serves the metrics of a job."""

    def __init__(self, folder: Path, address: Address) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise UnavailableError("--metrics needs prometheus_client: pip install prometheus_client")
        if not folder.is_dir():
            raise UnavailableError("--metrics needs the job's folder, and none can be written: set TMPDIR")
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        start = "import sys; from weft.monitor.exporter import serve_metrics; serve_metrics(*sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, str(folder), address.host, str(address.port), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C is for the program
            text=True,
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        said = self._process.stdout.readline().strip() if ready else "it did not start in time"
        if said != READY:
            self.stop()
            fix = "give another port, or an address of this machine"
            raise UnavailableError(f"--metrics cannot serve on {address}: {said}; {fix}")

    def stop(self) -> None:
        """End the process. `weft run` may already have collected its exit status, as that of any child."""
        with suppress(OSError):
            self._process.terminate()
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.stdout is not None:
            self._process.stdout.close()


def serve_metrics(folder: str, host: str, port: str, parent: str) -> None:
    """The main function of the process: serves until `weft run` ends."""
    from weft.shim import signals

    signals.die_with_parent(int(parent), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ALL)  # `weft run` blocks them
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from weft.monitor.jobs import describe_running
        from weft.monitor.metrics import JobCollector
        from weft.monitor.watch_job import JobWatch

        registry = CollectorRegistry()
        registry.register(JobCollector(JobWatch(describe_running(Path(folder)))))
        start_http_server(int(port), addr=host, registry=registry)
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        print(reason.splitlines()[0], flush=True)
        return
    print(READY, flush=True)
    threading.Event().wait()
