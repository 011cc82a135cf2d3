"""NCCL through its C API: R ranks in one process on one GPU, one communicator and one stream each.

Several ranks on one GPU need NCCL 2.30 or newer (NCCL_MULTI_RANK_GPU_ENABLE=1). This module works on torch
tensors without importing torch: it uses only `data_ptr()`, `numel()` and `dtype` of a tensor and
`cuda_stream` of a stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from weft.errors import UnavailableError, UsageError, WeftError

LIBRARY_VARIABLE = "WEFT_NCCL"
"""Environment variable with the path of the NCCL library to use."""
SHARED_GPU_VERSION = 23000  # first release that places several ranks on one GPU

NCCL_DTYPES = {
    "float32": 7,
    "float64": 8,
    "float16": 6,
    "bfloat16": 9,
    "uint8": 1,
    "int8": 0,
    "int32": 2,
    "int64": 4,
}
NCCL_DTYPES |= {"bool": 1, "uint32": 3, "uint64": 5, "float8_e4m3fn": 10, "float8_e5m2": 11}
OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "avg": 4}


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t as of 2.18. NCCL recognizes older layouts by their size and version."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
    )


def make_config(max_ctas: int | None) -> Config:
    """A configuration that caps the CTAs of every collective; `max_ctas` None: NCCL's choice."""
    undefined = -(2**31)
    ctas = undefined if max_ctas is None else max_ctas
    return Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21800, 1, undefined, undefined, ctas, None, undefined)


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


_SINCE_2_28: dict[str, tuple[Any, ...]] = {
    "ncclAlltoAll": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclCommWindowRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p), c_int),
}
_SYMMETRIC_WINDOW = 1  # NCCL_WIN_COLL_SYMMETRIC


class Library:
    """A loaded NCCL library. Every failed call raises WeftError with NCCL's error message."""

    def __init__(self, handle: Any, path: str) -> None:
        self.path = path
        self._handle = handle
        try:
            for name, arguments in _PROTOTYPES.items():
                function = getattr(handle, name)
                function.argtypes, function.restype = arguments, c_int
            handle.ncclGetErrorString.argtypes, handle.ncclGetErrorString.restype = (c_int,), c_char_p
            for name, arguments in _SINCE_2_28.items():
                if hasattr(handle, name):
                    getattr(handle, name).argtypes = arguments
        except AttributeError as error:
            raise UnavailableError(f"{path} is not NCCL 2.18 or newer: {error}") from None
        number = c_int()
        self.call("ncclGetVersion", byref(number))
        self.version = number.value

    @property
    def version_text(self) -> str:
        """The version in NCCL's notation: 2.32.3."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library; raise WeftError if it fails."""
        result = getattr(self._handle, name)(*arguments)
        if result:
            words = (self._handle.ncclGetErrorString(result) or b"").decode(errors="replace")
            detail = self._last_error()
            raise WeftError(f"{name} failed: {words or result}{f' ({detail})' if detail else ''}")

    def _last_error(self) -> str:
        function = getattr(self._handle, "ncclGetLastError", None)
        if function is None:
            return ""
        function.argtypes, function.restype = (c_void_p,), c_char_p
        return " ".join((function(None) or b"").decode(errors="replace").split())

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Issue the calls inside as one group; the group is closed even if one of them fails."""
        self.call("ncclGroupStart")
        try:
            yield
        except BaseException:
            with contextlib.suppress(WeftError):
                self.call("ncclGroupEnd")
            raise
        self.call("ncclGroupEnd")

    def require_shared_gpu(self) -> None:
        """Raise UnavailableError unless several ranks can share a GPU."""
        if self.version < SHARED_GPU_VERSION:
            raise UnavailableError(
                f"NCCL {self.version_text} ({self.path}) has one rank per GPU; several need 2.30 or newer: "
                f"set {LIBRARY_VARIABLE} to a newer libnccl.so.2 (pip install -U nvidia-nccl-cu13)"
            )


def nccl_path() -> str:
    """Path of NCCL: from the environment variable, the Python wheel, or the system."""
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        if not Path(given).is_file():
            raise UnavailableError(f"{LIBRARY_VARIABLE}={given}: no such file; set it to a libnccl.so.2")
        return str(Path(given).resolve())
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        import nvidia.nccl  # type: ignore[import-not-found,unused-ignore]

        for folder in nvidia.nccl.__path__:
            found = Path(folder) / "lib" / "libnccl.so.2"
            if found.is_file():
                return str(found)
    return "libnccl.so.2"


def load_nccl(path: str | None = None) -> Library:
    """Load NCCL and enable several ranks per GPU where it supports them."""
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    path = path or nccl_path()
    try:
        # No RTLD_DEEPBIND: the shim must intercept the library's own dlsym calls.
        return Library(ctypes.CDLL(path), path)
    except OSError as error:
        raise UnavailableError(
            f"NCCL cannot be loaded ({error}); install nvidia-nccl-cu13 or set {LIBRARY_VARIABLE}"
        ) from None


class NcclRanks:
    """R communicators of one process on one GPU. Each method issues a collective for all ranks as one group.

    `send`, `recv` and `streams` have one entry per rank. No method waits for the GPU. `own`: the only rank in
    this process, for a library that needs no other ranks (`weft.comm.paced`); the entries of other ranks are
    then ignored. None: all ranks are in this process.
    """

    def __init__(
        self, library: Library, size: int, max_ctas: int | None = None, *, own: int | None = None
    ) -> None:
        if size < (2 if own is None else 1):
            raise UsageError(f"ranks {size} is not valid; use 2 or more")
        library.require_shared_gpu()
        self.library, self.size, self.max_ctas = library, size, max_ctas
        unique, config = UniqueId(), make_config(max_ctas)
        library.call("ncclGetUniqueId", byref(unique))
        self._comms = {rank: c_void_p() for rank in (range(size) if own is None else (own,))}
        with library.group():
            for rank, comm in self._comms.items():
                library.call("ncclCommInitRankConfig", byref(comm), size, unique, rank, byref(config))

    def communicator(self, rank: int) -> c_void_p:
        """The communicator of a rank in this process."""
        return self._comms[rank]

    def all_reduce(self, send: Any, recv: Any, streams: Any, op: str = "sum") -> None:
        """Reduce all inputs into every output."""
        self._each("ncclAllReduce", send, recv, streams, send, OPS[op])

    def all_gather(self, send: Any, recv: Any, streams: Any) -> None:
        """Concatenate all inputs into every output."""
        self._each("ncclAllGather", send, recv, streams, send)

    def reduce_scatter(self, send: Any, recv: Any, streams: Any, op: str = "sum") -> None:
        """Reduce all inputs; each rank receives its equal part."""
        self._each("ncclReduceScatter", send, recv, streams, recv, OPS[op])

    def broadcast(self, send: Any, recv: Any, streams: Any, root: int) -> None:
        """Copy the input of `root` into every output."""
        self._each("ncclBroadcast", send, recv, streams, recv, root)

    def all_to_all(self, send: Any, recv: Any, streams: Any) -> None:
        """Exchange equal parts: part j of rank i's `send` becomes part i of rank j's `recv`."""
        part = next(send[rank] for rank in self._comms).numel() // self.size
        if len(self._comms) == 1:  # one call instead of two per peer
            ((rank, comm),) = self._comms.items()
            data = send[rank].data_ptr(), recv[rank].data_ptr(), part, _dtype(send[rank])
            self.library.call("ncclAlltoAll", *data, comm, streams[rank].cuda_stream)
            return

        def piece(tensors: Any, rank: int, number: int) -> Any:
            return tensors[rank][number * part : (number + 1) * part] if rank in self._comms else None

        pairs = [(i, j) for i in range(self.size) for j in range(self.size) if {i, j} & self._comms.keys()]
        self.exchange([(i, piece(send, i, j), j, piece(recv, j, i)) for i, j in pairs], streams)

    def exchange(self, moves: Sequence[tuple[int, Any, int, Any]], streams: Any) -> None:
        """Point-to-point transfers as one group: (from rank, tensor, to rank, tensor of the same size)."""
        with self.library.group():
            for source, given, target, taken in moves:
                self._send_or_receive("ncclSend", given, source, target, streams)
                self._send_or_receive("ncclRecv", taken, target, source, streams)

    def register(self, tensors: Any) -> None:
        """Register each rank's tensor as a symmetric window for copy engines; it lasts until `close`."""
        with self.library.group():
            for rank, comm in self._comms.items():
                tensor, window = tensors[rank], c_void_p()
                size = tensor.numel() * tensor.element_size()
                arguments = comm, tensor.data_ptr(), size, byref(window), _SYMMETRIC_WINDOW
                self.library.call("ncclCommWindowRegister", *arguments)

    def close(self, *, abort: bool = False) -> None:
        """Free the communicators; `abort` also ends collectives that are still running."""
        comms, self._comms = self._comms, {}
        for comm in comms.values():
            if comm.value:
                with contextlib.suppress(WeftError):
                    self.library.call("ncclCommAbort" if abort else "ncclCommDestroy", comm)

    def _each(self, name: str, send: Any, recv: Any, streams: Any, counted: Any, *more: int) -> None:
        """One call per rank; the count is the number of elements of `counted`."""
        alone = len(self._comms) == 1  # a single call needs no group
        with contextlib.nullcontext() if alone else self.library.group():
            for rank in self._comms:
                count, kind = counted[rank].numel(), _dtype(counted[rank])
                head = (send[rank].data_ptr(), recv[rank].data_ptr(), count, kind)
                self.library.call(name, *head, *more, self._comms[rank], streams[rank].cuda_stream)

    def _send_or_receive(self, name: str, tensor: Any, rank: int, peer: int, streams: Any) -> None:
        if rank in self._comms and tensor.numel():
            arguments = tensor.data_ptr(), tensor.numel(), _dtype(tensor), peer
            self.library.call(name, *arguments, self._comms[rank], streams[rank].cuda_stream)


def _dtype(tensor: Any) -> int:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in NCCL_DTYPES:
        raise UsageError(f"NCCL has no collective for {name}; use one of {', '.join(NCCL_DTYPES)}")
    return NCCL_DTYPES[name]
