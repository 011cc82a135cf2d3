"""Chooses the reader for a file by its first bytes; names unsupported formats, with what to do instead."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import InputError

if TYPE_CHECKING:
    from weft.trace.custom import IsComm
    from weft.trace.record import Trace

_HEAD_BYTES = 4096
_SQLITE = b"SQLite format 3\0"

EXPECTED = (
    "expected a PyTorch profiler trace (.json, .json.gz, .json.zst), an Nsight Systems export (.sqlite), "
    "an XLA profile (.xplane.pb) or a rocprofv3 trace (_kernel_trace.csv, _results.json)"
)

_ROCPROF_JSON = re.compile(rb'\s*\{\s*"rocprofiler-sdk-tool"\s*:')
# XProf names its processes after the planes of the profile.
_XPROF_JSON = re.compile(rb'"process_name".{0,40}"/(?:device:|host:CPU)', re.DOTALL)

# First bytes of files passed by mistake: what they are, and what to do.
_OTHERS = (
    (b"PK\x03\x04", "a ZIP archive", "unpack it first"),
    (b"PAR1", "a Parquet file", "export the report with: nsys export --type sqlite"),
    (b"\x89HDF", "an HDF5 file", "export the report with: nsys export --type sqlite"),
    (b"\x7fELF", "a program or library", EXPECTED),
    (b"%PDF", "a PDF document", EXPECTED),
    (b"BZh", "a bzip2 archive", "unpack it first"),
    (b"\xfd7zXZ", "an xz archive", "unpack it first"),
    (b"<", "an HTML or XML document", EXPECTED),
)
_SUFFIXES = {
    ".nsys-rep": ("an Nsight Systems report", "export it with: nsys export --type sqlite {path}"),
    ".qdrep": ("an Nsight Systems report", "export it with: nsys export --type sqlite {path}"),
    ".ncu-rep": ("an Nsight Compute report", "it has no timeline; profile with nsys or torch.profiler"),
    ".pftrace": ("a Perfetto trace", "export the profiler's own JSON instead"),
    ".perfetto-trace": ("a Perfetto trace", "export the profiler's own JSON instead"),
    ".pickle": ("a pickle, perhaps a memory snapshot", EXPECTED),
    ".pkl": ("a pickle, perhaps a memory snapshot", EXPECTED),
}


def read(path: Path, is_comm_names: IsComm | None = None, *, workers: int | None = None) -> list[Trace]:
    """Reads the GPUs of one file with the reader for its format. `workers`: threads for a large file."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    # Import only the reader that is needed: for a small trace, imports take most of the time.
    kind = _kind(path, head)
    if kind == "nsys":
        from weft.trace import nsys

        return nsys.read(path, is_comm_names)
    if kind == "rocprof":
        from weft.trace import rocprof

        return rocprof.read(path, is_comm_names)
    if kind == "rocprof_json":
        from weft.trace import rocprof_json

        return rocprof_json.read(path, is_comm_names)
    if kind == "xplane":
        from weft.trace import xplane

        return xplane.read(path, is_comm_names)
    from weft.trace import kineto

    return kineto.read(path, is_comm_names, workers=workers)


def _kind(path: Path, head: bytes) -> str:
    """The name of the module that reads this file. Raises InputError for an unsupported format."""
    if head.startswith(_SQLITE):
        return "nsys"
    start = _unpacked(head)
    if start.startswith(_SQLITE):
        raise InputError(f"{path}: a packed SQLite database; unpack it first: gunzip {path}")
    if _ROCPROF_JSON.match(start):
        return "rocprof_json"
    if _XPROF_JSON.search(start):
        raise InputError(
            f"{path}: the trace viewer's copy of an XLA profile; give the .xplane.pb file in the same folder"
        )
    if _is_kernel_table(head):
        return "rocprof"
    for suffix, (what, advice) in _SUFFIXES.items():
        if path.name.endswith(suffix):
            raise InputError(f"{path}: {what}; {advice.format(path=path)}")
    for magic, what, advice in _OTHERS:
        if head.startswith(magic):
            raise InputError(f"{path}: {what}; {advice}")
    return "xplane" if _is_protobuf(head) else "kineto"


def _unpacked(head: bytes) -> bytes:
    """The first bytes of a file, unpacked if it is gzip; empty if damaged."""
    if not head.startswith(b"\x1f\x8b"):
        return head
    try:
        return zlib.decompressobj(31).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return b""


def _is_kernel_table(head: bytes) -> bool:
    """Whether a file begins with the columns of a rocprofv3 kernel trace."""
    line = head.split(b"\n", 1)[0].lower()
    return b"kernel_name" in line and b"start_timestamp" in line and b"," in line


def _is_protobuf(head: bytes) -> bool:
    """Whether a file begins with field 1 of an XSpace. Its tag is a newline; in JSON a brace would follow."""
    return head[:1] == b"\x0a" and head[1:].lstrip()[:1] not in (b"{", b"[", b"")
