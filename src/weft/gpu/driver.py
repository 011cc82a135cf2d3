"""A minimal binding to the CUDA driver for the probe, `weft doctor` and the GPU tests.

The library is loaded on first use. Every failure raises UnavailableError with the driver's error message.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from weft.errors import UnavailableError

CUDA_LIBRARY = "libcuda.so.1"


class Attribute(IntEnum):
    """The members of CUdevice_attribute (cuda.h) that weft queries."""

    MAX_THREADS_PER_BLOCK = 1
    MAX_SHARED_MEMORY_PER_BLOCK = 8
    WARP_SIZE = 10
    MAX_REGISTERS_PER_BLOCK = 12
    CLOCK_RATE_KHZ = 13
    MULTIPROCESSOR_COUNT = 16
    MEMORY_CLOCK_RATE_KHZ = 36
    GLOBAL_MEMORY_BUS_WIDTH_BITS = 37
    L2_CACHE_SIZE = 38
    MAX_THREADS_PER_MULTIPROCESSOR = 39
    ASYNC_ENGINE_COUNT = 40
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81
    MAX_REGISTERS_PER_MULTIPROCESSOR = 82
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    MAX_BLOCKS_PER_MULTIPROCESSOR = 106
    RESERVED_SHARED_MEMORY_PER_BLOCK = 111


class FunctionAttribute(IntEnum):
    """The members of CUfunction_attribute (cuda.h) that weft queries or sets."""

    SHARED_SIZE_BYTES = 1
    NUM_REGS = 4
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


_P2P_ACCESS_SUPPORTED, _P2P_NATIVE_ATOMIC_SUPPORTED = 2, 3
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2

Handle = ctypes.c_void_p


class Driver:
    """A loaded and initialised CUDA driver. Devices are integers, everything else is an opaque handle."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.call("cuInit", 0)

    def has(self, symbol: str) -> bool:
        """Whether the driver exports this function."""
        return hasattr(self._library, symbol)

    def address(self, name: str) -> int:
        """The address of a function, for C code to call. Raises UnavailableError if the driver lacks it."""
        if not self.has(name):
            raise UnavailableError(f"the CUDA driver has no {name}; update the NVIDIA driver")
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    def call(self, name: str, *args: Any) -> None:
        """Call a function that returns a CUresult. Raises UnavailableError unless it is CUDA_SUCCESS."""
        if not self.has(name):
            raise UnavailableError(f"the CUDA driver has no {name}; update the NVIDIA driver")
        code = getattr(self._library, name)(*args)
        if code:
            raise UnavailableError(f"{name} failed: {self._message(code)}")

    def _message(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self.has("cuGetErrorString"):
            self._library.cuGetErrorString(code, ctypes.byref(text))
        return f"{text.value.decode() if text.value else 'unknown error'} (CUDA error {code})"

    def _int(self, name: str, *args: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *args)
        return value.value

    def _handle(self, name: str, *args: Any) -> Handle:
        value = Handle()
        self.call(name, ctypes.byref(value), *args)
        return value

    def cuda_version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports as (major, minor), such as (12, 8)."""
        version = self._int("cuDriverGetVersion")
        return version // 1000, version % 1000 // 10

    def device_count(self) -> int:
        """Number of visible GPUs."""
        return self._int("cuDeviceGetCount")

    def device(self, index: int) -> int:
        """The CUdevice of the GPU with this index."""
        return self._int("cuDeviceGet", index)

    def name(self, device: int) -> str:
        """The name that the driver reports, such as `NVIDIA H200`."""
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def bus_id(self, device: int) -> str:
        """PCI address, such as `0000:1b:00.0`."""
        text = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode()

    def memory_bytes(self, device: int) -> int:
        """Device memory in bytes."""
        value = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(value), device)
        return value.value

    def attribute(self, device: int, attribute: Attribute) -> int:
        """The value of an attribute; 0 if this driver does not know it."""
        try:
            return self._int("cuDeviceGetAttribute", int(attribute), device)
        except UnavailableError:
            return 0

    def peer(self, device: int, other: int) -> str:
        """How `device` reaches `other`'s memory: `nvlink`, `pcie` or `none`."""
        if not self._int("cuDeviceGetP2PAttribute", _P2P_ACCESS_SUPPORTED, device, other):
            return "none"
        # NVLink supports native atomics between GPUs, PCIe does not.
        atomics = self._int("cuDeviceGetP2PAttribute", _P2P_NATIVE_ATOMIC_SUPPORTED, device, other)
        return "nvlink" if atomics else "pcie"

    @contextlib.contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make the device's primary context current in this thread."""
        context = self._handle("cuDevicePrimaryCtxRetain", device)
        try:
            self.call("cuCtxSetCurrent", context)
            yield
        finally:
            self._library.cuCtxSetCurrent(None)
            self._library.cuDevicePrimaryCtxRelease_v2(device)

    def load(self, ptx: str) -> Handle:
        """Load a module from PTX text, which the driver compiles for the current device."""
        return self._handle("cuModuleLoadData", ctypes.c_char_p(ptx.encode() + b"\0"))

    def function(self, module: Handle, name: str) -> Handle:
        """The kernel with this name in a module."""
        return self._handle("cuModuleGetFunction", module, ctypes.c_char_p(name.encode()))

    def function_attribute(self, function: Handle, attribute: FunctionAttribute) -> int:
        """An attribute of a kernel."""
        return self._int("cuFuncGetAttribute", int(attribute), function)

    def allow_dynamic_shared(self, function: Handle, size_bytes: int) -> None:
        """Allow launches of this function to request up to `size_bytes` of dynamic shared memory."""
        attribute = int(FunctionAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES)
        self.call("cuFuncSetAttribute", function, attribute, size_bytes)

    def blocks_per_sm(self, function: Handle, threads: int, dynamic_shared_bytes: int) -> int:
        """Resident blocks per SM according to the driver; compare `occupancy.blocks_per_sm`."""
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return self._int(name, function, threads, ctypes.c_size_t(dynamic_shared_bytes))

    def priority_range(self) -> tuple[int, int]:
        """The lowest and the highest stream priority; a higher priority is a smaller number."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self.call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        return least.value, greatest.value

    def stream(self, priority: int) -> Handle:
        """Create a non-blocking stream with this priority."""
        return self._handle("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, priority)

    def event(self, timing: bool = True) -> Handle:
        """Create an event."""
        return self._handle("cuEventCreate", 0 if timing else _EVENT_DISABLE_TIMING)

    def record(self, event: Handle, stream: Handle) -> None:
        """Record an event on a stream."""
        self.call("cuEventRecord", event, stream)

    def elapsed_ms(self, start: Handle, end: Handle) -> float:
        """Milliseconds between two completed events."""
        value = ctypes.c_float()
        # CUDA 13 headers call it _v2; the old name is still exported.
        name = "cuEventElapsedTime" if self.has("cuEventElapsedTime") else "cuEventElapsedTime_v2"
        self.call(name, ctypes.byref(value), start, end)
        return value.value

    def launch(self, function: Handle, blocks: int, threads: int, stream: Handle, *values: Any) -> None:
        """Launch a one-dimensional grid; each value is a ctypes instance."""
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self.call(
            "cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, ctypes.c_void_p()
        )

    def synchronize(self) -> None:
        """Wait for all work in the current context."""
        self.call("cuCtxSynchronize")


def load_driver(library: str = CUDA_LIBRARY) -> Driver:
    """Load and initialise the driver. Raises UnavailableError if there is none or it does not work."""
    try:
        handle = ctypes.CDLL(library)
    except OSError as error:
        raise UnavailableError(
            f"no CUDA driver: {error}; install the NVIDIA driver or run on a machine with a GPU"
        ) from error
    return Driver(handle)
