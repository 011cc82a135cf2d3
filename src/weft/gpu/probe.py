"""The GPUs of this machine: values from the driver, completed from the preset for the same GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from weft.errors import UnavailableError
from weft.gpu import hip, nvml
from weft.gpu.driver import Attribute, Driver, load_driver
from weft.gpu.presets import GPU_PRESETS
from weft.gpu.specs import GpuSpec, Throughput


@dataclass(frozen=True)
class Gpu:
    """One GPU as this process sees it (after CUDA_VISIBLE_DEVICES)."""

    index: int
    name: str
    bus_id: str
    spec: GpuSpec
    """Values from the driver, otherwise from the preset. Rates of a GPU without a preset are None."""
    preset: str | None
    """The preset that completed the values; None for a GPU without one."""
    driver: str
    """Driver release and the newest CUDA or HIP version that it supports."""
    active_links: int | None
    """Active NVLinks; None if unknown."""
    peers: tuple[str, ...]
    """Row of the peer matrix, by index: `self`, `nvlink`, `xgmi`, `pcie` or `none`."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """The compute capability as (major, minor)."""
        return self.spec.compute_capability

    @property
    def memory_bytes(self) -> int:
        """Device memory in bytes."""
        return self.spec.memory_bytes


# Device names as the drivers report them, in order of precedence. GH200, A4000 and MI300A must not match.
_NAMES = (
    (r"\bA40\b", "a40"),
    (r"\bA100.*80GB", "a100-80gb"),
    (r"\bA100\b", "a100-40gb"),
    (r"\bH100\b", "h100"),
    (r"\bH200\b", "h200"),
    (r"\bG?B200\b", "b200"),
    (r"\bMI250X\b", "mi250x"),
    (r"\bMI300X\b", "mi300x"),
)

_LIVE = {
    "sms": Attribute.MULTIPROCESSOR_COUNT,
    "warp_size": Attribute.WARP_SIZE,
    "max_threads_per_block": Attribute.MAX_THREADS_PER_BLOCK,
    "max_threads_per_sm": Attribute.MAX_THREADS_PER_MULTIPROCESSOR,
    "max_blocks_per_sm": Attribute.MAX_BLOCKS_PER_MULTIPROCESSOR,
    "max_multi_warp_blocks_per_sm": Attribute.MAX_BLOCKS_PER_MULTIPROCESSOR,
    "registers_per_sm": Attribute.MAX_REGISTERS_PER_MULTIPROCESSOR,
    "registers_per_block": Attribute.MAX_REGISTERS_PER_BLOCK,
    "shared_bytes_per_sm": Attribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
    "shared_bytes_per_block": Attribute.MAX_SHARED_MEMORY_PER_BLOCK,
    "shared_bytes_per_block_optin": Attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    "shared_reserve_bytes_per_block": Attribute.RESERVED_SHARED_MEMORY_PER_BLOCK,
    "l2_bytes": Attribute.L2_CACHE_SIZE,
    "copy_engines": Attribute.ASYNC_ENGINE_COUNT,
}


def probe(load: Callable[[], Driver] = load_driver) -> list[Gpu]:
    """The GPUs of this machine; an empty list if there is no GPU or no driver."""
    try:
        return cuda_gpus(load())
    except UnavailableError:
        return [_of_hip(device) for device in hip.devices()]


def cuda_gpus(driver: Driver) -> list[Gpu]:
    """NVIDIA GPUs through a loaded driver. Raises UnavailableError if a query fails."""
    with nvml.session() as library:
        major, minor = driver.cuda_version()
        release = f"{nvml.driver_release(library) or 'unknown'} (CUDA {major}.{minor})"
        devices = [driver.device(i) for i in range(driver.device_count())]
        links = [nvml.active_links(library, driver.bus_id(d)) for d in devices]
    return [_of_cuda(driver, devices, index, release, active) for index, active in enumerate(links)]


def _of_cuda(driver: Driver, devices: list[int], index: int, release: str, active: int | None) -> Gpu:
    device = devices[index]
    name = driver.name(device)
    capability = (
        driver.attribute(device, Attribute.COMPUTE_CAPABILITY_MAJOR),
        driver.attribute(device, Attribute.COMPUTE_CAPABILITY_MINOR),
    )
    live: dict[str, Any] = {f: driver.attribute(device, a) for f, a in _LIVE.items()}
    live["memory_bytes"] = driver.memory_bytes(device)
    live["boost_mhz"] = driver.attribute(device, Attribute.CLOCK_RATE_KHZ) // 1000
    # All buses that a CUDA driver reports make two transfers per clock.
    width_bytes = driver.attribute(device, Attribute.GLOBAL_MEMORY_BUS_WIDTH_BITS) / 8
    clock_hz = driver.attribute(device, Attribute.MEMORY_CLOCK_RATE_KHZ) * 1e3
    live["memory_bytes_per_s"] = 2 * clock_hz * width_bytes
    spec, preset = complete(name, "nvidia", capability, live)
    peers = tuple("self" if d == device else driver.peer(device, d) for d in devices)
    return Gpu(index, name, driver.bus_id(device), _with_links(spec, active), preset, release, active, peers)


def _of_hip(device: hip.HipDevice) -> Gpu:
    spec, preset = complete(device.name, "amd", device.compute_capability, device.live)
    return Gpu(device.index, device.name, device.bus_id, spec, preset, device.driver, None, device.peers)


def complete(
    name: str, vendor: str, capability: tuple[int, int], live: Mapping[str, Any]
) -> tuple[GpuSpec, str | None]:
    """A spec from driver values (GpuSpec field → value, 0 if unknown), completed from a preset; and its name.

    The preset is chosen by the device's name. Without a preset the name is None: allocation rules come from
    the vendor's nearest older architecture, and rates stay unknown.
    """
    known = next((preset for pattern, preset in _NAMES if re.search(pattern, name, re.IGNORECASE)), None)
    base = GPU_PRESETS[known] if known else _nearest(vendor, capability)
    live_values = {key: value for key, value in live.items() if value}
    if known and live_values.get("sms", base.sms) == base.sms:
        # Data-sheet rates assume data-sheet clocks: keep both from the preset.
        live_values = {k: v for k, v in live_values.items() if k not in ("memory_bytes_per_s", "boost_mhz")}
        return replace(base, **live_values), known
    live_values["compute_capability"] = capability
    if vendor == "nvidia":
        live_values["arch"] = f"sm_{capability[0]}{capability[1]}"
        if capability < (8, 0):  # cuda_occupancy.h: no driver reserve, coarser unit
            live_values |= {"shared_reserve_bytes_per_block": 0, "shared_unit_bytes": 256}
    if not known:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        return replace(base, **live_values, name=slug, title=name, throughput=Throughput()), None
    scaled = replace(base, **live_values, title=name)
    return replace(scaled, throughput=_scaled(base, scaled)), known


def _nearest(vendor: str, capability: tuple[int, int]) -> GpuSpec:
    family = sorted(
        (s for s in GPU_PRESETS.values() if s.vendor == vendor), key=lambda s: s.compute_capability
    )
    older = [s for s in family if s.compute_capability <= capability]
    return older[-1] if older else family[0]


def _scaled(base: GpuSpec, here: GpuSpec) -> Throughput:
    # A slice or a smaller board of the same chip (MIG, PCIe card): rates scale with SMs and clock.
    ratio = here.sms * here.boost_mhz / (base.sms * base.boost_mhz)
    rates = {f.name: getattr(base.throughput, f.name) for f in fields(Throughput)}
    return Throughput(**{name: None if rate is None else rate * ratio for name, rate in rates.items()})


def _with_links(spec: GpuSpec, active: int | None) -> GpuSpec:
    if active is None:
        return spec
    if active == 0:  # peers, if any, are reached through the host
        return replace(spec, link_kind="pcie", links=1, link_bytes_per_s=spec.pcie_bytes_per_s)
    return replace(spec, link_kind="nvlink", links=active)
