"""The kernel of a paced collective, as PTX: one rank's part of a collective on a node, run on one GPU.

Each CTA moves its share of the data in units. Unit j of n may start when j/n of the collective's time has
passed since the CTA was placed; until then each warp polls the timer by itself, with short sleeps. A CTA that
is placed late ends late. Every wait is bounded by the GPU's timer and by clock cycles. Warps do not wait for
each other, so that some read while others write: a CTA must be able to move both the data that NCCL's CTA
moves and the data that peers write to this rank's memory.

The driver compiles the text for the GPU that is present, so no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_uint32, c_uint64

from weft.comm.paced_mail import mail_text

SEGMENTS = 64
"""Number of memory segments that one launch can move."""
VECTORS = 16
"""16-byte loads in flight per thread. The kernel then needs about as many registers as NCCL's."""
VECTOR_BYTES = 16
MOST_REGISTERS = 96
REGISTERS_PER_SM = 65536
NAP_NS = 100


class KernelSegment(ctypes.Structure):
    """One or more copies of `size_bytes` at `source` (0: zeros), one after the other, to `target`.

    Each copy has `units_per_copy` units, and the units of the segment start at `first_unit`; so the next
    segment's `first_unit` determines the number of copies.
    """

    _fields_ = (
        ("source", c_uint64),
        ("target", c_uint64),
        ("size_bytes", c_uint64),
        ("first_unit", c_uint32),
        ("units_per_copy", c_uint32),
    )


class KernelArguments(ctypes.Structure):
    """The kernel's only parameter.

    `mailbox`: address of a ghost stage's Mailbox (`weft.comm.paced_mail`). `post`: number of the message that
    the kernel sends, from 1. `answer`: number of the message whose answer it receives. 0: none.
    """

    _fields_ = (
        ("wait_ns", c_uint64),
        ("move_ns", c_uint64),
        ("most_cycles", c_uint64),
        ("scratch", c_uint64),
        ("factor", c_uint64),
        ("mailbox", c_uint64),
        ("latency_ns", c_uint64),
        ("period_ns", c_uint64),
        ("segment_count", c_uint32),
        ("unit_bytes", c_uint32),
        ("data_units", c_uint32),
        ("all_units", c_uint32),
        ("read_units", c_uint32),
        ("write_units", c_uint32),
        ("scratch_units", c_uint32),
        ("post", c_uint32),
        ("answer", c_uint32),
        ("unused", c_uint32),
        ("segments", KernelSegment * SEGMENTS),
    )


ELEMENT_BYTES = {"copy1": 1, "copy2": 2, "copy4": 4, "copy8": 8}
"""Bytes per element of each operation: plain copies, and sums as multiplications by the number of ranks."""
ELEMENT_BYTES |= {"sum_f32": 4, "sum_f16": 2, "sum_bf16": 2, "sum_f64": 8, "sum_i32": 4, "sum_i64": 8}

_SCALE_WORD = {
    "sum_f32": "mul.rn.f32 {d}, {d}, %factor;",
    "sum_f16": "mul.rn.f16x2 {d}, {d}, %factor;",
    # sm_80 has no bf16 multiplication; an fma that adds -0 replaces it.
    "sum_bf16": "fma.rn.bf16x2 {d}, {d}, %factor, %minus_zero;",
    "sum_i32": "mul.lo.s32 {d}, {d}, %factor;",
}
_SCALE_LONG = {"sum_f64": "mul.rn.f64 {d}, {d}, %wide;", "sum_i64": "mul.lo.s64 {d}, {d}, %wide;"}
_SCALE_HALF = {
    "sum_f16": "mul.rn.f16 {d}, {d}, %half;",
    "sum_bf16": "fma.rn.bf16 {d}, {d}, %half, %half_minus_zero;",
}


def pack_factor(operation: str, ranks: int) -> int:
    """The number of ranks in the operation's type, as the bits of the kernel's `factor`; 0 for copies."""
    if operation == "sum_f16":
        half: int = struct.unpack("<H", struct.pack("<e", ranks))[0]
        return half | half << 16
    if operation in ("sum_f32", "sum_bf16"):
        word: int = struct.unpack("<I", struct.pack("<f", ranks))[0]
        return word if operation == "sum_f32" else (word >> 16) | (word >> 16) << 16
    if operation == "sum_f64":
        wide: int = struct.unpack("<Q", struct.pack("<d", ranks))[0]
        return wide
    return ranks if operation.startswith("sum_") else 0


def kernel_name(collective: str, operation: str) -> str:
    """A name that tools recognize as an NCCL kernel: `ncclDevKernel_AllReduce_Sum_f32_PACED`."""
    title = "".join(part.capitalize() for part in collective.split("_"))
    kind = f"_Sum_{operation.removeprefix('sum_')}" if operation.startswith("sum_") else ""
    return f"ncclDevKernel_{title}{kind}_PACED"


def kernel_text(name: str, operation: str, threads: int, capability: int) -> str:
    """The PTX of a kernel with this name. `capability`: the GPU's compute capability times 10, 80 or more."""
    version, target = ("7.8", "sm_90") if capability >= 90 else ("7.0", "sm_80")
    fields = {name: getattr(KernelArguments, name).offset for name, _ in KernelArguments._fields_}
    element = ELEMENT_BYTES[operation]
    vectors, indices = [[f"%v{4 * i + k}" for k in range(4)] for i in range(VECTORS)], range(VECTORS)
    loads = "\n".join(_load(i, vectors[i], "%source", "%length", "%sourced") for i in indices)
    stores = "\n".join(_store(i, vectors[i], "%target", "%length") for i in indices)
    scaled = "\n".join(_scale(operation, vector) for vector in vectors)
    scratch_loads = "\n".join(_load(i, vectors[i], "%source", "%unit", "%reads") for i in indices)
    scratch_stores = "\n".join(_store(i, vectors[i], "%target", "%unit", "%writes") for i in indices)
    cleared = "\n".join(f"  mov.b32 {word}, 0;" for vector in vectors for word in vector)
    return f"""\
.version {version}
.target {target}
.address_size 64
.visible .entry {name}(.param .align 8 .b8 work[{ctypes.sizeof(KernelArguments)}])
.maxntid {threads}, 1, 1
.maxnreg {min(MOST_REGISTERS, REGISTERS_PER_SM // threads // 8 * 8)}
{{
  .reg .pred %p, %q, %sourced, %reads, %writes;
  .reg .b16 %half, %half_minus_zero, %h;
  .reg .b32 %v<{4 * VECTORS}>, %thread, %threads, %cta, %ctas, %units, %all, %unit, %j, %length, %vectors;
  .reg .b32 %slots, %slot, %a, %b, %count, %factor, %minus_zero, %reading, %writing;
  .reg .b64 %start, %cycles, %due, %wait, %move, %limit, %now, %work, %segment, %source, %target, %size;
  .reg .b64 %at, %into, %offset, %x, %y, %wide, %value, %scratch, %data, %l<2>;
  mov.u64 %start, %globaltimer;
  mov.u64 %cycles, %clock64;
  mov.b64 %work, work;
  ld.param.u64 %wait, [work+{fields["wait_ns"]}];
  ld.param.u64 %move, [work+{fields["move_ns"]}];
  ld.param.u64 %limit, [work+{fields["most_cycles"]}];
  ld.param.u64 %scratch, [work+{fields["scratch"]}];
  ld.param.u64 %wide, [work+{fields["factor"]}];
  ld.param.u32 %count, [work+{fields["segment_count"]}];
  ld.param.u32 %unit, [work+{fields["unit_bytes"]}];
  ld.param.u32 %a, [work+{fields["data_units"]}];
  ld.param.u32 %all, [work+{fields["all_units"]}];
  ld.param.u32 %reading, [work+{fields["read_units"]}];
  ld.param.u32 %writing, [work+{fields["write_units"]}];
  ld.param.u32 %slots, [work+{fields["scratch_units"]}];
  cvt.u64.u32 %data, %a;
  cvt.u32.u64 %factor, %wide;
  cvt.u16.u32 %half, %factor;
  mov.b32 %minus_zero, 0x80008000;
  mov.b16 %half_minus_zero, 0x8000;
  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %cta, %ctaid.x;
  mov.u32 %ctas, %nctaid.x;
{cleared}
{mail_text(fields)}
  // units of this CTA
  mov.u32 %units, 0;
  setp.ge.u32 %p, %cta, %all;
  @%p bra COUNTED;
  sub.u32 %units, %all, %cta;
  add.u32 %units, %units, %ctas;
  sub.u32 %units, %units, 1;
  div.u32 %units, %units, %ctas;
COUNTED:
  mov.u32 %j, 0;

NEXT:
  // the time at which the next unit may start; after the last one, the end of the collective
  add.u64 %due, %wait, %move;
  setp.ge.u32 %p, %j, %units;
  @%p bra POLL;
  cvt.u64.u32 %x, %j;
  mul.lo.u64 %x, %x, %move;
  cvt.u64.u32 %y, %units;
  div.u64 %x, %x, %y;
  add.u64 %due, %wait, %x;
POLL:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %start;
  setp.ge.u64 %q, %now, %due;
  @%q bra READY;
  mov.u64 %now, %clock64;
  sub.u64 %now, %now, %cycles;
  setp.ge.u64 %q, %now, %limit;
  @%q bra READY;
  nanosleep.u32 {NAP_NS};
  bra POLL;
READY:
  @%p bra OVER;

  // unit number of the collective, and how many data units come before it; the rest is scratch traffic
  mad.lo.u32 %a, %j, %ctas, %cta;
  cvt.u64.u32 %x, %a;
  cvt.u64.u32 %y, %all;
  mul.lo.u64 %at, %x, %data;
  add.u64 %into, %at, %data;
  div.u64 %at, %at, %y;
  div.u64 %into, %into, %y;
  setp.eq.u64 %p, %at, %into;
  @%p bra EXTRA;

  // the segment of this unit
  cvt.u32.u64 %a, %at;
  add.u64 %segment, %work, {fields["segments"]};
SEARCH:
  sub.u32 %count, %count, 1;
  setp.eq.u32 %p, %count, 0;
  @%p bra FOUND;
  ld.param.u32 %b, [%segment+{ctypes.sizeof(KernelSegment) + KernelSegment.first_unit.offset}];
  setp.lt.u32 %p, %a, %b;
  @%p bra FOUND;
  add.u64 %segment, %segment, {ctypes.sizeof(KernelSegment)};
  bra SEARCH;
FOUND:
  ld.param.u32 %count, [work+{fields["segment_count"]}];
  ld.param.u64 %source, [%segment+{KernelSegment.source.offset}];
  ld.param.u64 %target, [%segment+{KernelSegment.target.offset}];
  ld.param.u64 %size, [%segment+{KernelSegment.size_bytes.offset}];
  ld.param.u32 %b, [%segment+{KernelSegment.first_unit.offset}];
  sub.u32 %a, %a, %b;
  ld.param.u32 %b, [%segment+{KernelSegment.units_per_copy.offset}];
  setp.ne.u64 %sourced, %source, 0;
  div.u32 %length, %a, %b;
  cvt.u64.u32 %x, %length;
  mad.lo.u64 %target, %x, %size, %target;
  rem.u32 %a, %a, %b;
  mul.wide.u32 %offset, %a, %unit;
  add.u64 %source, %source, %offset;
  add.u64 %target, %target, %offset;
  sub.u64 %size, %size, %offset;
  cvt.u64.u32 %x, %unit;
  min.u64 %size, %size, %x;
  cvt.u32.u64 %length, %size;

  // whole vectors where both sides are aligned
  mov.b32 %vectors, 0;
  or.b64 %x, %source, %target;
  and.b64 %x, %x, {VECTOR_BYTES - 1};
  setp.ne.u64 %p, %x, 0;
  @%p bra ELEMENTS;
  mov.b32 %a, %length;
  and.b32 %vectors, %length, {0xFFFFFFFF - VECTOR_BYTES + 1};
  mov.b32 %length, %vectors;
{loads}
{scaled}
{stores}
  mov.b32 %length, %a;
ELEMENTS:
  mad.lo.u32 %a, %thread, {element}, %vectors;
  mul.lo.u32 %b, %threads, {element};
ELEMENT:
  setp.ge.u32 %p, %a, %length;
  @%p bra MOVED;
  cvt.u64.u32 %offset, %a;
  add.u64 %x, %source, %offset;
  add.u64 %y, %target, %offset;
{_element(operation, element)}
  add.u32 %a, %a, %b;
  bra ELEMENT;

EXTRA:
  // %a: how many units of scratch traffic come before
  cvt.u32.u64 %b, %at;
  sub.u32 %a, %a, %b;
  setp.lt.u32 %reads, %a, %reading;
  setp.lt.u32 %writes, %a, %writing;
  rem.u32 %slot, %j, %slots;
  mad.lo.u32 %slot, %cta, %slots, %slot;
  shl.b32 %slot, %slot, 1;
  mul.wide.u32 %source, %slot, %unit;
  add.u64 %source, %source, %scratch;
  cvt.u64.u32 %x, %unit;
  add.u64 %target, %source, %x;
  // what was read before is written now: reads and writes do not wait for each other
{scratch_stores}
{scratch_loads}
MOVED:
  add.u32 %j, %j, 1;
  bra NEXT;
OVER:
  ret;
}}
"""


def _guarded(index: int, side: str, limit: str, guard: str) -> str:
    """PTX that computes the address of a thread's vector in %at, and in %q whether to access it."""
    lines = [
        f"  mad.lo.u32 %b, %threads, {index}, %thread;",
        f"  mul.lo.u32 %b, %b, {VECTOR_BYTES};",
        f"  setp.lt.u32 %q, %b, {limit};",
        "  cvt.u64.u32 %at, %b;",
        f"  add.u64 %at, {side}, %at;",
    ]
    if guard:
        lines.append(f"  and.pred %q, %q, {guard};")
    return "\n".join(lines)


def _load(index: int, words: list[str], side: str, limit: str, guard: str) -> str:
    read = f"  @%q ld.volatile.global.v4.b32 {{{', '.join(words)}}}, [%at];"
    clear = "".join(f"\n  @!%q mov.b32 {word}, 0;" for word in words)
    return _guarded(index, side, limit, guard) + clear + "\n" + read


def _store(index: int, words: list[str], side: str, limit: str, guard: str = "") -> str:
    write = f"  @%q st.volatile.global.v4.b32 [%at], {{{', '.join(words)}}};"
    return _guarded(index, side, limit, guard) + "\n" + write


def _scale(operation: str, words: list[str]) -> str:
    if operation in _SCALE_WORD:
        return "\n".join("  " + _SCALE_WORD[operation].format(d=word) for word in words)
    if operation in _SCALE_LONG:
        lines = []
        for low, high in (words[:2], words[2:]):
            scale = _SCALE_LONG[operation].format(d="%value")
            lines += [
                f"  mov.b64 %value, {{{low}, {high}}};",
                f"  {scale}",
                f"  mov.b64 {{{low}, {high}}}, %value;",
            ]
        return "\n".join(lines)
    return ""


def _element(operation: str, element: int) -> str:
    """PTX that moves one element from [%x], or zero, to [%y]."""
    register, clear = {
        1: ("%h", "mov.b16 %h, 0;"),
        2: ("%h", "mov.b16 %h, 0;"),
        4: ("%v0", "mov.b32 %v0, 0;"),
        8: ("%value", "mov.b64 %value, 0;"),
    }[element]
    kind = f"b{8 * element}"
    scale = {**_SCALE_WORD, **_SCALE_LONG, **_SCALE_HALF}.get(operation, "").format(d=register)
    return "\n".join(
        f"  {line}"
        for line in (
            clear,
            f"@%sourced ld.volatile.global.{kind} {register}, [%x];",
            scale,
            f"st.volatile.global.{kind} [%y], {register};",
        )
        if line
    )
