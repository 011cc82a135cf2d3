"""Several NCCL ranks in one process on one GPU, through NCCL's C API (see tests/gpu/conftest.py)."""

from __future__ import annotations

import ctypes
import os

import torch

SUM, FLOAT32, BFLOAT16 = 0, 7, 9
TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Ranks:
    """`count` ranks, each with its own stream; every collective is issued on all of them."""

    def __init__(self, count: int = 2) -> None:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        self.nccl = ctypes.CDLL(os.environ["WEFT_TEST_NCCL"])
        self.streams = [torch.cuda.Stream() for _ in range(count)]
        self.comms = [ctypes.c_void_p() for _ in range(count)]
        unique = UniqueId()
        self._check(self.nccl.ncclGetUniqueId(ctypes.byref(unique)))
        self._check(self.nccl.ncclGroupStart())
        for rank, comm in enumerate(self.comms):
            self._check(self.nccl.ncclCommInitRank(ctypes.byref(comm), count, unique, rank))
        self._check(self.nccl.ncclGroupEnd())

    def all_reduce(self, buffers: list[torch.Tensor]) -> None:
        """Sum in place over all ranks' buffers."""
        self._check(self.nccl.ncclGroupStart())
        for buffer, comm, stream in zip(buffers, self.comms, self.streams, strict=True):
            address = ctypes.c_void_p(buffer.data_ptr())
            count, kind = ctypes.c_size_t(buffer.numel()), TYPES[buffer.dtype]
            where = ctypes.c_void_p(stream.cuda_stream)
            self._check(self.nccl.ncclAllReduce(address, address, count, kind, SUM, comm, where))
        self._check(self.nccl.ncclGroupEnd())

    def wait_for(self, event: torch.cuda.Event) -> None:
        for stream in self.streams:
            stream.wait_event(event)

    def joined_by(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait until every rank is done."""
        for own in self.streams:
            stream.wait_stream(own)

    def _check(self, code: int) -> None:
        if code:
            self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NCCL: {self.nccl.ncclGetErrorString(code).decode()}")
