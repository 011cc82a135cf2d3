"""Two thousand random jobs: no impossible number, no slower step on a faster network, every refusal one line."""

from __future__ import annotations

import math
import random

from weft.errors import UsageError
from weft.gpu.network import NETWORKS as NETWORKS
from weft.gpu.presets import GPU_PRESETS as GPUS
from weft.plan import TrainingJob, predict
from weft.plan.accuracy import error_interval, family
from weft.plan.compute import peak_rate
from weft.plan.config import PIPELINE_SCHEDULES, PRECISIONS, RECOMPUTES, SHARDINGS
from weft.plan.figures import shipped
from weft.plan.model_presets import MODELS as MODELS

JOBS, SEED = 2000, 20
POWERS = (1, 2, 4, 8, 16, 32, 64)


def random_options(draw: random.Random) -> dict:
    """Options as a user might type them: mostly sensible, sometimes not."""
    sizes = {name: draw.choice(POWERS[:4]) for name in ("tp", "cp")}
    pp = draw.choice((1, 1, 1, 2, 3, 4, 7, 8, 16))
    dp = draw.choice((1, 2, 3, 8, 64, 512, 1024))
    model = draw.choice(list(MODELS))
    chunks = draw.choice((1, 1, 1, 2, 4)) if pp > 1 else 1
    return {
        "model": model,
        "gpu": draw.choice(list(GPUS)),
        **sizes,
        "pp": pp,
        "gpus": sizes["tp"] * sizes["cp"] * pp * dp,
        "ep": draw.choice(POWERS) if MODELS[model].experts else 1,
        "interleave": chunks,
        "schedule": draw.choice(("", "", *PIPELINE_SCHEDULES)) if chunks == 1 else "",
        "micro_batch": draw.choice((1, 2, 4)),
        "global_batch": draw.choice((0, 0, dp * pp * 8, dp * 16, 7)),
        "seq_len": draw.choice((0, 2048, 32768, 131072)),
        "sharding": draw.choice(SHARDINGS),
        "recompute": draw.choice(RECOMPUTES),
        "precision": draw.choice(PRECISIONS),
        "network": draw.choice((None, *NETWORKS)),
        "software": draw.choice(list(shipped().software)),
        "compression": draw.choice(("none",) * 6 + ("int8", "powersgd:4", "zero++")),
        "policy": draw.choice((None, "auto")),
    }


def test_two_thousand_random_jobs():
    draw = random.Random(SEED)
    predicted, lines = 0, []
    for _ in range(JOBS):
        options = random_options(draw)
        try:
            job = TrainingJob(**options)
            found = predict(job, check_memory=draw.random() < 0.3)
        except UsageError as error:
            lines.append((len(str(error).splitlines()), options))
            continue
        predicted += 1
        _possible(job, found, options)
        faster = job.network.but(rail_bytes_per_s=job.network.rail_bytes_per_s * draw.uniform(1, 30))
        again = predict(job.but(network=faster), check_memory=False)
        assert again.step_s <= found.step_s * (1 + 1e-9), options
    assert predicted > 500
    assert len(lines) > 200
    assert [options for count, options in lines if count != 1] == []


def _possible(job, found, options) -> None:
    numbers = [found.step_s, found.mfu_pct, found.tflops_per_gpu, *found.breakdown.values()]
    numbers += [*found.memory_bytes.values(), found.exposed_comm_s]
    assert all(math.isfinite(value) and value >= -1e-12 for value in numbers), options
    assert math.isclose(sum(found.breakdown.values()), found.step_s, rel_tol=1e-6), options
    flops = job.model.flops(job.tokens, job.seq_len, causal=True) / job.gpus
    assert found.step_s >= flops / peak_rate(job.gpu, job.precision), options
    assert sum(found.memory_bytes.values()) >= 2 * job.model.params / job.gpus, options
    for one in found.collectives:
        assert one.exposed_s <= one.alone_s * 8 + 1e-12, options
        assert one.hidden_s <= one.alone_s * (1 + 1e-9), options
    around = error_interval(job, found.step_s)
    assert around is not None
    assert 0 < around.low_s <= found.step_s <= around.high_s, options
    assert around.family == family(job)
