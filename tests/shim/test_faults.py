"""Each call of the driver and of NCCL fails in turn: the program never sees a failure of weft's own calls."""

from __future__ import annotations

import subprocess

import pytest
from building import HERE, compile_c
from test_nccl_routes import fake_nccl  # noqa: F401 (a fixture)

from weft.policy import CommRule, Policy
from weft.shim.inject import Job

POLICIES = {
    "none": Policy(),
    "always": Policy(residency=2, priority="high"),
    "overlap": Policy(residency=2, priority="high", when="overlap", head_start_us=5),
    "placed": Policy(priority="high", head_start="placed"),
    "rules": Policy(comm_rules=(CommRule(ctas=4, algorithm="tree", protocol="ll"),), max_ctas=16),
}


@pytest.fixture(scope="module")
def sweep(fake_driver, fake_nccl, tmp_path_factory):  # noqa: F811
    program = tmp_path_factory.mktemp("sweep") / "sweep"
    libraries = (f"-L{fake_driver}", f"-L{fake_nccl}", "-lcuda", "-lnccl", "-ldl", "-rdynamic")
    return compile_c(program, str(HERE / "sweep.c"), *libraries)


def outcomes(program, what, env, step=1) -> list[str]:
    command = [program, what, str(step)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", ["cuda", "nccl"])
def test_a_call_that_fails_for_weft_is_not_seen_to_fail(sweep, fake_nccl, environment, what, policy):  # noqa: F811
    env = {**environment, "LD_LIBRARY_PATH": f"{fake_nccl}:{environment['LD_LIBRARY_PATH']}"}
    native = outcomes(sweep, what, env)
    with Job(POLICIES[policy]) as job:
        under = outcomes(sweep, what, job.environment(env))
    calls_more = what == "cuda" or policy != "rules"  # under rules weft makes no NCCL calls of its own
    assert len(under) - len(native) >= calls_more
    assert len(native) > 10
    assert native[-1] in under  # nothing failed
    assert set(under) <= set(native)


@pytest.mark.parametrize("policy", ["overlap", "placed"])
def test_sanitizers_find_nothing_in_the_paths_of_failure(
    sanitized,
    fake_driver,
    fake_nccl,  # noqa: F811
    environment,
    tmp_path,
    policy,
):
    libraries = (f"-L{fake_driver}", f"-L{fake_nccl}", "-lcuda", "-lnccl")
    program = sanitized(tmp_path / "sweep", str(HERE / "sweep.c"), *libraries)
    with Job(POLICIES[policy]) as job:
        env = {**job.environment(environment), "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}
        env["LD_LIBRARY_PATH"] = f"{fake_nccl}:{env['LD_LIBRARY_PATH']}"
        del env["LD_PRELOAD"]
        outcomes(program, "cuda", env, step=11)
        outcomes(program, "nccl", env)
