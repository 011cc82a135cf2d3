"""Software checks: torch, NCCL and its features, a C compiler, the shim, MPS."""

from __future__ import annotations

from weft.doctor.check import Check
from weft.doctor.machine import GpuFacts, Machine
from weft.errors import UnavailableError, UsageError

RANKS_PER_GPU = (2, 30)
"""First NCCL version that supports several ranks on one GPU."""
COPY_ENGINES = (2, 28)
"""First NCCL version with copy-engine collectives."""
_REINSTALL = "`pip install --force-reinstall --no-deps .` in a checkout of weft"


def torch(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether torch is installed and matches the driver."""
    found = machine.torch()
    if found is None:
        return [Check("torch", "skip", "not installed", "pip install torch on the machine that trains")]
    build = f"CUDA {found.cuda}" if found.cuda else f"ROCm {found.hip}" if found.hip else "CPU only"
    detail = f"{found.version} ({build})"
    if build == "CPU only" and facts.gpus:
        return [
            Check(
                "torch", "warn", f"{detail}, on a machine with a GPU", "install a CUDA or ROCm build of torch"
            )
        ]
    if found.cuda and facts.cuda and int(found.cuda.split(".")[0]) > facts.cuda["version"][0]:
        driver = ".".join(map(str, facts.cuda["version"]))
        fix = f"update the NVIDIA driver, or install torch built for CUDA {facts.cuda['version'][0]}"
        return [Check("torch", "fail", f"{detail}, but the driver supports CUDA {driver} at most", fix)]
    return [Check("torch", "ok", detail)]


def nccl(machine: Machine, facts: GpuFacts) -> list[Check]:
    """The NCCL version and its features."""
    path = machine.nccl(machine.torch())
    if path is None:
        return [Check("nccl", "skip", "no libnccl found", "pip install torch (it includes NCCL)")]
    try:
        number = machine.ask("nccl", str(path))["version"]
    except UnavailableError as error:
        return [Check("nccl", "fail", str(error), "reinstall torch, or remove NCCL from LD_PRELOAD")]
    # 2.9 and later: major·10000 + minor·100 + patch; before: major·1000 + …, too old to matter here.
    version = (
        (number // 10000, number // 100 % 100) if number >= 10000 else (number // 1000, number // 100 % 10)
    )
    text = f"{version[0]}.{version[1]}.{number % 100} ({path})"
    can = [
        name
        for name, since in (
            ("copy-engine collectives", COPY_ENGINES),
            ("several ranks per GPU", RANKS_PER_GPU),
        )
        if version >= since
    ]
    if len(can) == 2:
        return [Check("nccl", "ok", f"{text}: {' and '.join(can)}")]
    lacks = "no copy-engine collectives (2.28), " if version < COPY_ENGINES else "copy-engine collectives, "
    fix = "only if you need them: pip install a newer nvidia-nccl-cu12 (or -cu13)"
    return [Check("nccl", "ok", f"{text}: {lacks}one rank per GPU only (2.30 allows several)", fix)]


def collective_rules(machine: Machine, facts: GpuFacts) -> list[Check]:
    """How a policy's rules for collectives (comm.rules) would reach NCCL, and why."""
    from weft.shim import communicators

    name, path = "collective rules", machine.nccl(machine.torch())
    if path is None:
        return [Check(name, "skip", "no libnccl found", "pip install torch (it includes NCCL)")]
    if path.name.startswith("librccl"):
        text = f"not tested with {path.name}: rules that it does not ask weft's tuner plugin for are counted"
        return [Check(name, "skip", text)]
    try:
        code = machine.ask("nccl", str(path))["version"]
    except UnavailableError as error:
        return [Check(name, "skip", f"NCCL's version is not known: {error}", "see the check of nccl")]
    way, tuner = communicators.expected_path(code, machine.env)
    detail = communicators.path_reason(way, communicators.nccl_version(code), tuner)
    given = machine.env.get("NCCL_TUNER_PLUGIN")
    if tuner and given:
        detail += f"; weft forwards questions to NCCL_TUNER_PLUGIN={given}"
    if way == "tuner" and tuner and tuner < 6:
        detail += f"; interface v{tuner} is not tested with several ranks on a real NCCL"
    fix = "" if way == "config" else "for all of them: pip install nvidia-nccl-cu13 2.31 or newer"
    return [Check(name, "skip" if way == "none" else "ok", detail, fix)]


def compiler(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether a C compiler works."""
    for name in (machine.env.get("CC", ""), "cc", "gcc", "clang"):
        path = machine.which(name) if name else None
        if path:
            code, out, error = machine.run([path, "--version"])
            if code == 0:
                return [Check("compiler", "ok", (out.splitlines() or [path])[0].strip())]
            fix = "set CC to a working C compiler"
            return [Check("compiler", "warn", f"{path} does not run: {error.strip() or code}", fix)]
    fix = "install gcc or clang, then reinstall weft to build the shim"
    return [Check("compiler", "warn", "no C compiler; it is needed only to build the shim", fix)]


def shim(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether the shim is built and loads."""
    try:
        path = machine.shim()
    except (UnavailableError, ImportError) as error:
        fix = f"install a C compiler, then {_REINSTALL}"
        return [Check("shim", "fail", str(error), fix)]
    kept = machine.env.get("LD_PRELOAD", "")
    try:
        machine.preload(dict(machine.env) | {"LD_PRELOAD": f"{path}:{kept}" if kept else str(path)})
    except UnavailableError as error:
        fix = f"{_REINSTALL}, on this machine"
        return [Check("shim", "fail", str(error), fix)]
    except UsageError as error:
        return [Check("shim", "fail", str(error), "unset LD_PRELOAD")]
    return [Check("shim", "ok", f"built and loadable ({path.name})")]


def mps(machine: Machine, facts: GpuFacts) -> list[Check]:
    """Whether MPS is available and running."""
    control = machine.which("nvidia-cuda-mps-control")
    if control is None:
        why = "nvidia-cuda-mps-control is not on PATH; it is needed only for several processes on one GPU"
        return [Check("mps", "skip", why, "install the NVIDIA driver's utilities" if facts.nvidia else "")]
    code, _, _ = machine.run([control], "get_server_list\n")
    if code == 0:
        fix = "to stop it: echo quit | nvidia-cuda-mps-control"
        return [Check("mps", "ok", "the control daemon is running: processes share a GPU concurrently", fix)]
    fix = "only for several processes on one GPU: nvidia-cuda-mps-control -d"
    return [Check("mps", "ok", "available but not running: processes on one GPU are time-sliced", fix)]
