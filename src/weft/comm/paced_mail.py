"""Messages to a ghost stage of a pipeline: the part of a paced kernel that posts them and waits for answers.

A ghost stage answers a message `latency_ns` after its arrival, and at most one message per `period_ns`. The
kernel that sends a message computes when its answer is ready; the kernel that receives the answer waits until
then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_uint64

MAIL_SLOTS = 1024
"""Maximum number of unanswered messages; a power of two."""
MOST_ANSWER_CYCLES = 8_000_000_000
"""Upper bound of a receive's wait for its answer, in clock cycles: about 4 s."""


class Mailbox(ctypes.Structure):
    """In GPU memory, one per peer: the number of messages sent, and when the answer to each is ready."""

    _fields_ = (("sent", c_uint64), ("last_ready_ns", c_uint64), ("ready_ns", c_uint64 * MAIL_SLOTS))


def mail_text(fields: Mapping[str, int]) -> str:
    """PTX that posts the message that the kernel sends, then waits for the answer that it receives.

    `fields`: byte offsets of the kernel's arguments.
    """
    slot = f"""
  sub.u32 %b, %a, 1;
  and.b32 %b, %b, {MAIL_SLOTS - 1};
  mul.wide.u32 %x, %b, 8;
  add.u64 %x, %x, {Mailbox.ready_ns.offset};
  add.u64 %x, %x, %segment;"""
    return f"""\
  ld.param.u64 %segment, [work+{fields["mailbox"]}];
  ld.param.u32 %a, [work+{fields["post"]}];
  setp.eq.u32 %p, %a, 0;
  @%p bra POSTED;
  or.b32 %b, %thread, %cta;
  setp.ne.u32 %p, %b, 0;
  @%p bra POSTED;
  ld.param.u64 %due, [work+{fields["latency_ns"]}];
  add.u64 %due, %due, %start;
  add.u64 %due, %due, %wait;
  add.u64 %due, %due, %move;
  ld.param.u64 %y, [work+{fields["period_ns"]}];
  ld.volatile.global.u64 %x, [%segment+{Mailbox.last_ready_ns.offset}];
  add.u64 %y, %y, %x;
  max.u64 %due, %due, %y;
  st.volatile.global.u64 [%segment+{Mailbox.last_ready_ns.offset}], %due;{slot}
  st.volatile.global.u64 [%x], %due;
  membar.gl;
  st.volatile.global.u32 [%segment], %a;
POSTED:
  ld.param.u32 %a, [work+{fields["answer"]}];
  setp.eq.u32 %p, %a, 0;
  @%p bra ANSWERED;
  setp.ne.u32 %q, %thread, 0;
  @%q bra ANSWER;{slot}
AWAIT:
  ld.volatile.global.u32 %b, [%segment];
  setp.lt.u32 %q, %b, %a;
  @%q bra LATER;
  ld.volatile.global.u64 %y, [%x];
  mov.u64 %now, %globaltimer;
  setp.ge.u64 %q, %now, %y;
  @%q bra ANSWER;
LATER:
  mov.u64 %now, %clock64;
  sub.u64 %now, %now, %cycles;
  setp.lt.u64 %q, %now, {MOST_ANSWER_CYCLES};
  @%q bra AWAIT;
ANSWER:
  bar.sync 0;
  mov.u64 %start, %globaltimer;
  mov.u64 %cycles, %clock64;
ANSWERED:"""
