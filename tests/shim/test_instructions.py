"""The cost of a launch and of a collective in instructions, which other load on the machine cannot change."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from building import HERE, compile_c
from test_nccl_routes import fake_nccl  # noqa: F401 (a fixture)

from weft.policy import Policy
from weft.shim.inject import Job

pytestmark = pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")

# Instructions of a launch over those of the fake driver, measured 172, 400 and 506 (gcc 12, x86-64), plus a tenth for
# other compilers. 1 of 8 launches is a collective.
MOST = {
    "no policy": (Policy(), 190),
    "residency and priority": (Policy(residency=3, priority="high"), 440),
    "overlap and head start": (Policy(residency=3, priority="high", when="overlap", head_start_us=5), 556),
}
MOST_PER_COLLECTIVE = 335  # measured 327
MOST_LINES = 1.8  # measured 1.4: the counter and, usually, the kernel's row in the table
MOST_COLD_LINES = 13  # measured 11.0: also data of the shim, of the thread and of the job's files
FEW, MANY = 3_000, 9_000
TRIED = (
    Policy(residency=2),
    Policy(residency=3, priority="high", when="overlap", head_start_us=5),
    Policy(head_start="placed", priority="high"),
    Policy(sm_reserve=24),
)


@pytest.fixture(scope="module")
def hammer(fake_driver, tmp_path_factory):
    program = tmp_path_factory.mktemp("counted") / "hammer"
    return compile_c(program, str(HERE / "hammer.c"), f"-L{fake_driver}", "-lcuda", "-lpthread")


def instructions(command: list[str], env: dict[str, str], *options: str) -> int:
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *options]
    done = subprocess.run([*valgrind, *command], env=env, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found, done.stderr
    return int(found[1])


def each(program, env, *more: str) -> float:
    """Instructions per call, from the difference of two runs, so that startup does not count."""
    counts = [instructions([str(program), "1", str(n), *more], env) for n in (FEW, MANY)]
    return (counts[1] - counts[0]) / (MANY - FEW)


@pytest.mark.parametrize("name", MOST)
def test_a_launch_takes_no_more_instructions_than_it_did(hammer, environment, name):
    policy, most = MOST[name]
    direct = each(hammer, environment)
    with Job(policy) as job:
        under = each(hammer, job.environment(environment))
    assert 0 < under - direct < most


def after_trials(program, job: Job, env: dict[str, str], launches: int) -> int:
    """Instructions of a program that, before its launches, was traced and ran under several policies."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(program)]
    command += ["1", str(launches), "turns", str(len(TRIED) + 1)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for policy in (*TRIED, Policy()):
            assert process.stdout.readline() == "ready\n"
            job.set_policy(policy)
            process.stdin.write("\n")
            process.stdin.flush()
        said = process.communicate(timeout=100)[1]
    assert process.returncode == 0, said
    found = re.search(r"Collected : (\d+)", said)
    assert found, said
    return int(found[1])


def test_a_launch_costs_what_it_cost_before_levers_and_the_tracer_were_used(hammer, environment):
    with Job() as job:
        before = each(hammer, job.environment(environment))
    counts = []
    for launches in (FEW, MANY):
        with Job() as job:
            counts.append(after_trials(hammer, job, job.environment(environment), launches))
            done = job.collect()
        assert done["policy_changes"] == len(TRIED) + 1
        assert done["shaped"] > 0
    after = (counts[1] - counts[0]) / (MANY - FEW)
    assert abs(after - before) < 0.01 * before


def test_many_kernels_cost_a_launch_nothing(hammer, environment):
    policy, most = MOST["residency and priority"]
    direct = each(hammer, environment, "run", "20000", "2000")
    with Job(policy) as job:
        under = each(hammer, job.environment(environment), "run", "20000", "2000")
    assert under - direct < most


def lines(program, env, launches: int, *more: str) -> int:
    """Cache lines missing from the first-level data cache."""
    caches = ("--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64", "--LL=1048576,16,64")
    valgrind = ["valgrind", "--tool=cachegrind", "--cachegrind-out-file=/dev/null", *caches]
    command = [*valgrind, str(program), "1", str(launches), *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = re.search(r"D1\s+misses:\s+([\d,]+)", done.stderr)
    assert found, done.stderr
    return int(found[1].replace(",", ""))


def lines_of_shim(program, env, few: int, many: int, *more: str) -> float:
    """Cache lines that the shim adds to a launch."""

    def each_launch(env) -> float:
        return (lines(program, env, many, *more) - lines(program, env, few, *more)) / (many - few)

    direct = each_launch(env)
    with Job() as job:
        return each_launch(job.environment(env)) - direct


def test_a_launch_of_one_of_many_kernels_touches_few_lines(hammer, environment):
    """A Python program fills the caches between launches; then cache lines cost more than instructions."""
    assert 0 < lines_of_shim(hammer, environment, FEW, MANY, "run", "2000", "2000") < MOST_LINES


def test_a_launch_after_which_the_caches_are_cold_touches_few_lines(hammer, environment):
    rounds = 9
    assert 0 < lines_of_shim(hammer, environment, 20, 60, "cold", "500", "500") / rounds < MOST_COLD_LINES


def test_a_collective_takes_no_more_instructions_than_it_did(fake_nccl, environment, tmp_path):  # noqa: F811
    libraries = (f"-L{fake_nccl}", "-lnccl", "-ldl", "-lpthread", "-rdynamic")
    program = compile_c(tmp_path / "hammer", str(HERE / "nccl_hammer.c"), *libraries)
    env = {**environment, "LD_LIBRARY_PATH": f"{fake_nccl}:{environment['LD_LIBRARY_PATH']}"}
    rounds = 9
    direct = each(program, env, "time") / rounds
    with Job() as job:
        under = each(program, job.environment(env), "time") / rounds
    assert 0 < under - direct < MOST_PER_COLLECTIVE


def test_a_graph_costs_by_its_kernels_and_not_by_its_nodes(fake_driver, environment, tmp_path):
    program = compile_c(tmp_path / "graph", str(HERE / "graph_hammer.c"), f"-L{fake_driver}", "-lcuda")
    launches = 500
    with Job() as job:
        env = job.environment(environment)
        few, many = (
            instructions([str(program), str(nodes), str(launches)], env, "--toggle-collect=replay")
            for nodes in (2, 120)
        )
        kernels = {k["name"]: k["launches"] for k in job.collect()["kernels"]}
    assert kernels == dict.fromkeys(("gemm", "norm"), (launches + 1) * (1 + 60))
    assert 0 < few <= many < 1.02 * few
