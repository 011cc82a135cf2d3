"""AMD GPUs through libamdhip64, for the probe.

Written from the HIP headers and tested only against a fake library, not on AMD hardware. It queries
attributes by number, because the structure of hipGetDeviceProperties changes between ROCm releases.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5")

# hipDeviceAttribute_t of hip_runtime_api.h since ROCm 5; field of GpuSpec → number.
_LIVE = {
    "sms": 63,  # hipDeviceAttributeMultiprocessorCount
    "warp_size": 87,  # hipDeviceAttributeWarpSize
    "max_threads_per_block": 56,  # hipDeviceAttributeMaxThreadsPerBlock
    "max_threads_per_sm": 57,  # hipDeviceAttributeMaxThreadsPerMultiProcessor
    "shared_bytes_per_block": 74,  # hipDeviceAttributeMaxSharedMemoryPerBlock
    "shared_bytes_per_block_optin": 74,  # AMD has no opt-in
}
_MAJOR, _MINOR = 23, 61  # hipDeviceAttributeComputeCapabilityMajor, …Minor
_LINK_XGMI = 4  # HSA_AMD_LINK_INFO_TYPE_XGMI of hsa_ext_amd.h


@dataclass(frozen=True)
class HipDevice:
    """One GPU as reported by the HIP runtime."""

    index: int
    name: str
    bus_id: str
    driver: str
    compute_capability: tuple[int, int]
    live: dict[str, Any]
    peers: tuple[str, ...]


def devices(libraries: tuple[str, ...] = LIBRARIES) -> list[HipDevice]:
    """All GPUs of the HIP runtime; an empty list if there is no runtime or GPU, or the runtime fails."""
    library = _load(libraries)
    count = _int(library, "hipGetDeviceCount") if library else 0
    return [_device(library, index, count) for index in range(count)] if library else []


def _load(libraries: tuple[str, ...]) -> ctypes.CDLL | None:
    for name in libraries:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _int(library: ctypes.CDLL, function: str, *args: int) -> int:
    value = ctypes.c_int()
    known = hasattr(library, function)
    return value.value if known and getattr(library, function)(ctypes.byref(value), *args) == 0 else 0


def _text(library: ctypes.CDLL, function: str, device: int) -> str:
    text = ctypes.create_string_buffer(256)
    known = hasattr(library, function)
    failed = not known or getattr(library, function)(text, len(text), device)
    return "" if failed else text.value.decode(errors="replace")


def _device(library: ctypes.CDLL, index: int, count: int) -> HipDevice:
    memory = ctypes.c_size_t()
    if hasattr(library, "hipDeviceTotalMem"):
        library.hipDeviceTotalMem(ctypes.byref(memory), index)
    live: dict[str, Any] = {f: _int(library, "hipDeviceGetAttribute", n, index) for f, n in _LIVE.items()}
    version = _int(library, "hipDriverGetVersion")
    return HipDevice(
        index=index,
        name=_text(library, "hipDeviceGetName", index) or "AMD GPU",
        bus_id=_text(library, "hipDeviceGetPCIBusId", index),
        driver=f"HIP {version // 10_000_000}.{version // 100_000 % 100}",
        compute_capability=(
            _int(library, "hipDeviceGetAttribute", _MAJOR, index),
            _int(library, "hipDeviceGetAttribute", _MINOR, index),
        ),
        live=live | {"memory_bytes": memory.value},
        peers=tuple("self" if i == index else _peer(library, index, i) for i in range(count)),
    )


def _peer(library: ctypes.CDLL, device: int, other: int) -> str:
    if not _int(library, "hipDeviceCanAccessPeer", device, other):
        return "none"
    kind, hops = ctypes.c_uint32(), ctypes.c_uint32()
    if not hasattr(library, "hipExtGetLinkTypeAndHopCount"):
        return "pcie"
    library.hipExtGetLinkTypeAndHopCount(device, other, ctypes.byref(kind), ctypes.byref(hops))
    return "xgmi" if kind.value == _LINK_XGMI else "pcie"
