"""Two hosts, simulated by two connected network namespaces: torchrun's rendezvous, and live tuning.

Needs `unshare`, `nsenter` and `ip`, and a kernel that lets this user make namespaces; skips otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live_scenarios import PATIENT

pytest.importorskip("torch")

HERE = Path(__file__).parent
ADDRESSES = ("10.234.77.1", "10.234.77.2")

# The first argument is the folder; HOST0 and HOST1 are the commands of the two hosts.
NETWORK = f"""
set -eu
ip link set lo up
unshare --net -- sleep 600 </dev/null >/dev/null 2>&1 &
other=$!
trap 'kill $other 2>/dev/null || true' EXIT
for _ in $(seq 1000); do
  [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
  sleep 0.05
done
there="nsenter --net=/proc/$other/ns/net --"
ip link add weft0 type veth peer name weft1 netns $other
ip addr add {ADDRESSES[0]}/24 dev weft0
ip link set weft0 up
$there ip link set lo up
$there ip addr add {ADDRESSES[1]}/24 dev weft1
$there ip link set weft1 up
echo "cable is up" >&2
sh -c "$HOST0" >"$1/host0.log" 2>&1 &
first=$!
$there sh -c "$HOST1" >"$1/host1.log" 2>&1 &
second=$!
code=0
wait $first || code=$?
wait $second || code=$?
exit $code
"""


def command(host: int, folder: Path) -> str:
    """What is typed on one host: GLOO_SOCKET_IFNAME is what one sets on a host with several networks."""
    words = [
        "env",
        f"GLOO_SOCKET_IFNAME=weft{host}",
        f"WEFT_STORE={folder}/store{host}",
        *(sys.executable, "-m", "weft", "run", "--tune", "--stats", f"{folder}/stats{host}.json", "--"),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--node-rank", str(host), "--rdzv-backend", "c10d", "--rdzv-id", "weft"),
        *("--rdzv-endpoint", f"{ADDRESSES[0]}:29417", "--rdzv-conf", f"is_host={int(host == 0)}"),
        *("--local-addr", ADDRESSES[host]),
        *(str(HERE.parents[1] / "examples" / "ddp.py"), "--width", "32", "--length", "16", "--steps", "240"),
    ]
    return " ".join(words)


def namespaces(script: str, folder: Path, env: dict[str, str], timeout: float) -> int:
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    line = ["unshare", "--map-root-user", "--net", "--kill-child", "--fork", "--"]
    command = [*line, "bash", "-c", script, "bash", str(folder)]
    with subprocess.Popen(
        command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=timeout)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # no process outlives the test
    if "cable is up" not in said:
        pytest.skip(f"this machine does not allow two network namespaces: {said.strip()[:200]}")
    return process.returncode


@pytest.mark.timeout(300)
def test_a_job_on_two_hosts_is_tuned_as_one(tmp_path):
    env = {
        "HOST0": command(0, tmp_path),
        "HOST1": command(1, tmp_path),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "WEFT_TUNE_CONTROLS": "examples_controls:VirtualControls",
        **PATIENT,
        "RECORD": str(tmp_path),
    }
    code = namespaces(NETWORK, tmp_path, env, timeout=280)
    logs = "\n".join((tmp_path / f"host{host}.log").read_text()[-3000:] for host in (0, 1))
    assert code == 0, logs
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, "both hosts change policy at the same step"
    tried = {json.dumps(policy, sort_keys=True) for policy in first["policies"]}
    assert len(tried) > 2, logs
    assert first["end"]["comm"]["max_ctas"] == 16, logs
    tunings = [json.loads((tmp_path / f"stats{host}.json").read_text())["tuning"] for host in (0, 1)]
    assert tunings[0]["state"] == "kept", tunings[0]["text"]
    assert tunings[0]["policy"]["comm"]["max_ctas"] == tunings[1]["policy"]["comm"]["max_ctas"] == 16
