"""Queries to NVML that need no CUDA context: driver release, name, NVLinks. None if NVML has no answer."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

NVML_LIBRARY = "libnvidia-ml.so.1"
_MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS of nvml.h


@contextlib.contextmanager
def session(library: str = NVML_LIBRARY) -> Iterator[ctypes.CDLL | None]:
    """An initialised NVML; None if it is missing or fails to initialise."""
    try:
        nvml = ctypes.CDLL(library)
        ready = nvml.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        yield None
        return
    try:
        yield nvml if ready else None
    finally:
        if ready:
            nvml.nvmlShutdown()


def driver_release(nvml: ctypes.CDLL | None) -> str | None:
    """The NVIDIA driver's release, such as `570.86.15`."""
    text = ctypes.create_string_buffer(96)
    if nvml is None or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode(errors="replace")


def first_name(nvml: ctypes.CDLL | None) -> str | None:
    """The first GPU's name."""
    device, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    if nvml is None or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return None
    if nvml.nvmlDeviceGetName(device, text, len(text)):
        return None
    return text.value.decode(errors="replace")


def active_links(nvml: ctypes.CDLL | None, bus_id: str) -> int | None:
    """Number of active NVLinks of the GPU at this PCI address."""
    device = ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device)):
        return None
    return sum(_is_up(nvml, device, link) for link in range(_MAX_LINKS))


def _is_up(nvml: ctypes.CDLL, device: ctypes.c_void_p, link: int) -> bool:
    state = ctypes.c_uint()
    # NVML returns an error for links that the GPU does not have; treat them as down.
    return nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(state)) == 0 and state.value == 1
