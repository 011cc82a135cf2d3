"""GEMM costs on a GPU with a simulator profile: `weft.gpu.cost` at the profile's rates."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from weft.gpu.cost import GemmCost, GemmRates, gemm_cost
from weft.gpu.specs import spec
from weft.sim.profile import Profile, names, profile

MOST_KNOWN = 200_000
"""Most GEMMs whose cost is cached."""
_MEMORY_SHARE = 0.85
"""Fraction of the data sheet's memory bandwidth assumed for GPUs without a profile; an H200 reaches it."""
NEAREST = {"a100-80gb": "a100", "b200": "h200"}
"""GPUs without a profile of their own, each with the profile to derive theirs from."""


def machine(name: str) -> Profile:
    """The profile of a GPU, by name or file; without one, derived from the data sheet and a similar GPU."""
    if name.endswith(".json"):
        return profile(name)
    return _derived(spec(name).name)


@lru_cache(maxsize=64)
def _derived(name: str) -> Profile:
    gpu = spec(name)
    if gpu.name in names() or gpu.name == "a100-40gb":
        return profile(gpu.name)
    base = profile(NEAREST.get(gpu.name, "h200" if gpu.vendor == "nvidia" else "mi300x"))
    faster = gpu.fabric_bytes_per_s / base.spec.fabric_bytes_per_s
    share = {
        "memory_tb_s": _MEMORY_SHARE * gpu.memory_bytes_per_s / 1e12,
        "bus_gb_s": base.figures.bus_gb_s * faster,
        "cta_gb_s": base.figures.cta_gb_s * faster,
    }
    source = f"taken from {base.name}, not measured here"
    found = replace(base, name=gpu.name, spec=gpu, sources=dict.fromkeys(base.sources, source))
    return found.with_figures(**share)


class Gemms:
    """GEMM costs on one GPU, cached."""

    def __init__(self, of: Profile) -> None:
        self.profile = of
        self._rates = gemm_rates(of)
        self._known: dict[tuple[tuple[int, int, int], str, int, int, bool], GemmCost] = {}

    def cost(
        self,
        m: int,
        n: int,
        k: int,
        dtype: str = "bf16",
        *,
        parts: int = 1,
        sms: int = 0,
        accumulate: bool = False,
    ) -> GemmCost:
        """The cost of C[m, n] = A[m, k] @ B[k, n], with the arguments of `weft.gpu.cost.gemm_cost`."""
        key = ((m, n, k), dtype, parts, sms, accumulate)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = gemm_cost(
                self.profile.spec,
                self._rates,
                (m, n, k),
                dtype,
                parts=parts,
                sms=sms,
                accumulate=accumulate,
            )
        return found


def gemm_rates(of: Profile) -> GemmRates:
    """The rates that the profile's GPU reaches in the library's GEMM kernels."""
    figures = of.figures
    overhead_ns = figures.latency_ns + figures.memory_latency_ns + figures.block_start_ns
    return GemmRates(
        efficiency=figures.library_efficiency,
        memory_bytes_per_s=figures.memory_tb_s * 1e12,
        tile_overhead_s=overhead_ns * 1e-9,
    )


@lru_cache(maxsize=64)
def gemms(name: str) -> Gemms:
    """The GEMM costs on a GPU by name or profile file."""
    return Gemms(machine(name))
