"""Many threads while the policy changes, also under sanitizers, which see what a test cannot."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import time

import pytest
from building import CSRC, HERE, ROOT, compile_c

from weft.policy import Policy, Rule
from weft.shim.inject import Job

POLICIES = (
    Policy(),
    Policy(residency=3, priority="high"),
    Policy(residency=2, when="overlap", head_start_us=5, rules=(Rule("gemm_3", 1), Rule("gemm_4", None))),
    Policy(priority="high", head_start_us=1),
    Policy(head_start="placed", priority="high"),
    Policy(head_start="placed", sm_reserve=8),
)


@pytest.fixture(scope="session")
def hammer(fake_driver, tmp_path_factory):
    """tests/shim/hammer.c, linked to the fake driver."""
    program = tmp_path_factory.mktemp("hammer") / "hammer"
    return compile_c(program, str(HERE / "hammer.c"), f"-L{fake_driver}", "-lcuda", "-lpthread")


def test_eight_threads_under_a_policy_that_keeps_changing(hammer, environment):
    threads, launches, hammers = 8, 2_000_000, 0
    policies = itertools.cycle(POLICIES)
    with Job(POLICIES[0]) as job:
        while hammers == 0 or (job.collect()["policy_changes"] < 3 and hammers < 20):
            hammers += 1  # a hammer that ends before this process runs again sees no change
            command = [hammer, str(threads), str(launches)]
            with subprocess.Popen(command, env=job.environment(environment)) as running:
                while running.poll() is None:
                    job.set_policy(next(policies))
                    time.sleep(0.01)
            assert running.returncode == 0
        stats = job.collect()
    assert stats["policy_changes"] > 2
    by_kernel = [k for k in stats["kernels"] if k["kind"] != "weft"]
    assert sum(k["launches"] for k in by_kernel) == hammers * threads * launches
    assert stats["comm_launches"] == hammers * threads * launches // 8
    assert 0 < stats["shaped"] < hammers * threads * launches
    assert stats["shape_failures"] == stats["priority_failures"] == stats["unknown"] == 0


def test_two_policies_in_a_row_leave_no_launch_under_the_first(fake_driver, environment, tmp_path):
    """The second may be written while a launch copies the first."""
    program = compile_c(
        tmp_path / "race", str(HERE / "policy_race.c"), f"-L{fake_driver}", "-lcuda", "-lpthread"
    )
    with Job(Policy(residency=2)) as job:
        command = [program, "3", "4000"]
        done = subprocess.run(command, env=job.environment(environment), capture_output=True, check=True)
    assert done.stdout == b"0\n"


@pytest.mark.parametrize(("policy", "launches"), [(Policy(residency=2), 500), (Policy(), 50_000)])
def test_more_threads_than_counters_lose_nothing(hammer, environment, policy, launches):
    with Job(policy) as job:
        subprocess.run([hammer, "40", str(launches)], env=job.environment(environment), check=True)
        assert job.collect()["launches"] == 40 * launches


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_valgrind_finds_nothing(hammer, environment):
    with Job(POLICIES[2]) as job:
        valgrind = [
            "valgrind",
            "-q",
            "--error-exitcode=9",
            "--leak-check=full",
            "--errors-for-leak-kinds=definite",
        ]
        done = subprocess.run(
            [*valgrind, hammer, "4", "400"],
            env=job.environment(environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert job.collect()["comm_launches"] == 4 * 50


@pytest.mark.parametrize("policy", POLICIES[2::3], ids=str)
def test_sanitizers_find_nothing(sanitized, fake_driver, environment, tmp_path, policy):
    program = sanitized(tmp_path / "hammer", str(HERE / "hammer.c"), f"-L{fake_driver}", "-lcuda")
    with Job(policy) as job:
        env = {**job.environment(environment), "ASAN_OPTIONS": "verify_asan_link_order=0"}
        del env["LD_PRELOAD"]
        done = subprocess.run([program, "4", "2000"], env=env, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        assert done.returncode == 0
        assert job.collect()["comm_launches"] == 4 * 250


def test_dlsym_still_sees_its_true_caller(environment, tmp_path):
    """A library loaded after the shim asks for the next `malloc`; it must not get its own."""
    source = tmp_path / "wrap.c"
    source.write_text("""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stddef.h>
        #include <stdlib.h>
        static __thread int depth;
        void *malloc(size_t size) {
            static void *(*next)(size_t);
            if (depth++) abort();
            if (!next) next = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
            if ((void *)next == (void *)malloc) abort();
            depth--;
            return next(size);
        }
    """)
    wrap = compile_c(tmp_path / "libwrap.so", "-shared", "-fPIC", str(source), "-ldl")
    with Job() as job:
        env = job.environment({**environment, "LD_PRELOAD": str(wrap)})
        assert env["LD_PRELOAD"].endswith(f":{wrap}")
        assert (
            subprocess.run(
                [shutil.which("ls") or "/bin/ls", "/"], env=env, capture_output=True, check=False
            ).returncode
            == 0
        )


def test_a_program_without_a_driver_is_not_disturbed(tmp_path):
    """No file is created, and a lookup of the driver's functions finds none."""
    source = tmp_path / "look.c"
    source.write_text("""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stddef.h>
        int main(void) { return dlsym(RTLD_DEFAULT, "cuLaunchKernel") != NULL || dlsym(RTLD_DEFAULT, "puts") == NULL; }
    """)
    program = compile_c(tmp_path / "look", str(source), "-ldl")
    with Job() as job:
        assert subprocess.run([program], env=job.environment(), check=False).returncode == 0
        assert not list(job.folder.glob("[0-9]*.*"))


def test_a_program_without_gpu_libraries_finds_none_of_their_functions(tmp_path):
    """In the whole process, in what comes after the program, or in its own handle."""
    source = tmp_path / "probe.c"
    source.write_text("""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        #include <string.h>
        int main(int count, char **names) {
            void *handles[] = {RTLD_DEFAULT, RTLD_NEXT, dlopen(NULL, RTLD_LAZY)};
            for (int i = 1; i < count; i++)
                for (int j = 0; j < 3; j++) {
                    dlerror();
                    void *found = dlsym(handles[j], names[i]);
                    const char *error = dlerror();
                    if (found || !error || !strstr(error, names[i]))
                        printf("%s %d\\n", names[i], j);
                }
            return dlsym(RTLD_NEXT, "puts") == NULL;
        }
    """)
    program = compile_c(tmp_path / "probe", str(source), "-ldl")
    shim = ROOT / "src/weft/shim/libweft_shim.so"
    listed = subprocess.run(["nm", "-D", "--defined-only", shim], capture_output=True, text=True, check=True)
    defined = {line.split()[-1] for line in listed.stdout.splitlines()}
    names = [name for name in defined if re.match(r"cu[A-Z]|cublas|hip|nccl(?!TunerPlugin)", name)]
    assert len(names) > 100
    with Job() as job:
        env = job.environment()
        done = subprocess.run([program, *names], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_a_program_that_is_linked_to_a_driver_finds_it_after_itself(fake_driver, environment, tmp_path):
    source = tmp_path / "next.c"
    source.write_text("""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stddef.h>
        extern int cuInit(unsigned);
        int main(void) {
            return cuInit(0) || !dlsym(RTLD_NEXT, "cuLaunchKernel") || dlsym(RTLD_NEXT, "ncclAllReduce");
        }
    """)
    program = compile_c(tmp_path / "next", str(source), f"-L{fake_driver}", "-lcuda", "-ldl")
    with Job() as job:
        assert subprocess.run([program], env=job.environment(environment), check=False).returncode == 0


def test_the_shim_alone_changes_nothing(hammer, environment):
    """Preloaded, but not by `weft run`: every launch passes through."""
    with Job(Policy(residency=1)) as job:
        env = job.environment(environment)
        del env["WEFT_JOB"]
        assert subprocess.run([hammer, "2", "100"], env=env, check=False).returncode == 0
        assert job.collect()["launches"] == 0


def test_a_control_file_of_another_version_is_not_trusted(hammer, environment):
    with Job(Policy(residency=1)) as job:
        control = job.folder / "control"
        image = bytearray(control.read_bytes())
        image[8] = 99
        control.write_bytes(image)
        assert (
            subprocess.run([hammer, "2", "100"], env=job.environment(environment), check=False).returncode
            == 0
        )
        assert job.collect()["launches"] == 0


def test_a_torn_policy_is_not_used(hammer, environment):
    with Job(Policy(residency=1)) as job:
        control = job.folder / "control"
        image = bytearray(control.read_bytes())
        image[40] ^= 0xFF  # inside the policy: the checksum no longer fits
        control.write_bytes(image)
        assert (
            subprocess.run([hammer, "1", "100"], env=job.environment(environment), check=False).returncode
            == 0
        )
        stats = job.collect()
    assert stats["launches"] == 100
    assert stats["shaped"] == 0


def test_the_layouts_of_both_sides_agree(tmp_path):
    import ctypes

    from weft.shim import layout, nccl_binding

    source = tmp_path / "sizes.c"
    source.write_text("""
        #include "nccl.h"
        #include <stddef.h>
        #include <stdio.h>
        int main(void) {
            printf("%zu %zu %zu %zu %zu %d ", sizeof(weft_process), sizeof(weft_control), sizeof(weft_chunk),
                   offsetof(weft_process, chunks), offsetof(weft_chunk, cells), WEFT_COUNTERS_USED);
            printf("%zu %zu %d %d", sizeof(weft_nccl_info), sizeof(weft_nccl_call), NCCL_OPERATIONS, NCCL_LIMITS);
        }
    """)
    program = compile_c(tmp_path / "sizes", f"-I{CSRC}", str(source))
    sizes = [
        int(n) for n in subprocess.run([program], capture_output=True, check=True, text=True).stdout.split()
    ]
    assert sizes == [
        layout.PROCESS_BYTES,
        ctypes.sizeof(layout.CControl),
        ctypes.sizeof(layout.CChunk),
        layout.CHUNKS_OFFSET,
        layout.CChunk.cells.offset,
        len(layout.COUNTERS),
        ctypes.sizeof(nccl_binding.CCommunicator),
        ctypes.sizeof(nccl_binding.CCall),
        len(layout.NCCL_OPERATIONS),
        nccl_binding.LIMITS,
    ]


def test_where_no_file_can_be_written_only_the_counters_are_lost(hammer, environment):
    """Under a limit of one block for files, a larger one would end the program by a signal."""
    with Job(Policy(residency=1)) as job:
        command = ["sh", "-c", f"ulimit -f 1; exec {hammer} 2 100"]
        assert subprocess.run(command, env=job.environment(environment), check=False).returncode == 0
        assert not list(job.folder.glob("[0-9]*.*"))


@pytest.mark.parametrize("sanitizer", [None, "address,undefined", "thread"])
def test_a_short_soak_counts_every_launch(sanitizer, sanitized_shim):
    """Many threads, changing policies, modules that go, forked children; benchmarks/shim_soak.py has the long one."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from shim_soak import soak

    library = sanitized_shim(sanitizer) if sanitizer else None
    row = soak(160_000 if sanitizer else 1_600_000, 16, sanitizer, library)
    assert row["clean"], row
    assert row["counted"] == row["launches"] > 0
