"""Clocks, temperature and power of a GPU, read through NVML with ctypes."""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref, c_uint, c_void_p
from typing import Any

SM_CLOCK, MEMORY_CLOCK = 1, 2
GPU_TEMPERATURE = 0


class Clocks:
    """Reads the sensors of one GPU, given by UUID or index."""

    def __init__(self, uuid: str = "", index: int = 0, library: Any = None) -> None:
        self._nvml: Any = None
        self._gpu = c_void_p()
        try:
            nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
            if nvml.nvmlInit_v2() == 0 and self._find(nvml, uuid, index):
                self._nvml = nvml
        except (OSError, AttributeError):
            pass

    def _find(self, nvml: Any, uuid: str, index: int) -> bool:
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        if uuid and nvml.nvmlDeviceGetHandleByUUID(name.encode(), byref(self._gpu)) == 0:
            return True
        return bool(nvml.nvmlDeviceGetHandleByIndex_v2(index, byref(self._gpu)) == 0)

    def read(self) -> dict[str, float]:
        """`sm_mhz`, `memory_mhz`, `celsius`, `watts` as far as this GPU reports them; empty without NVML."""
        if self._nvml is None:
            return {}
        found: dict[str, float] = {}
        number = c_uint()
        for name, function, argument, scale in (
            ("sm_mhz", "nvmlDeviceGetClockInfo", SM_CLOCK, 1),
            ("memory_mhz", "nvmlDeviceGetClockInfo", MEMORY_CLOCK, 1),
            ("celsius", "nvmlDeviceGetTemperature", GPU_TEMPERATURE, 1),
            ("watts", "nvmlDeviceGetPowerUsage", None, 1000),
        ):
            with contextlib.suppress(AttributeError):
                arguments = (self._gpu,) if argument is None else (self._gpu, c_uint(argument))
                if getattr(self._nvml, function)(*arguments, byref(number)) == 0:
                    found[name] = number.value / scale
        return found
