"""All-gathers and all-to-alls of two ghost ranks, in and outside symmetric windows. Prints JSON about each.

With the argument `live`, comm.engine dma takes effect only after the communicators exist.
"""

from __future__ import annotations

import json
import sys
from ctypes import byref, c_int, c_size_t, c_void_p

import torch

from weft.comm import nccl
from weft.policy import Policy
from weft.shim import apply
from weft.shim.stats import snapshot

RANKS, BYTES, REPEATS = 2, 1 << 22, 5


class DeviceBytes:
    """Memory allocated by NCCL, wrapped for torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def allocated(library, size: int) -> torch.Tensor:
    found = c_void_p()
    library._handle.ncclMemAlloc.argtypes = (c_void_p, c_size_t)
    library.call("ncclMemAlloc", byref(found), size)
    return torch.as_tensor(DeviceBytes(found.value, size), device="cuda")


def registered(ranks, tensors) -> list[bool]:
    library, windows = ranks.library, [c_void_p() for _ in tensors]
    function = library._handle.ncclCommWindowRegister
    function.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_int)
    with library.group():
        for rank, tensor in enumerate(tensors):
            comm = ranks._comms[rank]
            library.call(
                "ncclCommWindowRegister", comm, tensor.data_ptr(), tensor.numel(), byref(windows[rank]), 1
            )
    return [bool(window.value) for window in windows]


def all_to_all(ranks, send, recv, streams) -> None:
    function = ranks.library._handle.ncclAlltoAll
    function.argtypes = (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p)
    with ranks.library.group():
        for rank in range(RANKS):
            arguments = (send[rank].data_ptr(), recv[rank].data_ptr(), BYTES // RANKS, 1)
            done = function(*arguments, ranks._comms[rank], streams[rank].cuda_stream)
            assert done == 0, done


def counted(issue, send, recv, streams, right) -> dict[str, object]:
    """Whether the bytes were right every time, the kernels launched, and what the shim counted."""
    before, equal = snapshot(), True
    for number in range(REPEATS):
        for rank, tensor in enumerate(send):
            tensor.copy_(torch.arange(tensor.numel(), device="cuda").mul_(7 + rank + number).to(torch.uint8))
        for tensor in recv:
            tensor.zero_()
        torch.cuda.synchronize()
        issue(send, recv, streams)
        torch.cuda.synchronize()
        equal = equal and all(torch.equal(*pair) for pair in zip(recv, right(send), strict=True))
    after = snapshot()
    engine = {name: after[name] - before[name] for name in after if name.startswith("engine_")}
    kernels = sorted({kernel["name"] for kernel in after["kernels"] if kernel["kind"] == "comm"})
    return {
        "equal": equal,
        "launched": after["comm_launches"] - before["comm_launches"],
        "engine": {name: value for name, value in engine.items() if value},
        "kernels": kernels,
    }


def main() -> None:
    library = nccl.load_nccl()
    ranks = nccl.NcclRanks(library, RANKS, 4)
    streams = [torch.cuda.Stream() for _ in range(RANKS)]
    send = [allocated(library, BYTES) for _ in range(RANKS)]
    recv = [allocated(library, RANKS * BYTES) for _ in range(RANKS)]
    windows = registered(ranks, send) + registered(ranks, recv)
    outside = [torch.empty(RANKS * BYTES, dtype=torch.uint8, device="cuda") for _ in range(RANKS)]
    gathered = lambda given: [torch.cat(given)] * RANKS  # noqa: E731
    turned = lambda given: [  # noqa: E731
        torch.cat([one.view(RANKS, -1)[rank] for one in given]) for rank in range(RANKS)
    ]
    exchange = lambda *arguments: all_to_all(ranks, *arguments)  # noqa: E731
    found = {"nccl": library.version_text, "windows": windows}
    if "live" in sys.argv:
        found["before"] = counted(ranks.all_gather, send, recv, streams, gathered)
        apply.apply(Policy(engine="dma"), Policy())
    found["all_gather"] = counted(ranks.all_gather, send, recv, streams, gathered)
    part = [tensor[:BYTES] for tensor in recv]
    found["all_to_all"] = counted(exchange, send, part, streams, turned)
    found["outside"] = counted(ranks.all_gather, send, outside, streams, gathered)
    found["all_reduce"] = counted(
        lambda given, taken, on: ranks.all_reduce(given, taken, on, "max"),
        send,
        part,
        streams,
        lambda given: [torch.maximum(*given)] * RANKS,
    )
    print(json.dumps(found), flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
