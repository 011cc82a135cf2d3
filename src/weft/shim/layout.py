"""The memory that the shim shares with weft. Mirrors csrc/layout.h."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int32, c_uint32, c_uint64

from weft.policy import MAX_COMM_RULES, MAX_RULES
from weft.rules import NCCL_COLLECTIVES

LAYOUT_VERSION = 4
CONTROL_MAGIC = b"weftctl"
PROCESS_MAGIC = b"weftprc"
PATTERN_BYTES = 128
COMM_PATTERNS = 64
NAME_BYTES = 512
SHARDS = 16
CHUNK_ROWS = 16
MOST_CHUNKS = 512  # per process file
PAGE = 4096

POLICY_SET, PRIORITY_HIGH, WHEN_OVERLAP, TRACK, HEAD_START_PLACED, ENGINE_DMA = 1, 2, 4, 8, 16, 32

KINDS = ("compute", "comm", "weft", "unknown")
APIS = {1: "cuda", 2: "hip"}
REASONS_NOT_APPLIED = (
    "shaped",
    "the policy sets no residency for it",
    "already at or below the requested residency",
    "no size of shared memory gives that residency",
    "its whole grid is resident at once (name it in a rule to shape it)",
    "no collective was in flight",
    "cooperative launch",
    "the driver refused the shaped launch",
    "this driver does not report kernel names (CUDA 12.3 and newer do)",
    "the program has more kernels than weft can track",
)
COUNTERS = (
    "shape_failures",
    "prioritised",
    "priority_failures",
    "head_starts",
    "head_start_failures",
    "cooperative",
    "captured",
    "graph_launches",
    "unknown",
    "tracking_failures",
    "policy_changes",
    "routed",
    "split_failures",
    "unlisted",
    "unhandled",
    "placed_events",
    "placed_ready",
    "placed_timeouts",
    "placed_captured",
    "placed_busy",
    "placed_failures",
    "sm_reserved",
    "sm_reserve_own",
    "sm_reserve_determinism",
    "sm_reserve_failures",
    "sm_reserve_others",
    "per_call",
    "config_refused",
    "tuned",
    "tuner_failures",
    "rules_unapplied",
    "comm_bytes",
    "placed_behind",
    "engine_copied",
    "engine_kernels",
    "engine_unsure",
    "engine_no_window",
    "engine_other_kind",
    "engine_old_nccl",
    "engine_two_ranks",
    "engine_own_policy",
    "engine_nodes",
    "engine_refused",
    "copied_bytes",
)
NCCL_OPERATIONS = (*(name for name in NCCL_COLLECTIVES if name != "send_recv"), "send", "recv")
"""The calls in the order of csrc/nccl.h; a rule's `send_recv` stands for two of them."""
NCCL_PATHS = ("none", "config", "tuner", "refused")
"""How rules for collectives reach NCCL: not at all, by each call's configuration, or by the tuner plugin.
`refused`: NCCL refused a configuration, and weft makes plain calls."""


class CRule(ctypes.Structure):
    _fields_ = (("pattern", c_char * PATTERN_BYTES), ("residency", c_uint32), ("unused", c_uint32))


class CCommRule(ctypes.Structure):
    _fields_ = (
        ("min_bytes", c_uint64),
        ("max_bytes", c_uint64),
        ("operations", c_uint32),
        ("ctas", c_uint32),
        ("cluster", c_uint32),
        ("algorithm", c_uint32),
        ("protocol", c_uint32),
        ("cta_policy", c_uint32),
        ("chunk", c_uint64),
    )


class CPolicy(ctypes.Structure):
    _fields_ = (
        ("flags", c_uint32),
        ("residency", c_uint32),
        ("head_start_ns", c_uint32),
        ("rule_count", c_uint32),
        ("comm_count", c_uint32),
        ("sm_reserve", c_uint32),
        ("rules", CRule * MAX_RULES),
        ("comm", (c_char * PATTERN_BYTES) * COMM_PATTERNS),
        ("comm_rule_count", c_uint32),
        ("comm_ctas", c_uint32),
        ("comm_rules", CCommRule * MAX_COMM_RULES),
    )


class CControl(ctypes.Structure):
    _fields_ = (
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("size", c_uint32),
        ("sequence", c_uint64),
        ("checksum", c_uint64),
        ("policy", CPolicy),
    )


class CRow(ctypes.Structure):
    _fields_ = (
        ("name", c_char * NAME_BYTES),
        ("kind", c_uint32),
        ("threads", c_uint32),
        ("shared_bytes", c_uint32),
        ("natural_blocks", c_uint32),
        ("shaped_blocks", c_uint32),
        ("shaped_bytes", c_uint32),
        ("reason", c_uint32),
        ("grid_blocks", c_uint32),
    )


class CCell(ctypes.Structure):
    _fields_ = (("launches", c_uint64), ("shaped", c_uint64), ("beside", c_uint64))


class CChunk(ctypes.Structure):
    _fields_ = (("rows", CRow * CHUNK_ROWS), ("cells", (CCell * CHUNK_ROWS) * SHARDS))


class CHead(ctypes.Structure):
    """The head of a process's file; chunks of rows follow from the next page on."""

    _fields_ = (
        ("magic", c_char * 8),
        ("version", c_uint32),
        ("size", c_uint32),
        ("pid", c_uint32),
        ("rank", c_int32),
        ("api", c_uint32),
        ("rows_used", c_uint32),
        ("command", c_char * 256),
        ("nccl_version", c_uint32),
        ("nccl_path", c_uint32),
        ("nccl_tuner", c_uint32),
        ("nccl_user_tuner", c_uint32),
        ("counters", c_uint64 * 64),
        ("control", CControl),
    )


CHUNKS_OFFSET = -(-ctypes.sizeof(CHead) // PAGE) * PAGE
PROCESS_BYTES = -(-(CHUNKS_OFFSET + MOST_CHUNKS * ctypes.sizeof(CChunk)) // PAGE) * PAGE
