"""Launch paced collectives through the CUDA driver, where the shim intercepts them like NCCL's kernels."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field

from weft.comm.node import Paced
from weft.comm.paced_copies import UrgentCopies, driver_copies
from weft.comm.paced_delay import ReadyDelay, StreamDelays
from weft.comm.paced_kernel import KernelArguments, kernel_name, kernel_text
from weft.comm.paced_mail import Mailbox
from weft.comm.paced_plan import (
    CYCLES_PER_NS,
    Mail,
    PlannedKernel,
    kernel_arguments,
    scratch_bytes,
    split_kernel,
)
from weft.gpu.driver import Attribute, Driver, Handle

CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
FIRST_WITH_CLUSTERS = 90
SCRATCH_CTAS = 32
"""Scratch memory is allocated for at least this many CTAs."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_uint), ("unused", c_uint), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", c_uint),
    )


def launch_config(ctas: int, threads: int, shared_bytes: int, cluster: int, stream: int) -> LaunchConfig:
    """A launch of `ctas` CTAs, in clusters if the grid is divisible by the cluster size, as in NCCL."""
    config = LaunchConfig((c_uint * 3)(ctas, 1, 1), (c_uint * 3)(threads, 1, 1), shared_bytes, stream)
    if cluster > 1 and ctas % cluster == 0:
        attribute = LaunchAttribute(CLUSTER_DIMENSION)
        attribute.value[0], attribute.value[1], attribute.value[2] = cluster, 1, 1
        config.attributes, config.attribute_count = ctypes.pointer(attribute), 1
    return config


class ReadyLaunch:
    """A kernel and all arguments of its launch. `leads`: it is the first launch of its collective."""

    def __init__(
        self,
        driver: Driver,
        function: Handle,
        config: LaunchConfig,
        arguments: KernelArguments,
        *,
        leads: bool,
    ) -> None:
        self.leads, self._call, self._arguments = leads, driver.call, arguments
        self._cycles = arguments.most_cycles
        pointers = (c_void_p * 1)(ctypes.addressof(arguments))
        self._given = ("cuLaunchKernelEx", ctypes.byref(config), function, pointers, c_void_p())

    def launch(self, late_us: float) -> None:
        """Launch the kernel; the last rank arrives `late_us` microseconds later than this one."""
        wait_ns = round(1e3 * late_us)
        self._arguments.wait_ns = wait_ns
        self._arguments.most_cycles = self._cycles + CYCLES_PER_NS * wait_ns
        self._call(*self._given)


@dataclass
class _Device:
    """Modules and memory in one CUDA context."""

    capability: int
    most_shared_bytes: int
    functions: dict[tuple[str, str, int], Handle] = field(default_factory=dict)
    """Kernels by collective, operation and threads; copies of different element sizes share a name."""
    mailboxes: dict[tuple[int, int], int] = field(default_factory=dict)
    scratch: int = 0
    scratch_size: int = 0
    urgent: UrgentCopies | None = None


class PacedLauncher:
    """Launches planned kernels in the current CUDA context of the calling thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._devices: dict[int, _Device] = {}
        self._delays: StreamDelays | None = None

    def current_device(self) -> int:
        """Index of the GPU of the current context."""
        number = ctypes.c_int()
        self._driver.call("cuCtxGetDevice", ctypes.byref(number))
        return number.value

    def mailbox(self, comm: int, peer: int) -> int:
        """The GPU address of a communicator's mailbox for a peer, in the current context."""
        boxes = self._device().mailboxes
        if (comm, peer) not in boxes:
            address, size = c_uint64(), c_size_t(ctypes.sizeof(Mailbox))
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), size)
            self._driver.call("cuMemsetD8_v2", address, c_ubyte(0), size)
            self._driver.call("cuStreamSynchronize", c_void_p())  # other streams do not wait for a memset
            boxes[comm, peer] = address.value
        return boxes[comm, peer]

    def launch(
        self, planned: PlannedKernel, paced: Paced, late_us: float = 0.0, mail: Mail | None = None
    ) -> list[ReadyLaunch]:
        """Launch one rank's part of a collective as described by `paced`.

        `late_us`: how much later than this rank the last rank arrives. `mail`: message and answer of a
        pipeline stage; None: none. Returns the launches, so that they can be repeated.
        """
        made = self.ready(planned, paced, mail)
        for one in made:
            one.launch(late_us if one.leads else 0.0)
        return made

    def ready(self, planned: PlannedKernel, paced: Paced, mail: Mail | None = None) -> list[ReadyLaunch]:
        """The launches of one rank's part of a collective, in order."""
        device = self._device()
        threads, ctas = paced.threads, max(1, paced.ctas)
        scratch = self._scratch(device, max(ctas, SCRATCH_CTAS), threads)
        made: list[ReadyLaunch] = []
        for part, share in split_kernel(planned):
            arguments = kernel_arguments(
                part,
                ctas=ctas,
                threads=threads,
                read_bytes=round(paced.read_bytes * share),
                write_bytes=round(paced.write_bytes * share),
                move_ns=round(1e3 * paced.us * share),
                wait_ns=0,
                scratch=scratch,
                mail=None if made else mail,
            )
            function = self._function(device, part, threads)
            shared = min(paced.shared_bytes, device.most_shared_bytes)
            cluster = part.call.cluster if part.call.cluster is not None else paced.cluster
            cluster = cluster if device.capability >= FIRST_WITH_CLUSTERS else 1
            config = launch_config(ctas, threads, shared, cluster, part.call.stream)
            made.append(ReadyLaunch(self._driver, function, config, arguments, leads=not made))
        return made

    def delay(
        self, planned: PlannedKernel, copied: Paced, paced: Paced, late_us: float = 0.0
    ) -> list[ReadyDelay]:
        """Issue a collective by copy engines as a delay, during which the driver copies the data.

        `copied`: the time of the node's copies. `paced`: the same collective on SMs, for graph captures and
        for drivers that cannot delay a stream.
        """
        self._delays = self._delays or StreamDelays(self._driver)
        device = self._device()
        device.urgent = device.urgent or UrgentCopies(self._driver)
        one = ReadyDelay(
            self._delays,
            planned.call.stream,
            copied.us,
            device.urgent.ready(planned),
            lambda late: self.launch(planned, paced, late),
        )
        one.launch(late_us)
        return [one]

    def memory(self, address: int, size: int) -> int:
        """Allocate `size` bytes of GPU memory and return the address; if `size` is 0, free `address`."""
        made = c_uint64(address)
        if size:
            self._driver.call("cuMemAlloc_v2", ctypes.byref(made), c_size_t(size))
            return made.value
        self._driver.call("cuMemFree_v2", made)
        return 0

    def copy(self, planned: PlannedKernel) -> None:
        """Only move the data, as NCCL does if a communicator has one rank."""
        for given in driver_copies(planned, planned.call.stream):
            self._driver.call(*given)

    def _device(self) -> _Device:
        context = c_void_p()
        self._driver.call("cuCtxGetCurrent", ctypes.byref(context))
        key = context.value or 0
        if key not in self._devices:
            device = self.current_device()
            known = self._driver.attribute
            major = known(device, Attribute.COMPUTE_CAPABILITY_MAJOR)
            capability = 10 * major + known(device, Attribute.COMPUTE_CAPABILITY_MINOR)
            most = known(device, Attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            self._devices[key] = _Device(capability, most)
        return self._devices[key]

    def _function(self, device: _Device, planned: PlannedKernel, threads: int) -> Handle:
        key = planned.kind, planned.operation, threads
        if key not in device.functions:
            name = kernel_name(planned.kind, planned.operation)
            module = self._driver.load(kernel_text(name, planned.operation, threads, device.capability))
            function = self._driver.function(module, name)
            self._driver.allow_dynamic_shared(function, device.most_shared_bytes)
            device.functions[key] = function
        return device.functions[key]

    def _scratch(self, device: _Device, ctas: int, threads: int) -> int:
        """The address of scratch memory. To grow, it is allocated anew; the old block stays allocated."""
        size = scratch_bytes(ctas, threads)
        if size > device.scratch_size:
            address = c_uint64()
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), c_size_t(size))
            device.scratch, device.scratch_size = address.value, size
        return device.scratch
