"""A simulated job under live tuning and the watch, as `weft run --tune` would report it."""

from __future__ import annotations

import math
import random
from typing import Any

from weft.policy import Policy
from weft.tuning.live.options import Facts, Kernel
from weft.tuning.live.search import tune
from weft.tuning.live.trial import Record, Sample
from weft.tuning.live.tuned_job import final
from weft.tuning.live.watch import watch
from weft.tuning.live.watch_status import WatchStatus

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
KERNELS = (Kernel("my_gemm", "my_gemm", 40, 30, 4), Kernel("nvjet_hsh", "nvjet_hsh", 40, 30, 1))
FACTS = Facts(collectives=8, ctas=12, cta_choices=(6, 16, 24), most_ctas=33, kernels=KERNELS, world=8)


def tuned_job(*, drift: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result and the record of all steps."""
    some, record = random.Random(3), Record()
    factors = {6: 1.2, 16: 0.9, 24: 0.95, 32: 1.0}

    def sample(trial: Any) -> Sample:
        ms = 40 * factors.get(trial.policy.max_ctas, 1.0) * math.exp(some.gauss(0, 0.005))
        return Sample(ms, facts=FACTS if trial.learn else None)

    method = tune(Policy(), record=record)
    trial = next(method)
    while True:
        try:
            trial = method.send(sample(trial))
        except StopIteration as end:
            outcome = end.value
            break
    status = WatchStatus(outcome, outcome.policy)
    watching = watch(outcome, record=record, status=status)
    trial = next(watching)
    for step in range(150):
        if drift and step == 60:
            factors[16] = 1.08
        trial = watching.send(sample(trial))
    return final(status), record.to_dict([policy.label for policy in record.policies])
