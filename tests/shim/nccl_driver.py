"""The fake NCCL from Python, for programs that tests run under the shim."""

from __future__ import annotations

import ctypes
import json
import os
import threading  # noqa: F401 (for programs)
import time  # noqa: F401 (for programs)
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p

from weft.errors import UnavailableError
from weft.shim import communicators as routes  # noqa: F401 (for programs)

UNDEFINED = -(2**31)
FLOAT32, BYTES = 7, 1


class Record(ctypes.Structure):
    _fields_ = (
        ("name", c_char * 32),
        ("comm", c_void_p),
        ("ctas", c_int),
        ("depth", c_int),
        ("in_order", c_int),
        ("configured", c_int),
        ("least", c_int),
        ("most", c_int),
        ("nvls", c_int),
        ("cluster", c_int),
        ("force", c_int),
        ("policy", c_int),
        ("algorithm", c_char * 24),
        ("plan_algorithm", c_int),
        ("plan_protocol", c_int),
        ("plan_channels", c_int),
        ("plan_chunk", c_size_t),
    )


class CallConfig(ctypes.Structure):
    """ncclCollConfig_t as of NCCL 2.31; `more` stands for fields of a later version."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("ext", c_void_p),
        ("least", c_int),
        ("most", c_int),
        ("nvls", c_int),
        ("cluster", c_int),
        ("algorithm", c_char_p),
        ("force", c_int),
        ("policy", c_int),
        ("tag", ctypes.c_uint64),
        ("more", c_void_p),
    )


def call_config(size=64, magic=0xCAFEBEEF, **given):
    unset = dict.fromkeys(("least", "most", "nvls", "cluster", "policy"), UNDEFINED)
    return CallConfig(size=size, magic=magic, version=23100, **{**unset, "force": 1, **given})


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * 128),)


class Config(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga", c_int),
        ("min", c_int),
        ("max", c_int),
        ("net", c_char_p),
        ("share", c_int),
    )


def config(most=UNDEFINED, least=UNDEFINED, blocking=UNDEFINED, net=None, share=UNDEFINED, version=21800):
    return Config(ctypes.sizeof(Config), 0xCAFEBEEF, version, blocking, UNDEFINED, least, most, net, share)


class Nccl:
    """One library, found by dlsym as ctypes does."""

    def __init__(self, path="libnccl.so.2"):
        self.lib = ctypes.CDLL(path)
        self.lib.fake_call.restype = ctypes.POINTER(Record)
        self.lib.fake_net.restype = c_char_p

    def init(self, size=2, rank=0, unique=None, settings=None):
        comm = c_void_p()
        self.check(
            self.lib.ncclCommInitRankConfig(
                byref(comm), size, unique or self.unique(), rank, byref(settings or config())
            ),
            (0, 7),
        )
        return comm

    def settled(self, comm):
        """The communicator, once its background work is over."""
        error = c_int(7)
        while error.value == 7:
            self.lib.ncclCommGetAsyncError(comm, byref(error))
        return comm

    def unique(self):
        made = UniqueId()
        self.check(self.lib.ncclGetUniqueId(byref(made)))
        return made

    def split(self, comm, color=0, key=0, settings=None):
        made = c_void_p()
        self.check(
            self.lib.ncclCommSplit(comm, color, key, byref(made), byref(settings) if settings else None)
        )
        return made

    def all_reduce(self, comm, count=256, op=0, stream=None, kind=FLOAT32):
        self.check(self.lib.ncclAllReduce(None, None, c_size_t(count), kind, op, comm, c_void_p(stream)))

    def all_reduce_config(self, comm, settings, count=256, stream=None):
        config = byref(settings) if settings is not None else None
        self.check(
            self.lib.ncclAllReduceConfig(
                None, None, c_size_t(count), FLOAT32, 0, comm, c_void_p(stream), config
            )
        )

    def call(self, name, comm, count=256, stream=None):
        """A collective by name; its operation and root, if any, are 0."""
        numbers = {"ncclReduce": 2, "ncclAllGather": 0, "ncclAlltoAll": 0}.get(name, 1)
        buffers = [None] if name == "ncclBcast" else [None, None]
        zeros = [0] * numbers
        function = getattr(self.lib, name)
        self.check(function(*buffers, c_size_t(count), FLOAT32, *zeros, comm, c_void_p(stream)))

    def launching(self):
        """Makes the library launch a kernel for each collective that it does not copy."""
        import driver

        by = ctypes.cast(driver.library().cuLaunchKernel, c_void_p)
        self.lib.fake_launch_with(by, driver.kernel("ncclDevKernel_Generic"))
        return self

    def window(self, comm, start, size, flags=1):
        """The handle of a window, or None."""
        handle = c_void_p()
        self.check(
            self.lib.ncclCommWindowRegister(comm, c_void_p(start), c_size_t(size), byref(handle), flags)
        )
        return handle.value

    def gather(self, comm, send, recv, name="ncclAllGather", count=256, stream=None):
        """An all-gather, or an all-to-all, of these addresses."""
        function = getattr(self.lib, name)
        self.check(function(c_void_p(send), c_void_p(recv), c_size_t(count), FLOAT32, comm, c_void_p(stream)))

    def plans(self):
        """For each collective that reached the library: what it asked for, and the library's plan."""
        found = (self.lib.fake_call(i).contents for i in range(self.lib.fake_calls()))
        number = lambda value: None if value == UNDEFINED else value  # noqa: E731
        numbers = ("configured", "least", "most", "nvls", "cluster", "force", "policy")
        return [
            {
                "name": r.name.decode(),
                **{name: number(getattr(r, name)) if r.configured else None for name in numbers},
                "algorithm": r.algorithm.decode() or None,
                "plan": [r.plan_algorithm, r.plan_protocol, r.plan_channels, r.plan_chunk],
            }
            for r in found
            if not r.name.startswith((b"ncclComm", b"ncclSend", b"ncclRecv"))
        ]

    def send(self, comm, count=1):
        self.check(self.lib.ncclSend(None, c_size_t(count), FLOAT32, 1, comm, None))

    def group(self, *calls):
        self.check(self.lib.ncclGroupStart())
        for call in calls:
            call()
        self.check(self.lib.ncclGroupEnd())

    def check(self, result, fine=(0,)):
        assert result in fine, result

    def log(self, *names):
        """(name, communicator, its CTAs) of every call that reached the library."""
        found = (self.lib.fake_call(i).contents for i in range(self.lib.fake_calls()))
        return [[r.name.decode(), r.comm, r.ctas] for r in found if not names or r.name.decode() in names]

    def ctas(self, *names):
        """The CTA limits that the all-reduces (or the calls `names`) ran with."""
        return [ctas for _, _, ctas in self.log(*(names or ("ncclAllReduce",)))]


def user():
    """A library that is linked to NCCL."""
    found = ctypes.CDLL("libuser.so")
    found.user_init.restype = c_void_p
    for name in ("user_all_reduce", "user_group", "user_abort", "user_destroy"):
        getattr(found, name).argtypes = (c_void_p, c_int) if name == "user_all_reduce" else (c_void_p,)
    return found


def refused(function, *arguments):
    """Why weft refuses, or None if it does not."""
    try:
        function(*arguments)
    except UnavailableError as error:
        return str(error)
    return None


def show(value):
    print(json.dumps(value), flush=True)


def environ(name):
    """An environment variable as C sees it."""
    function = ctypes.CDLL(None).getenv
    function.restype = c_char_p
    found = function(name.encode())
    return found.decode() if found else None


__all__ = [name for name in dir() if not name.startswith("_")] + ["os"]
