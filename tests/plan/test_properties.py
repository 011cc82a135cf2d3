"""Properties that must hold for every job."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from properties import examples
from weft.errors import UsageError
from weft.gpu.network import NETWORKS
from weft.plan import TrainingJob, predict
from weft.plan.memory import REFUSED

MODELS = ("llama3-8b", "llama3-70b", "gpt-175b", "mixtral-8x7b", "deepseek-v3")


@st.composite
def jobs(draw):
    """Valid jobs of all kinds."""
    name = draw(st.sampled_from(MODELS))
    tp, cp = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2]))
    pp = draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 4, 64, 512]))
    ep = draw(st.sampled_from([1, 8])) if name in ("mixtral-8x7b", "deepseek-v3") else 1
    settings_ = {
        "model": name,
        "gpu": draw(st.sampled_from(["h100", "a100-80gb", "h200"])),
        "gpus": tp * cp * pp * dp,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": ep,
        "micro_batch": draw(st.sampled_from([1, 2])),
        "global_batch": dp * 2 * pp * draw(st.sampled_from([1, 4])),
        "sharding": draw(st.sampled_from(["none", "zero1", "zero2", "zero3"])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe"])),
        "policy": draw(st.sampled_from([None, "auto"])),
        "software": draw(st.sampled_from(["megatron-2025", "megatron-2022", "torchtitan-2024"])),
        "network": draw(st.sampled_from(["ndr400", "eth100", "efa-p4d"])),
    }
    try:
        return TrainingJob(**settings_)
    except UsageError:
        assume(False)


def step(job, **changes):
    return predict(job.but(**changes) if changes else job, check_memory=False).step_s


@given(job=jobs(), faster=st.floats(1, 20))
@examples(60)
def test_more_bandwidth_is_never_slower(job, faster):
    net = job.network
    assert step(job, network=net.but(rail_bytes_per_s=net.rail_bytes_per_s * faster)) <= step(job) * (
        1 + 1e-9
    )


@given(job=jobs(), worse=st.floats(1, 8))
@examples(40)
def test_oversubscription_and_latency_never_help(job, worse):
    net = job.network
    assert step(job, network=net.but(oversubscription=worse)) >= step(job) * (1 - 1e-9)
    assert step(job, network=net.but(latency_us=net.latency_us * worse)) >= step(job) * (1 - 1e-9)


@given(job=jobs())
@examples(60)
def test_more_exposed_time_is_never_faster(job):
    names = {"cp", "ep", "pp", "grads", "params"}
    bare = predict(job.but(hide=frozenset()), check_memory=False)
    good = predict(job.but(hide=frozenset(names)), check_memory=False)
    assert bare.exposed_comm_s >= good.exposed_comm_s - 1e-9
    assert bare.step_s >= good.step_s * (1 - 1e-9)


@given(job=jobs())
@examples(80)
def test_compute_is_a_floor_and_the_parts_a_ceiling(job):
    p = predict(job, check_memory=False)
    parts = p.breakdown
    alone = sum(c.alone_s for c in p.collectives)
    rest = parts["bubble"] + parts["overhead"] + parts["skew"] + parts["compression"]
    assert p.compute_s <= p.step_s <= p.compute_s + alone + rest + 1e-9
    assert sum(parts.values()) == pytest.approx(p.step_s)
    # No GPU computes faster than its peak.
    flops = job.model.flops(job.tokens, job.seq_len, causal=True) / job.gpus
    assert p.step_s >= flops / job.gpu.flops(job.precision)


@given(job=jobs(), more=st.sampled_from([2, 4]))
@examples(40)
def test_weak_scaling_is_never_faster_per_gpu(job, more):
    bigger = job.but(gpus=job.gpus * more, global_batch=job.global_batch * more)
    if job.sharding == "none":  # a sharded optimizer has less to do on more GPUs
        # Megatron's buckets grow with the ranks; rounding their number also rounds the cost of latency.
        assert step(bigger) >= step(job) * 0.99
    assert bigger.tp * bigger.pp * bigger.cp * bigger.dp == bigger.gpus


@given(job=jobs())
@examples(60)
def test_what_does_not_fit_is_refused_with_the_number_and_only_that(job):
    needed = sum(predict(job, check_memory=False).memory_bytes.values())
    if needed <= REFUSED * job.gpu.memory_bytes:
        assert predict(job).step_s > 0
    else:
        with pytest.raises(UsageError, match=f"needs {needed / 2**30:.0f} GiB"):
            predict(job)


@given(tp=st.integers(1, 16), pp=st.integers(1, 16), gpus=st.integers(1, 4096))
@examples(150)
def test_a_job_multiplies_up_or_is_refused_in_one_line(tp, pp, gpus):
    wrong = ""
    try:
        job = TrainingJob(model="llama3-70b", gpu="h100", gpus=gpus, tp=tp, pp=pp)
    except UsageError as error:
        wrong = str(error)
    if wrong:
        assert len(wrong.splitlines()) == 1
        return
    assert job.tp * job.pp * job.cp * job.dp == gpus
    assert job.micro_batches * job.micro_batch * job.dp == job.global_batch


def test_all_networks_have_a_bandwidth():
    assert all(net.rail_bytes_per_s > 0 for net in NETWORKS.values())
