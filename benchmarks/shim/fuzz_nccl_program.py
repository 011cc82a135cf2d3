"""Random NCCL programs against the fake NCCL: run by fuzz.py, natively and under weft.

    python fuzz_nccl_program.py FIRST_SEED COUNT

Prints, as JSON, what every call of each program returned and which calls reached the library. Under weft, the
program is disturbed as by a search: communicators are prepared, routed and released between its calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from nccl_driver import UNDEFINED, Config, Nccl, UniqueId, call_config, config

STEPS = 60
COLLECTIVES = (
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclBcast",
    "ncclReduce",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclAlltoAll",
    "ncclGather",
    "ncclScatter",
)
# weft makes and ends its own communicators, so these calls are not counted.
OF_COMMUNICATORS = {
    f"ncclComm{name}" for name in ("Split", "Destroy", "Abort", "Finalize", "Revoke", "Suspend", "Resume")
}
INVALID_USAGE_IN_GROUP = 6
Result = tuple[str, Any, Any]


class NewerConfig(ctypes.Structure):
    """ncclConfig_t of NCCL 2.33, and of a possible version with 400 more bytes."""

    _fields_ = (
        *Config._fields_,
        ("traffic", c_int),
        ("name", c_char_p),
        ("collnet", c_int),
        ("policy", c_int),
        ("shrink", c_int),
        ("nvls", c_int),
        ("host", c_int),
        ("more", c_char * 400),
    )


def newer_config(size: int) -> NewerConfig:
    numbers = (
        "blocking",
        "cga",
        "min",
        "max",
        "share",
        "traffic",
        "collnet",
        "policy",
        "shrink",
        "nvls",
        "host",
    )
    unset = dict.fromkeys(numbers, UNDEFINED)
    return NewerConfig(size=size, magic=0xCAFEBEEF, version=23300, **unset)


def broken_config() -> Any:
    made = config()
    made.magic = 1
    return made


CONFIGS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    config,
    lambda: config(8),
    lambda: config(4, 2),
    lambda: config(16, 16),
    lambda: config(net=b"IB"),
    lambda: config(share=1),
    lambda: config(version=21400),
    lambda: config(blocking=1),
    broken_config,
    lambda: newer_config(ctypes.sizeof(NewerConfig) - 400),
    lambda: newer_config(ctypes.sizeof(NewerConfig)),
)
CALL_CONFIGS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    call_config,
    lambda: call_config(most=3),
    lambda: call_config(cluster=1),
    lambda: call_config(size=8),
    lambda: call_config(size=72),
    lambda: call_config(magic=3),
    lambda: call_config(policy=2),
    lambda: call_config(force=7),
    lambda: call_config(algorithm=b"ring", tag=9),
)


class Disturbance:
    """What a search does to a running job; does nothing without the shim."""

    def __init__(self) -> None:
        self.injected = "libweft_shim" in Path("/proc/self/maps").read_text()
        self._shim = ctypes.CDLL(None)

    def act(self, random_: random.Random) -> None:
        if not self.injected:
            return
        why, size = ctypes.create_string_buffer(256), c_size_t(256)
        action = random_.random()
        if action < 0.4:
            self._shim.weft_nccl_prepare(random_.choice([2, 4, 24]), ctypes.c_double(1), why, size)
        elif action < 0.8:
            self._shim.weft_nccl_route(random_.choice([0, 0, 2, 4, 24]), why, size)
        elif action < 0.9:
            self._shim.weft_nccl_release(why, size)
        else:
            self._shim.weft_nccl_follow_policy(why, size)

    def end(self) -> None:
        if self.injected:
            self._shim.weft_nccl_route(0, ctypes.create_string_buffer(256), c_size_t(256))


class Program:
    """One program. Its choices come only from its seed, so that nothing weft changes can affect them."""

    def __init__(self, nccl: Nccl, disturbance: Disturbance, seed: int) -> None:
        self.nccl, self.lib, self.disturbance = nccl, nccl.lib, disturbance
        self.version: int = nccl.lib.fake_version()
        self.random, self.weft_random = random.Random(seed), random.Random(~seed)
        self.results: list[Result] = []
        self.comms: list[c_void_p] = []
        self.ended: list[c_void_p] = []
        self.windows: list[tuple[c_void_p, c_void_p]] = []
        self.promised: list[c_void_p] = []  # communicators made at the end of the group
        self.depth = 0
        self.keep: list[Any] = []  # objects that the library may still read

    def run(self) -> list[Result]:
        actions = {
            self.make: 8,
            self.derive: 6,
            self.manage: 8,
            self.group: 18,
            self.send_or_receive: 18,
            self.collective: 33,
            self.fork: 1,
            self.disturb: 8,
        }
        chosen = self.random.choices(list(actions), list(actions.values()), k=STEPS)
        for action in (self.make, self.make, *chosen):
            if self.comms or self.ended:
                action()
            else:
                self.make()
        while self.depth:
            self.note("end", self.lib.ncclGroupEnd())
            self.depth -= 1
        return self.results

    def note(self, name: str, result: Any, handle: c_void_p | None = None) -> None:
        self.results.append((name, result, None if handle is None else bool(handle.value)))

    def comm(self) -> c_void_p:
        """Mostly a live communicator; now and then one that the program has already ended."""
        alive = self.comms and (self.random.random() < 0.93 or not self.ended)
        return self.random.choice(self.comms if alive else self.ended)

    def config(self) -> Any:
        made = self.random.choice(CONFIGS)()
        self.keep.append(made)
        return None if made is None else byref(made)

    def handle(self) -> c_void_p:
        made = c_void_p()
        self.keep.append(made)
        return made

    def make(self) -> None:
        kinds = ["rank", "config", "all", *(["scalable"] if self.version >= 22300 else [])]
        kind, size, config = self.random.choice(kinds), self.random.choice([1, 2, 2, 4]), self.config()
        handle, unique = self.handle(), self.nccl.unique()
        if kind == "rank":
            result = self.lib.ncclCommInitRank(byref(handle), size, unique, 0)
        elif kind == "config":
            result = self.lib.ncclCommInitRankConfig(byref(handle), size, unique, 0, config)
        elif kind == "scalable":
            ids = (UniqueId * 2)(unique, self.nccl.unique())
            result = self.lib.ncclCommInitRankScalable(byref(handle), size, 0, 2, ids, config)
        else:
            handles = (c_void_p * 2)()
            result = self.lib.ncclCommInitAll(handles, 2, None)
            handle = c_void_p(handles[0])
            self.comms += [c_void_p(handles[1])] if handles[1] else []
        self.note("init" + kind, result, handle)
        self.comms += [handle] if handle.value else []

    def derive(self) -> None:
        comm, handle, config = self.comm(), self.handle(), self.config()
        kinds = ["split", "no color"]
        kinds += ["shrink"] if self.version >= 22700 else []
        kinds += ["grow"] if self.version >= 22900 else []
        kind = self.random.choice(kinds)
        if kind == "shrink":
            flags = self.random.choice([0, 1])
            result = self.lib.ncclCommShrink(comm, (c_int * 1)(1), 1, byref(handle), config, flags)
        elif kind == "grow":
            result = self.lib.ncclCommGrow(comm, 8, None, -1, byref(handle), config)
        else:
            color = self.random.choice([0, 1]) if kind == "split" else -1
            result = self.lib.ncclCommSplit(comm, color, 0, byref(handle), config)
        if self.depth and kind in ("split", "no color"):
            self.note(kind, result)
            self.promised.append(handle)
            return
        self.note(kind, result, handle)
        self.comms += [handle] if handle.value else []

    def manage(self) -> None:
        comm = self.comm()
        kinds = (
            "Destroy",
            "Abort",
            "Finalize",
            "Suspend",
            "Resume",
            "Register",
            "Window",
            "Deregister",
            "Async",
        )
        kind = self.random.choice([*kinds, *(["Revoke"] if self.version >= 22900 else [])])
        if kind in ("Destroy", "Abort"):
            result = getattr(self.lib, f"ncclComm{kind}")(comm)
            if result == 0:
                self.comms = [other for other in self.comms if other.value != comm.value]
                self.ended.append(comm)
        elif kind in ("Revoke", "Suspend"):
            flags = self.random.choice([0, 0, 3] if kind == "Revoke" else [0, 1])
            result = getattr(self.lib, f"ncclComm{kind}")(comm, flags)
        elif kind in ("Finalize", "Resume"):
            result = getattr(self.lib, f"ncclComm{kind}")(comm)
        elif kind == "Register":
            result = self.lib.ncclCommRegister(comm, c_void_p(4096), c_size_t(64), byref(self.handle()))
        elif kind == "Window":
            window, flags = self.handle(), self.random.choice([0, 1])
            size = c_size_t(4096)
            result = self.lib.ncclCommWindowRegister(comm, c_void_p(8192), size, byref(window), flags)
            self.windows += [(comm, window)] if window.value else []
        elif kind == "Deregister":
            of_living = [pair for pair in self.windows if pair[0] not in self.ended]
            if not of_living:
                return
            self.windows.remove(of_living[-1])
            result = self.lib.ncclCommWindowDeregister(*of_living[-1])
        else:
            error = c_int()
            result = (self.lib.ncclCommGetAsyncError(comm, byref(error)), error.value)
        self.note(kind, result)

    def group(self) -> None:
        if self.random.random() < 0.55 and self.depth < 4:
            result = self.lib.ncclGroupStart()
            self.depth += result == 0
            self.note("start", result)
            return
        if self.depth == 1 and self.random.random() < 0.1:
            self.lib.fake_fail(b"ncclGroupEnd", 1, INVALID_USAGE_IN_GROUP)
        self.note("end", self.lib.ncclGroupEnd())
        if self.depth == 1:
            for handle in self.promised:
                self.note("made", bool(handle.value))
            self.comms += [handle for handle in self.promised if handle.value]
            self.promised = []
        self.depth = max(0, self.depth - 1)

    def send_or_receive(self) -> None:
        name, choice = self.random.choice(["ncclSend", "ncclRecv"]), self.random.choice
        buffer, count = c_void_p(choice([0, 8200])), c_size_t(choice([0, 1, 100]))
        kind, peer = choice([1, 7, 99]), choice([0, 1])
        self.note(name, getattr(self.lib, name)(buffer, count, kind, peer, self.comm(), None))

    def collective(self) -> None:
        choice, name, comm = self.random.choice, self.random.choice(COLLECTIVES), self.comm()
        buffers = [c_void_p(choice([0, 8200]))] * (1 if name == "ncclBcast" else 2)
        numbers = [0] * {"ncclReduce": 2, "ncclAllGather": 0, "ncclAlltoAll": 0}.get(name, 1)
        if name in ("ncclAllReduce", "ncclReduceScatter"):
            numbers = [choice([0, 4, 9])]
        count, kind = c_size_t(choice([0, 1, 256, 1 << 20])), choice([2, 7, 7, 12, 99])
        arguments: list[Any] = [*buffers, count, kind, *numbers, comm, None]
        if self.version >= 23100 and name != "ncclBcast" and self.random.random() < 0.35:
            settings = choice(CALL_CONFIGS)()
            self.keep.append(settings)
            name += "Config"
            arguments.append(None if settings is None else byref(settings))
        self.note(name, getattr(self.lib, name)(*arguments))

    def fork(self) -> None:
        """A child uses what it inherited, and a communicator of its own."""
        comm, child = self.comm(), os.fork()
        if child == 0:
            handle = c_void_p()
            results = [
                self.lib.ncclAllReduce(None, None, c_size_t(64), 7, 0, comm, None),
                self.lib.ncclGroupStart(),
                self.lib.ncclCommInitRank(byref(handle), 2, self.nccl.unique(), 0),
                self.lib.ncclGroupEnd(),
                self.lib.ncclCommAbort(comm),
            ]
            os._exit(sum(bool(result) << place for place, result in enumerate(results)))
        self.note("fork", os.waitpid(child, 0)[1])

    def disturb(self) -> None:
        self.disturbance.act(self.weft_random)


def common_name(name: str) -> str:
    """The common name of a call: weft forwards it in its …Config form, and ncclBcast as ncclBroadcast."""
    return name.removesuffix("Config").replace("ncclBcast", "ncclBroadcast")


def reached(nccl: Nccl, first: int) -> dict[str, int]:
    """Calls by name that reached the library since call `first`."""
    names = (nccl.lib.fake_call(i).contents.name.decode() for i in range(first, nccl.lib.fake_calls()))
    return Counter(common_name(name) for name in names if name not in OF_COMMUNICATORS)


def main() -> None:
    first, count = map(int, sys.argv[1:])
    nccl, disturbance, programs = Nccl(), Disturbance(), {}
    for seed in range(first, first + count):
        before = nccl.lib.fake_calls()
        results = Program(nccl, disturbance, seed).run()
        programs[seed] = {"results": results, "reached": reached(nccl, before)}
        disturbance.end()
    json.dump(programs, sys.stdout)


if __name__ == "__main__":
    main()
