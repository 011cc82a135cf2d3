"""Calibration from a trace: kernels by kind, steps counted, and figures that give the trace's times back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from weft.errors import InputError, UsageError
from weft.plan import Model, TrainingJob
from weft.plan.calibrate import (
    MeasuredStep,
    _rank,
    calibrate,
    calibrated,
    kernel_kind,
    measure_trace,
    traced_job,
)
from weft.plan.figures import shipped

TRACE = Path(__file__).parent.parent / "data" / "traces" / "h200_ddp_2ranks" / "rank0.json.gz"
# What was traced: four transformer blocks of width 4096, one sequence of 2048 tokens for each of two ranks.
BLOCKS = Model(name="blocks", layers=4, hidden=4096, heads=32, ffn=16384, vocab=64, seq_len=2048)


def traced(**changes) -> TrainingJob:
    return TrainingJob(**{"model": BLOCKS, "gpu": "h200", "gpus": 2, "sharding": "none", **changes})


def kernel(name: str, start: float, length: float, stream: int = 7) -> dict:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": length,
        "args": {
            "device": 0,
            "stream": stream,
            "correlation": int(start),
            "grid": [8, 1, 1],
            "block": [128, 1, 1],
        },
    }


def trace_file(path: Path, *events: dict) -> Path:
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": list(events)}).encode()))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nt", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm>", "gemm"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", "gemm"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluFunctor>", "elementwise"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor>", "optimizer"),
        ("", "elementwise"),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert kernel_kind(name) == kind


def test_the_trace_of_four_blocks():
    found = measure_trace(TRACE, layers=4)
    assert (found.device_name, found.steps) == ("NVIDIA H200", 2)
    # By hand from the trace: 312 compute kernels, 34.7 ms of GEMMs in both steps, some slowed by collectives.
    assert found.launches == 156
    assert 0.012 < found.gemm_s < 0.01736
    assert found.attention_s == pytest.approx(0.0015247, rel=1e-3)
    assert 0 < found.gap_s < 2e-5
    assert 0 < found.beside_pct < 50


def test_calibrated_figures_give_the_trace_back():
    job = traced()
    before = shipped()
    found = calibrated(TRACE, job, before)
    again = _rank(job, found.figures)
    assert again.gemm == pytest.approx(found.measured.gemm_s, rel=1e-3)
    assert again.attention == pytest.approx(found.measured.attention_s, rel=1e-3)
    assert again.elementwise == pytest.approx(found.measured.elementwise_s, rel=0.05)
    assert {name for name, _, _ in found.changes} == {
        "speed",
        "attention_efficiency",
        "elementwise",
        "layer_us",
    }
    reached = found.figures.gemm_share(job.gpu, "bf16") * found.figures.find(job.software).speed
    assert 0.4 < reached < 0.9
    assert before == shipped()


@examples(20)
@given(st.floats(0.85, 3), st.floats(1, 3), st.floats(0.5, 3))
def test_any_measured_times_come_back(gemm, attention, elementwise):
    job, figures = traced(), shipped()
    model = _rank(job, figures)
    measured = MeasuredStep(
        "GPU",
        1,
        gemm * model.gemm,
        attention * model.attention,
        0.0,
        elementwise * model.elementwise,
        0.0,
        1,
        0.0,
    )
    again = _rank(job, calibrate(measured, job, figures).figures)
    assert again.gemm == pytest.approx(measured.gemm_s, rel=1e-3)
    assert again.attention == pytest.approx(measured.attention_s, rel=1e-3)


def test_a_kernel_that_overlaps_with_a_collective_counts_as_it_runs_alone(tmp_path):
    path = trace_file(
        tmp_path / "t.json.gz",
        kernel("my_gemm", 0, 100),
        kernel("my_gemm", 200, 150),
        kernel("ncclDevKernel_AllReduce_Sum", 190, 200, stream=9),
        kernel("flash_fwd", 400, 10),
    )
    found = measure_trace(path, layers=1)
    assert found.gemm_s == pytest.approx(200e-6)
    assert found.beside_pct == 0


def test_marked_steps_are_counted(tmp_path):
    marks = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{n}",
            "pid": 1,
            "tid": 1,
            "ts": 100 * n,
            "dur": 90,
        }
        for n in range(3)
    ]
    path = trace_file(tmp_path / "t.json.gz", *marks, *(kernel("my_gemm", 100 * n + 5, 20) for n in range(3)))
    found = measure_trace(path, layers=7)
    assert found.steps == 3
    assert found.gemm_s == pytest.approx(20e-6)


def test_a_trace_of_another_job_is_refused():
    with pytest.raises(UsageError, match="8 forward attention kernels.*prof.step"):
        calibrated(TRACE, TrainingJob(model="llama3-8b", gpu="h200", gpus=2, sharding="none"), shipped())
    with pytest.raises(UsageError, match="of another job"):
        calibrated(TRACE, traced(micro_batch=2), shipped())


def test_a_trace_of_another_gpu_is_refused():
    with pytest.raises(UsageError, match="the trace is of NVIDIA H200.*--gpu h200"):
        calibrated(TRACE, traced(gpu="h100"), shipped())


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        measure_trace(tmp_path / "absent.json", 1)
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(InputError, match="text.json"):
        measure_trace(tmp_path / "text.json", 1)
    path = trace_file(tmp_path / "comm.json.gz", kernel("ncclDevKernel_AllReduce_Sum", 0, 5))
    with pytest.raises(InputError, match="no compute kernels"):
        measure_trace(path, 1)


def test_the_traced_job_differs_as_told():
    job = TrainingJob(model="llama3-8b", gpu="h100", gpus=64, tp=4, pp=2)
    found = traced_job(job, "layers=4, gpus=2 tp=1 pp=1")
    assert (found.model.layers, found.gpus, found.tp, found.pp, found.dp) == (4, 2, 1, 1, 2)
    assert (found.micro_batches, found.seq_len) == (1, job.seq_len)
    assert traced_job(job, "") == job
    for wrong in ("layrs=4", "tp", "tp=x", "tp=0", "tp=99999999999"):
        with pytest.raises(UsageError, match="=4"):
            traced_job(job, wrong)
