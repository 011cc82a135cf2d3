"""A port that no other program can take between its choice and its use."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A free port of this machine, for a server that the test starts within the block.

    A socket stays bound to the port without listening. The kernel then never assigns the port to a program
    that asks for any free one, but lets a server listen that asks for this one and sets SO_REUSEADDR, as
    servers do.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
