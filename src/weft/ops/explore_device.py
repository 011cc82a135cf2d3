"""Measures every schedule of one fused operation on one GPU whose peers are pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from weft.errors import UsageError, WeftError
from weft.ops.case import FUSED_ENGINES, Case
from weft.ops.characterize_device import interleaved, torch_with_gpu
from weft.ops.pick import pick
from weft.policy import SCHEDULES
from weft.sim.profile import by_title

MAX_HOST_BYTES = 24 << 30
TOPOLOGY = "host"
_REPEATS = 7


def measure_schedules(operation: str, m: int, n: int, k: int, ranks: int, dtype: str) -> dict[str, Any]:
    """The JSON document. The GPU acts as one rank: it pulls from and pushes to pinned host memory."""
    torch = torch_with_gpu()
    title = torch.cuda.get_device_name()
    gpu = _profile_name(title)
    case = Case(operation=operation, m=m, n=n, k=k, ranks=ranks, dtype=dtype, gpu=gpu, topology=TOPOLOGY)
    setup = _Setup(torch, case)
    works: dict[Any, Callable[[], object]] = {"product": setup.gemm, "transfer": setup.transfer}
    refused: dict[str, str] = {}
    for engine in FUSED_ENGINES:
        for name in SCHEDULES:
            work = partial(setup.fused, name, engine)
            try:
                work()
                torch.cuda.synchronize()
            except (WeftError, ImportError) as error:
                refused[f"{name} {engine}"] = str(error)
                continue
            works[name, engine] = work
    times = interleaved(torch, works, _REPEATS)
    found = {key: ms for key, ms in times.items() if isinstance(key, tuple)}
    if not any(name == "serial" for name, _ in found):
        raise UsageError(f"{operation} cannot run here: {next(iter(refused.values()), 'no engine')}")
    return _document(case, title, times, found, refused)


def _document(
    case: Case,
    title: str,
    times: dict[Any, float],
    found: dict[tuple[str, str], float],
    refused: dict[str, str],
) -> dict[str, Any]:
    best = min(found, key=lambda key: found[key])
    serial = min(ms for (name, _), ms in found.items() if name == "serial")
    ideal = max(times["product"], times["transfer"])
    sizes = (case.m, case.n, case.k, case.ranks)
    picked = pick(case.operation, *sizes, case.dtype, case.gpu, TOPOLOGY)
    rows = []
    for name in SCHEDULES:
        engines = {engine: ms for (of, engine), ms in found.items() if of == name}
        if engines:
            engine = min(engines, key=lambda e: engines[e])
            row = {"name": name, "ms": engines[engine], "speedup_vs_serial": serial / engines[engine]}
            possible = serial - ideal
            share = (serial - engines[engine]) / possible if possible > 0 else None
            rows.append({**row, "engine": engine, "engines_ms": engines, "fraction_of_ideal": share})
    chosen = found.get((picked.schedule, picked.engine))
    return {
        "device": "cuda",
        "simulated": False,
        "gpu": title,
        "operation": case.operation,
        "gemm": [case.m, case.n, case.k],
        "ranks": case.ranks,
        "dtype": case.dtype,
        "topology": "pinned host memory",
        "product_ms": times["product"],
        "collective_ms": times["transfer"],
        "ideal_ms": ideal,
        "bound": serial / ideal,
        "schedules": rows,
        "picked": picked.schedule,
        "picked_engine": picked.engine,
        "picked_regret_pct": None if chosen is None else 100 * (chosen / found[best] - 1),
        "why": picked.why,
        "best": best[0],
        "best_engine": best[1],
        "reason": f"{best[0]} on {best[1]} was the fastest of {len(found)} that were measured",
        "not_possible": refused,
    }


def _profile_name(title: str) -> str:
    try:
        return by_title(title).name
    except WeftError:
        raise UsageError(f"weft has no specification of {title}; use --device sim:NAME") from None


class _Setup:
    """Tensors of rank 0 and the data of its peers."""

    def __init__(self, torch: Any, case: Case) -> None:
        from weft.comm.dma import HostPeers
        from weft.ops.schedule import split

        self.torch, self.operation = torch, case.operation
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]
        counts = split(case.m, case.ranks)
        scatter, gather = case.operation == "matmul_reduce_scatter", case.operation == "all_gather_matmul"
        cols = case.n if scatter else case.k
        held_rows = [counts[0] if scatter else counts[i] if gather else case.m for i in range(case.ranks)]
        total = sum(held_rows[1:]) * cols * dtype.itemsize
        if total > MAX_HOST_BYTES:
            raise UsageError(
                f"the peers would hold {total >> 30} GiB of pinned host memory, the most is "
                f"{MAX_HOST_BYTES >> 30}; use a smaller M or --device sim:NAME"
            )

        def device(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, device="cuda", dtype=dtype)

        held: list[Any] = [
            None,
            *(torch.zeros(rows, cols, dtype=dtype).pin_memory() for rows in held_rows[1:]),
        ]
        self.peers = HostPeers(held)
        self.whole, self.w = device(case.m, case.k), device(case.k, case.n)
        self.x = self.whole[: counts[0]].contiguous() if gather else self.whole
        self.result = torch.empty(case.m, case.n, device="cuda", dtype=dtype)
        rows_out = counts[0] if scatter else case.m if gather else counts[0] * case.ranks
        self.out = torch.empty(rows_out, case.n, device="cuda", dtype=dtype)
        moved = [counts[0] if not gather else counts[i] for i in range(1, case.ranks)]
        self.blocks = [
            (held[i][:rows], torch.empty(rows, cols, device="cuda", dtype=dtype))
            for i, rows in enumerate(moved, 1)
        ]

    def gemm(self) -> None:
        self.torch.mm(self.whole, self.w, out=self.result)

    def transfer(self) -> None:
        """Copy in the blocks of all peers, by a copy engine."""
        for source, target in self.blocks:
            target.copy_(source, non_blocking=True)

    def fused(self, schedule: str, engine: str) -> None:
        import weft.ops

        operation = getattr(weft.ops, self.operation)
        operation(self.x, self.w, self.peers, schedule=schedule, engine=engine, out=self.out)
