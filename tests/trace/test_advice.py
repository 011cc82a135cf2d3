"""Advice follows from the cause and from what the kernels leave room for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from trace_building import BASE_NS, GEMM, TraceBuilder

import weft

US = 1_000


def starved(path, *, name=GEMM, grid=(1024, 1, 1), registers=96, shared=0, device="NVIDIA H200", wait_us=400):
    """Collectives that are ready but wait behind a kernel of the given shape; compute then waits for them."""
    built = TraceBuilder(device_name=device)
    for i in range(20):
        at, issued = i * (300 + wait_us) * US, i * 30 * US - 10_000 * US
        resources = {"registers per thread": registers, "shared memory": shared}
        built.gpu(GEMM, at, at + 100 * US, launch=issued)
        built.collective(at + (100 + wait_us) * US, at + (300 + wait_us) * US, launch=issued + 10 * US)
        built.gpu(
            name, at + 100 * US, at + (100 + wait_us) * US, launch=issued + 20 * US, grid=grid, block=(256, 1, 1), **resources
        )  # fmt: skip
    return weft.analyze(built.write(path / "rank0.json"))


def controls(analysis):
    return {item.control: item for item in analysis.advice}


def test_persistent_kernels_call_for_a_head_start(tmp_path):
    item = controls(starved(tmp_path, grid=(132, 1, 1), registers=168, shared=200_000))["head_start"]
    assert "weft run --priority high --head-start 5 " in item.command
    assert item.collective.startswith("ncclDevKernel_AllReduce")


def test_matrix_kernels_of_many_waves_call_for_residency(tmp_path):
    item = controls(starved(tmp_path, grid=(4096, 1, 1), registers=64))["residency"]
    assert "--residency 2 --when overlap" in item.command  # four blocks of 256 threads and 64 registers fit


def test_memory_bound_kernels_are_not_padded(tmp_path):
    found = controls(
        starved(tmp_path, name="void elementwise_kernel<4>(int)", grid=(4096, 1, 1), registers=64)
    )
    assert "residency" not in found
    assert "priority" in found


def test_unknown_resources_still_leave_priority(tmp_path):
    assert "priority" in controls(starved(tmp_path, device=""))


def test_kernels_that_leave_room_are_no_reason(tmp_path):
    assert not {"head_start", "residency", "priority"} & set(controls(starved(tmp_path, grid=(60, 1, 1))))


@pytest.mark.parametrize("wait_us", [40, 150, 400])
def test_gains_are_bounded_by_what_waited(tmp_path, wait_us):
    analysis = starved(tmp_path, grid=(132, 1, 1), registers=168, shared=200_000, wait_us=wait_us)
    behind = analysis.attribution["behind_compute_us"]
    assert behind > 0
    for item in analysis.advice:
        low, high = item.gain_us
        assert 0 <= low <= high <= analysis.exposed_comm_us
        if item.control in ("head_start", "residency", "priority"):
            assert high <= behind


def with_ctas(path, ctas, *, elements=32 << 20, length_us=800):
    """Large all-reduces on some CTAs, exposed and needed by the next kernel."""
    built = TraceBuilder(world_size=8)
    for i in range(10):
        at, issued = i * (100 + length_us) * US, i * 20 * US - 5_000 * US
        built.gpu(GEMM, at, at + 100 * US, launch=issued)
        built.collective(
            at + 100 * US, at + (100 + length_us) * US, launch=issued + 10 * US, elements=elements,
            grid=(ctas, 1, 1),
        )  # fmt: skip
    return controls(weft.analyze(built.write(path / "rank0.json")))


def test_a_cap_on_ctas_is_raised_by_the_minimum(tmp_path):
    """64 MiB in 800 µs over 8 ranks are 147 GB/s of bus bandwidth, on 4 CTAs where the H200 takes 16."""
    found = with_ctas(tmp_path, 4)
    item = found["min_ctas"]
    assert item.command == "NCCL_MIN_CTAS=16 NCCL_MAX_CTAS=16 weft run --stats weft-stats.json -- CMD"
    low, high = item.gain_us
    assert 0 < low < high <= 8_000
    assert "4 CTAs" in item.evidence
    assert "max_ctas" not in found


def test_no_more_ctas_without_a_cap_or_where_the_links_are_full_or_messages_small(tmp_path):
    for case in ({"ctas": 16}, {"ctas": 24}, {"ctas": 8, "length_us": 350}, {"ctas": 4, "elements": 1 << 18}):
        assert not {"min_ctas", "max_ctas"} & set(with_ctas(tmp_path, **case)), case


def test_ranges_are_narrow_and_nothing_small_is_advised(tmp_path):
    advised = set()
    for wait_us in (5, 20, 100, 400, 2000):
        analysis = starved(tmp_path, grid=(132, 1, 1), registers=168, shared=200_000, wait_us=wait_us)
        advised |= {(wait_us, item.control) for item in analysis.advice}
        for item in analysis.advice:
            low, high = item.step_pct
            if item.control == "program":
                assert low == 0.0  # only an upper bound is known
            else:
                assert high - low <= 3.0 + 1e-6
            if item.control != "none":
                assert high >= 1.0
            assert item.to_json()["step_ms"] == list(item.step_ms)
    assert (400, "head_start") in advised
    assert (5, "head_start") not in advised


def test_a_collective_off_the_critical_path_is_no_reason(tmp_path):
    """The CPU issues the next step long after the collective ends, so waiting behind compute is free."""
    built = TraceBuilder()
    for i in range(20):
        at = i * 3_000 * US
        built.gpu(GEMM, at, at + 100 * US, launch=at - 4 * US)
        built.collective(at + 500 * US, at + 700 * US, launch=at + 5 * US)
        built.gpu(
            GEMM,
            at + 100 * US,
            at + 500 * US,
            launch=at + 10 * US,
            grid=(132, 1, 1),
            **{"shared memory": 200_000},
        )
    analysis = weft.analyze(built.write(tmp_path / "t.json"))
    assert analysis.attribution["behind_compute_us"] > 0
    assert not {"head_start", "residency", "priority"} & set(controls(analysis))


def test_hidden_communication_has_nothing_to_gain(tmp_path):
    built = TraceBuilder()
    built.gpu(GEMM, 0, 1_000 * US, launch=-10 * US)
    built.collective(100 * US, 900 * US, launch=-5 * US)
    (item,) = weft.analyze(built.write(tmp_path / "t.json")).advice
    assert item.control == "none"
    assert "Only 0 per rank is exposed" in item.detail


def test_no_communication_says_so(tmp_path):
    built = TraceBuilder()
    built.gpu(GEMM, 0, 1_000 * US)
    analysis = weft.analyze(built.write(tmp_path / "t.json"))
    assert "--comm" in analysis.advice[0].detail
    assert "--comm" in analysis.to_json()["summary"]["text"]


@pytest.mark.skipif(sys.platform != "linux", reason="weft run is for Linux")
def test_advised_commands_run(tmp_path, pytestconfig):
    """Every advised command works as it is printed, with a program in place of CMD."""
    advice = [
        *starved(tmp_path, grid=(132, 1, 1), registers=168, shared=200_000).advice,
        *starved(tmp_path, grid=(4096, 1, 1), registers=64).advice,
        *with_ctas(tmp_path, 4).values(),
    ]
    commands = {item.control: item.command for item in advice if item.command is not None}
    assert set(commands) >= {"head_start", "min_ctas"}
    assert len(commands) >= 3
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/weft").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m weft "$@"\n')
    (tmp_path / "bin/weft").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(pytestconfig.rootpath / "src"),
    }
    for control, command in commands.items():
        folder = tmp_path / control
        folder.mkdir()
        shell = command.replace("CMD", "sh -c 'echo $NCCL_MIN_CTAS; exit 7'")
        done = subprocess.run(
            shell, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 7, (command, done.stderr)  # the program's code: weft took every flag
        assert done.stdout.strip() == ("16" if control == "min_ctas" else "")


def test_price_of_overlap_compares_like_with_like(tmp_path):
    built = TraceBuilder()
    for i in range(10):
        at = i * 100 * US
        beside = i % 2
        built.gpu(GEMM, at, at + (15 if beside else 10) * US)
        built.gpu(GEMM, at + 40 * US, at + 90 * US, grid=(4096, 1, 1))  # another size: never overlaps
        if beside:
            built.collective(at, at + 20 * US)
        else:
            built.gpu(GEMM, at + 91 * US, at + 97 * US)  # a third of it overlaps: neither case
            built.collective(at + 95 * US, at + 97 * US)
    price = weft.analyze(built.write(tmp_path / "t.json")).to_json()["ranks"][0]["price_of_overlap"]
    (kernel,) = price["kernels"]
    assert (kernel["alone_us"], kernel["beside_us"], kernel["alone"], kernel["beside"]) == (10.0, 15.0, 5, 5)
    assert (kernel["slowdown_pct"], price["lost_us"]) == (50.0, 25.0)


@pytest.mark.parametrize(("grid", "longest_us"), [((132, 1, 1), 10), ((1024, 1, 1), 20)])
def test_no_price_where_name_and_shape_do_not_tell_the_work(tmp_path, grid, longest_us):
    """A persistent GEMM has one block per SM whatever it multiplies; other kernels show it by their spread."""
    built = TraceBuilder()
    for i in range(10):
        at, beside = i * 100 * US, i % 2
        alone_us = longest_us if i % 4 else 10
        built.gpu(GEMM, at, at + (60 if beside else alone_us) * US, grid=grid)
        if beside:
            built.collective(at, at + 60 * US)
    price = weft.analyze(built.write(tmp_path / "t.json")).to_json()["ranks"][0]["price_of_overlap"]
    assert (price["kernels"], price["lost_us"]) == ([], 0.0)


def test_comparison_of_two_runs(tmp_path):
    runs = []
    for name, gap in (("before", 400), ("after", 0)):
        (tmp_path / name).mkdir()
        built = TraceBuilder(clock_ns=BASE_NS + gap)
        built.gpu(GEMM, 0, 1_000 * US, launch=-10)
        built.collective((500 + gap) * US, (800 + gap) * US, launch=-5)
        built.write(tmp_path / name / "rank0.json")
        runs.append(weft.analyze(tmp_path / name))
    document = weft.trace.compare(*runs)
    assert document["change"]["exposed_comm_us"] == {
        "before": 200.0,
        "after": 0.0,
        "delta": -200.0,
        "percent": -100.0,
    }
    assert document["before"]["ranks"][0]["exposed_comm_us"] == 200.0
    assert document["change"]["collectives"][0]["kind"] == "all_reduce"
    assert "200" in document["change"]["text"] or "0.200" in document["change"]["text"]
