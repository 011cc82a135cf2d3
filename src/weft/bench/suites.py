"""The suites as data: workloads, their candidates, and the expected duration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from weft.checks import check_choice
from weft.errors import UsageError
from weft.policy import Policy
from weft.rules import Rule
from weft.tuning.candidates import CUBLAS, GEMM, PLAIN, SEQUENTIAL, Candidate
from weft.workload import Compute, Workload, named, paper_reading

PAPER_GRIDS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Blocks along each side of the grids in arXiv:2606.09200."""
_HOPPER_SMS = 132
_TWO_PER_SM = 2 * _HOPPER_SMS  # a grid of at most this many blocks is not affected by residency
PLACED = Policy(head_start="placed")
FIG2 = "fig2"
"""The suite in the paper's own setting. On a simulated GPU of the paper it runs on the paper's node."""
PAPER_RESIDENCY = {"opt1": (5, 3), "opt2": (3, 2)}
"""Blocks per SM to try, below the natural residency of each tile (7 and 4 on Hopper)."""


@dataclass(frozen=True)
class SuiteCell:
    """One workload and its candidates. The first two candidates are sequential and plain overlap."""

    name: str
    workload: Workload
    candidates: tuple[Candidate, ...]
    comm_share: float | None = None
    """Size the collective so that, alone, it takes this fraction of the compute time. None: fixed size."""
    rounds: int = 7
    confirm: int = 4
    ctas: int | None = None
    """CTAs per rank when the collective is measured alone; None: the suite's baseline."""

    def estimate_s(self, ctas: int) -> float:
        """Approximate duration of the cell on a Hopper GPU, in seconds."""
        n = self.workload.iterations
        compute = n * compute_estimate_s(self.workload.compute)
        comm = compute * self.comm_share if self.comm_share else n * self.workload.wire_bytes / (ctas * 22e9)
        sample = compute + comm + 0.01
        # About half of the candidates drop out after three rounds; references and warm-up are extra.
        samples = 3 * len(self.candidates) + (self.rounds - 3) * len(self.candidates) / 2
        return 0.5 + (samples + 3 * self.confirm + 12) * sample * 0.75


@dataclass(frozen=True)
class Suite:
    """Cells in the order in which they run. If the budget runs out, the last ones are missing."""

    name: str
    about: str
    cells: tuple[SuiteCell, ...]
    baseline_ctas: int
    """CTAs per rank in `overlap` and `sequential` when the ranks share one GPU."""
    budget_s: float

    def with_ranks(self, ranks: int) -> Suite:
        """The suite with another number of ranks in every cell."""
        cells = tuple(replace(cell, workload=cell.workload.but(ranks=ranks)) for cell in self.cells)
        return replace(self, cells=cells)

    def with_policy(self, policy: Policy) -> Suite:
        """The suite with this policy added as a candidate to every cell that does not have it yet."""
        more = Candidate.of(policy)
        return replace(
            self,
            cells=tuple(
                cell
                if any(known.label == more.label for known in cell.candidates)
                else replace(cell, candidates=(*cell.candidates, more))
                for cell in self.cells
            ),
        )

    def only(self, pattern: str | None) -> Suite:
        """The suite with only the cells whose names match a glob."""
        if not pattern:
            return self
        cells = tuple(cell for cell in self.cells if fnmatch(cell.name, pattern))
        if not cells:
            names = ", ".join(cell.name for cell in self.cells[:6])
            raise UsageError(
                f"--only {pattern!r} matches no workload of suite {self.name}; it has {names}, …"
            )
        return Suite(self.name, self.about, cells, self.baseline_ctas, self.budget_s)


def compute_estimate_s(compute: Compute) -> float:
    """Approximate duration of one iteration on a Hopper GPU, in seconds."""
    rate = {"triton_gemm": 280e12, "triton_mlp": 400e12, "attention": 350e12, "conv": 400e12}.get(
        compute.kind, 700e12
    )
    if compute.dtype in ("fp32", "fp64"):
        rate = 45e12
    busy = 1.0
    if compute.grid is not None:
        # A block alone on an SM is about 3.5 times as fast as one of several.
        busy = max(1.0, _HOPPER_SMS * 4 / (compute.grid[0] * compute.grid[1]) / 3.5 * 2)
    return busy * max(compute.flops / rate, compute.traffic_bytes / 3e12, 20e-6)


def high(**controls: object) -> Policy:
    """A policy with high priority and other controls."""
    return Policy(priority="high", **controls)  # type: ignore[arg-type]


def paper_candidates(option: str, blocks: int) -> tuple[Candidate, ...]:
    """Sequential, overlap, and high priority: alone, with lower residencies, and with a head start."""
    found = [
        SEQUENTIAL,
        PLAIN,
        Candidate.of(high()),
        Candidate.of(high(head_start_us=5)),
    ]
    if blocks > _TWO_PER_SM:
        for n in PAPER_RESIDENCY[option]:
            found.append(Candidate.of(high(rules=(Rule(GEMM, n),))))
        first = PAPER_RESIDENCY[option][0]
        both = high(rules=(Rule(GEMM, first),), head_start_us=5)
        found.append(Candidate.of(both))
    return tuple(found)


def _paper_cells() -> Iterator[SuiteCell]:
    yield _headline(iterations=4, rounds=9)
    yield _balanced(_headline(iterations=4, rounds=9), 8)
    yield from _grid_cells(("cb-ar", "cb-a2a"))
    # The other interpretation of Fig. 2: time ratios under 0.5 require several concurrent GEMMs.
    for grid in ((n, n) for n in reversed(PAPER_GRIDS)):
        label = f"cb-ar-opt2-{grid[0]}-streams4"
        workload = named("cb-ar-opt2").but(name=label, ranks=2, iterations=8, compute_streams=4, grid=grid)
        yield SuiteCell(label, workload, (SEQUENTIAL, PLAIN, Candidate.of(high())), rounds=5, confirm=2)
    yield from _grid_cells(("mb-ar", "mb-a2a"))


def _grid_cells(names: tuple[str, ...]) -> Iterator[SuiteCell]:
    for name in names:
        for option in ("opt2", "opt1"):
            base = named(f"{name}-{option}").but(ranks=2, iterations=4)
            natural = base.compute.tiles()
            for grid in (None, *((n, n) for n in reversed(PAPER_GRIDS))):
                blocks = (grid or natural)[0] * (grid or natural)[1]
                label = f"{name}-{option}-{'natural' if grid is None else grid[0]}"
                # Small grids are slow; fewer rounds keep them from taking most of the time.
                slow = blocks < 1024 and name.startswith("mb")
                yield SuiteCell(
                    label,
                    base.but(name=label, grid=grid),
                    paper_candidates(option, blocks),
                    rounds=4 if slow else 6,
                    confirm=2 if slow else 3,
                )


def _fig2_cells() -> Iterator[SuiteCell]:
    """The diagonal of Fig. 2 in the paper's own setting, with both of its controls."""
    for side in reversed(PAPER_GRIDS):
        for option in ("opt2", "opt1"):
            name = f"cb-ar-{option}-{side}"
            workload = paper_reading(named(f"cb-ar-{option}")).but(name=name, ranks=2, grid=(side, side))
            tries = [SEQUENTIAL, PLAIN, Candidate.of(high())]
            if side * side > _TWO_PER_SM:
                tries += [Candidate.of(high(rules=(Rule(GEMM, n),))) for n in (3, 2)]
            yield SuiteCell(name, workload, tuple(tries), rounds=4, confirm=2)


def _headline(iterations: int, rounds: int) -> SuiteCell:
    """cb-ar with opt2's tile and the default grid: the case of the paper's best gain."""
    workload = named("cb-ar").but(name="cb-ar-best", ranks=2, iterations=iterations)
    tries = [SEQUENTIAL, PLAIN, Candidate.of(high())]
    for n in (3, 2):
        for head in (0, 5):
            tries.append(Candidate.of(high(rules=(Rule(GEMM, n),), head_start_us=head)))
    tries.append(Candidate.of(high(head_start_us=5)))
    tries.append(Candidate.of(Policy(rules=(Rule(GEMM, 3),))))
    tries.append(Candidate("default+res3", high(residency=3)))
    for ctas in (10, 16):
        policy = high(rules=(Rule(GEMM, 3),), head_start_us=5, max_ctas=ctas)
        tries.append(Candidate.of(policy))
    return SuiteCell("cb-ar-best", workload, tuple(tries), rounds=rounds, confirm=6)


def _balanced(cell: SuiteCell, ctas: int) -> SuiteCell:
    """The same cell with fewer CTAs and a collective that, alone, takes about as long as the GEMM."""
    name = f"{cell.name}-ctas{ctas}"
    tries = tuple(
        replace(c, policy=replace(c.policy, max_ctas=ctas))
        for c in cell.candidates
        if c.policy.max_ctas is None
    )
    return replace(
        cell, name=name, workload=cell.workload.but(name=name), candidates=tries, comm_share=0.95, ctas=ctas
    )


def modern_candidates(compute: Compute) -> tuple[Candidate, ...]:
    """CTA limits and head starts, then priority; residency for Triton kernels, reserved SMs for cuBLAS."""
    found = [SEQUENTIAL, PLAIN, Candidate.of(Policy(head_start_us=5)), Candidate.of(PLACED)]
    for ctas in (4, 6, 12, 16):
        found.append(Candidate.of(Policy(max_ctas=ctas)))
        found.append(Candidate.of(Policy(max_ctas=ctas, head_start_us=5)))
        found.append(Candidate.of(replace(PLACED, max_ctas=ctas)))
    found.append(Candidate.of(high()))
    found.append(Candidate.of(high(head_start_us=3)))
    found.append(Candidate.of(high(head_start_us=10)))
    found.append(Candidate.of(high(max_ctas=6, head_start_us=5)))
    if compute.kind.startswith("triton"):
        found.append(Candidate.of(high(rules=(Rule(GEMM, 1),), head_start_us=5)))
    if compute.kind == CUBLAS:
        found.append(Candidate.of(Policy(max_ctas=4, sm_reserve=8)))
    return tuple(found)


def _gemm(m: int, n: int, k: int) -> Compute:
    return Compute(kind="gemm", shape=(m, n, k))


# Llama-3 8B: hidden 4096, inner 14336, q+k+v 6144. 70B: hidden 8192, inner 28672, q+k+v 10240.
# Gate and up projections are one GEMM, as frameworks run them.
MODERN_COMPUTE: dict[str, Compute] = {
    "cublas-8192": _gemm(8192, 8192, 8192),
    "llama8b-qkv": Compute(kind="gemm", shape=(16384, 6144, 4096)),
    "llama8b-out": Compute(kind="gemm", shape=(16384, 4096, 4096)),
    "llama8b-up": _gemm(8192, 28672, 4096),
    "llama8b-down": _gemm(8192, 4096, 14336),
    "llama70b-qkv": _gemm(8192, 10240, 8192),
    "llama70b-up": _gemm(4096, 57344, 8192),
    "llama70b-down": _gemm(4096, 8192, 28672),
    "attention-8b": Compute(kind="attention", shape=(8, 32, 2048, 128), repeat=3),
    "attention-70b": Compute(kind="attention", shape=(4, 64, 4096, 128)),
    "layernorm": Compute(kind="layer_norm", shape=(16384, 8192), repeat=8),
    "gelu": Compute(kind="gelu", shape=(16384, 8192), repeat=8),
    "triton-mlp": Compute(kind="triton_mlp", shape=(8192, 4096, 14336), tile=(128, 128, 64), warps=8),
    "triton-128x256": Compute(kind="triton_gemm", shape=(8192, 8192, 8192), tile=(128, 256, 64), warps=8),
    "conv-3x3": Compute(kind="conv", shape=(128, 256, 56, 56, 256, 3), repeat=3),
}

# Each compute operation with collectives that overlap with it in training, and the collective's share of
# the compute time. The most common operations appear several times.
_MODERN: tuple[tuple[str, str, float], ...] = (
    ("cublas-8192", "all_reduce", 1.0),
    ("cublas-8192", "all_reduce", 0.5),
    ("llama8b-qkv", "all_gather", 1.0),
    ("llama8b-out", "reduce_scatter", 0.5),
    ("llama8b-up", "all_gather", 0.5),
    ("llama8b-down", "reduce_scatter", 1.0),
    ("llama70b-qkv", "all_gather", 0.5),
    ("llama70b-up", "all_reduce", 1.0),
    ("llama70b-up", "reduce_scatter", 0.5),
    ("llama70b-down", "all_reduce", 0.5),
    ("attention-8b", "all_reduce", 1.0),
    ("attention-8b", "all_to_all", 0.5),
    ("attention-70b", "all_gather", 0.5),
    ("layernorm", "all_reduce", 0.5),
    ("layernorm", "all_gather", 1.0),
    ("gelu", "reduce_scatter", 0.5),
    ("triton-mlp", "all_reduce", 1.0),
    ("triton-mlp", "all_to_all", 0.5),
    ("triton-128x256", "all_reduce", 1.0),
    ("conv-3x3", "all_reduce", 0.5),
)

_SHORT = {"all_reduce": "ar", "all_gather": "ag", "reduce_scatter": "rs", "all_to_all": "a2a"}


def _modern_cell(compute: str, collective: str, share: float, iterations: int = 6) -> SuiteCell:
    name = f"{compute}-{_SHORT[collective]}-{share:g}"
    what = MODERN_COMPUTE[compute]
    workload = Workload(name=name, compute=what, collective=collective, ranks=2, iterations=iterations)
    return SuiteCell(name, workload, modern_candidates(what), comm_share=share, rounds=7, confirm=5)


def _quick_cells() -> Iterator[SuiteCell]:
    yield _headline(iterations=4, rounds=5)
    few = (SEQUENTIAL, PLAIN, Candidate.of(Policy(head_start_us=5)), Candidate.of(high()))
    # The sizes are fixed so that two runs measure the same workload; on an H200 they come close to the
    # fraction in the name.
    for compute, collective, share, size in (
        ("cublas-8192", "all_reduce", 1.0, 304 << 20),
        ("attention-8b", "reduce_scatter", 0.5, 180 << 20),
        ("layernorm", "all_gather", 0.5, 152 << 20),
        ("triton-128x256", "all_to_all", 0.5, 22 << 20),
    ):
        cell = _modern_cell(compute, collective, share)
        yield SuiteCell(cell.name, cell.workload.but(bytes=size), few, rounds=7, confirm=3)


def _check_cells() -> Iterator[SuiteCell]:
    """Small workloads of odd sizes that verify the results of collectives; they also run on a CPU."""
    for collective, short in _SHORT.items():
        for dtype in ("fp32", "fp64"):
            name = f"{short}-{dtype}"
            compute = Compute(kind="gemm", shape=(129, 65, 33), dtype=dtype)
            workload = Workload(
                name=name, compute=compute, collective=collective, bytes=1_000_003, iterations=3
            )
            yield SuiteCell(name, workload, (SEQUENTIAL, PLAIN), rounds=3, confirm=1)


def suites() -> dict[str, Suite]:
    """Every suite by name."""
    modern = tuple(_modern_cell(*row) for row in _MODERN)
    return {
        suite.name: suite
        for suite in (
            Suite("quick", "five workloads, under a minute", tuple(_quick_cells()), 12, 55),
            Suite(
                "paper",
                "arXiv:2606.09200 with weft's kernels; fig2 is the paper's setting",
                tuple(_paper_cells()),
                12,
                600,
            ),
            Suite(
                FIG2, "Fig. 2 of arXiv:2606.09200 in the paper's own setting", tuple(_fig2_cells()), 10, 300
            ),
            Suite(
                "check",
                "every collective against a reference, small and odd sizes",
                tuple(_check_cells()),
                8,
                60,
            ),
            Suite("modern", "kernels of current models, all four collectives", modern, 8, 300),
        )
    }


def suite(name: str) -> Suite:
    """The suite with this name. Raises UsageError for an unknown name."""
    known = suites()
    check_choice("suite", name, known)
    return known[name]
