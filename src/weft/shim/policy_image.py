"""Encodes and decodes a policy's image, the form that it has in the shim's memory."""

from __future__ import annotations

import ctypes
import os
import zlib
from functools import lru_cache

from weft.errors import InputError
from weft.kernels import comm_globs
from weft.policy import MAX_COMM_RULES, MAX_RULES, PLACED_BOUND_US, Policy
from weft.rules import ALGORITHMS, CTA_POLICIES, NCCL_COLLECTIVES, PROTOCOLS, CommRule, Rule
from weft.shim.layout import (
    COMM_PATTERNS,
    CONTROL_MAGIC,
    ENGINE_DMA,
    HEAD_START_PLACED,
    LAYOUT_VERSION,
    NCCL_OPERATIONS,
    POLICY_SET,
    PRIORITY_HIGH,
    PROCESS_MAGIC,
    TRACK,
    WHEN_OVERLAP,
    CCommRule,
    CControl,
    CHead,
    CPolicy,
)

_NO_LIMIT = 2**64 - 1


@lru_cache(maxsize=64)
def encode_policy(policy: Policy | None, track: bool = False) -> bytes:
    """A policy as the shim reads it; None: the process has no policy of its own. Residency 0 means unchanged.

    `track`: count the kernels launched while a collective is in flight, whatever the policy asks for.
    """
    c = CPolicy()
    c.flags = TRACK if track else 0
    comm = comm_globs()
    assert len(comm) <= COMM_PATTERNS
    c.comm_count = len(comm)
    for i, glob in enumerate(comm):
        c.comm[i].value = glob.encode()
    if policy is None:
        return bytes(c)
    c.flags |= POLICY_SET
    c.flags |= PRIORITY_HIGH if policy.priority == "high" else 0
    c.flags |= WHEN_OVERLAP if policy.when == "overlap" else 0
    c.residency = policy.residency or 0
    placed = policy.head_start == "placed"
    c.flags |= HEAD_START_PLACED if placed else 0
    c.flags |= ENGINE_DMA if policy.engine == "dma" else 0
    c.head_start_ns = round((policy.head_start_us or (PLACED_BOUND_US if placed else 0)) * 1000)
    c.sm_reserve = policy.sm_reserve
    c.rule_count = len(policy.rules)
    for i, rule in enumerate(policy.rules):
        c.rules[i].pattern = rule.kernel.encode()
        c.rules[i].residency = rule.residency or 0
    c.comm_rule_count = len(policy.comm_rules)
    c.comm_ctas = policy.max_ctas or 0 if policy.comm_rules else 0
    for i, of_collectives in enumerate(policy.comm_rules):
        c.comm_rules[i] = _encode_comm_rule(of_collectives)
    return bytes(c)


def operation_bits(collective: str) -> int:
    """A collective of a rule as the shim's mask of operations."""
    names = ("send", "recv") if collective == "send_recv" else (collective,)
    return sum(1 << NCCL_OPERATIONS.index(name) for name in names)


def _encode_comm_rule(rule: CommRule) -> CCommRule:
    """A rule as the shim reads it; 0 in a field means NCCL's own choice."""
    names = NCCL_COLLECTIVES if rule.collective is None else (rule.collective,)
    return CCommRule(
        min_bytes=rule.min_bytes,
        max_bytes=_NO_LIMIT if rule.max_bytes is None else rule.max_bytes,
        operations=sum(map(operation_bits, names)),
        ctas=rule.ctas or 0,
        cluster=0 if rule.cluster is None else rule.cluster + 1,
        algorithm=0 if rule.algorithm is None else ALGORITHMS.index(rule.algorithm) + 1,
        protocol=0 if rule.protocol is None else PROTOCOLS.index(rule.protocol) + 1,
        cta_policy=0 if rule.cta_policy is None else CTA_POLICIES.index(rule.cta_policy),
        chunk=rule.chunk or 0,
    )


def control_image(policy: Policy | None) -> bytes:
    """The contents of a new control file with this policy."""
    image = encode_policy(policy)
    head = CControl(CONTROL_MAGIC, LAYOUT_VERSION, ctypes.sizeof(CControl), 2, zlib.adler32(image))
    return bytes(head)[: CControl.policy.offset] + image


def policy_in_file(number: int) -> tuple[Policy | None, int]:
    """The policy in an open control or process file, and its sequence number, which changes with every write.

    Raises InputError if the file has no control block or is being written.
    """
    of_process = os.pread(number, 7, 0) == PROCESS_MAGIC
    size = ctypes.sizeof(CControl)
    data = os.pread(number, size, CHead.control.offset if of_process else 0)
    if len(data) < size:
        raise InputError("not a control block of this weft")
    head = CControl.from_buffer_copy(data)
    if head.sequence == 0:
        return None, 0
    if head.magic != CONTROL_MAGIC or head.version != LAYOUT_VERSION:
        raise InputError("not a control block of this weft")
    image = data[CControl.policy.offset : CControl.policy.offset + ctypes.sizeof(CPolicy)]
    if head.sequence & 1 or zlib.adler32(image) != head.checksum:
        raise InputError("the control block is being written")
    return decode_policy(image), head.sequence


def decode_policy(image: bytes) -> Policy | None:
    """The part of a policy that the shim applies; None if the image sets no policy."""
    c = CPolicy.from_buffer_copy(image)
    if not c.flags & POLICY_SET:
        return None
    placed = bool(c.flags & HEAD_START_PLACED)
    head_start_us = c.head_start_ns / 1000
    rules = (c.rules[i] for i in range(min(c.rule_count, MAX_RULES)))
    comm = (c.comm_rules[i] for i in range(min(c.comm_rule_count, MAX_COMM_RULES)))
    return Policy(
        priority="high" if c.flags & PRIORITY_HIGH else "default",
        when="overlap" if c.flags & WHEN_OVERLAP else "always",
        residency=c.residency or None,
        head_start="placed" if placed else None,
        head_start_us=0.0 if placed and head_start_us == PLACED_BOUND_US else head_start_us,
        sm_reserve=c.sm_reserve,
        engine="dma" if c.flags & ENGINE_DMA else "sm",
        rules=tuple(Rule(rule.pattern.decode(errors="replace"), rule.residency or None) for rule in rules),
        comm_rules=tuple(map(_decode_comm_rule, comm)),
    )


def _decode_comm_rule(rule: CCommRule) -> CommRule:
    named = [name for name in NCCL_COLLECTIVES if rule.operations & operation_bits(name)]
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
