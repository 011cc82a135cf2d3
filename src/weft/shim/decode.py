"""A policy as the shim's memory holds it, read from outside: the inverse of `binding.encode_policy`."""

from __future__ import annotations

import ctypes
import os
import zlib

from weft.errors import InputError
from weft.policy import (
    ALGORITHMS,
    CTA_POLICIES,
    MAX_COMM_RULES,
    MAX_RULES,
    NCCL_COLLECTIVES,
    PLACED_BOUND_US,
    PROTOCOLS,
    CommRule,
    Policy,
    Rule,
)
from weft.shim import binding

_NO_LIMIT = 2**64 - 1


def policy_in_file(number: int) -> tuple[Policy | None, int]:
    """The policy in an open control or process file, and its sequence number, which changes with it.

    Raises InputError where the file has none, or is being written.
    """
    control = binding.CControl
    of_process = os.pread(number, 7, 0) == binding.PROCESS_MAGIC
    size = ctypes.sizeof(control)
    data = os.pread(number, size, binding.CHead.control.offset if of_process else 0)
    if len(data) < size:
        raise InputError("not a control block of this weft")
    head = control.from_buffer_copy(data)
    if head.sequence == 0:
        return None, 0
    if head.magic != binding.CONTROL_MAGIC or head.version != binding.LAYOUT_VERSION:
        raise InputError("not a control block of this weft")
    image = data[control.policy.offset : control.policy.offset + ctypes.sizeof(binding.CPolicy)]
    if head.sequence & 1 or zlib.adler32(image) != head.checksum:
        raise InputError("the control block is being written")
    return decode_policy(image), head.sequence


def decode_policy(image: bytes) -> Policy | None:
    """The part of a policy that the shim applies; None: no policy is set there."""
    c = binding.CPolicy.from_buffer_copy(image)
    if not c.flags & binding.POLICY_SET:
        return None
    placed = bool(c.flags & binding.HEAD_START_PLACED)
    head_start_us = c.head_start_ns / 1000
    rules = (c.rules[i] for i in range(min(c.rule_count, MAX_RULES)))
    comm = (c.comm_rules[i] for i in range(min(c.comm_rule_count, MAX_COMM_RULES)))
    return Policy(
        priority="high" if c.flags & binding.PRIORITY_HIGH else "default",
        when="overlap" if c.flags & binding.WHEN_OVERLAP else "always",
        residency=c.residency or None,
        head_start="placed" if placed else None,
        head_start_us=0.0 if placed and head_start_us == PLACED_BOUND_US else head_start_us,
        sm_reserve=c.sm_reserve,
        rules=tuple(Rule(rule.pattern.decode(errors="replace"), rule.residency or None) for rule in rules),
        comm_rules=tuple(map(_comm_rule, comm)),
    )


def _comm_rule(rule: binding.CCommRule) -> CommRule:
    named = [name for name in NCCL_COLLECTIVES if rule.operations & binding.operation_bits(name)]
    return CommRule(
        collective=named[0] if len(named) == 1 else None,
        min_bytes=rule.min_bytes,
        max_bytes=None if rule.max_bytes == _NO_LIMIT else rule.max_bytes,
        ctas=rule.ctas or None,
        cluster=rule.cluster - 1 if rule.cluster else None,
        algorithm=ALGORITHMS[rule.algorithm - 1] if rule.algorithm else None,
        protocol=PROTOCOLS[rule.protocol - 1] if rule.protocol else None,
        cta_policy=CTA_POLICIES[rule.cta_policy] if rule.cta_policy else None,
        chunk=rule.chunk or None,
    )
