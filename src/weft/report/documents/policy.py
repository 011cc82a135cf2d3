"""JSON Schema of a policy, from the fields of `Policy`, their places in the document and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec

from weft import policy, rules
from weft.policy import Policy

_CHOICES = {
    "priority": policy.PRIORITIES,
    "engine": policy.ENGINES,
    "when": policy.MOMENTS,
    "schedule": policy.SCHEDULES,
    "head_start": policy.HEAD_STARTS,
}
_RULE_CHOICES = {
    "collective": rules.NCCL_COLLECTIVES,
    "algorithm": rules.ALGORITHMS,
    "protocol": rules.PROTOCOLS,
    "cta_policy": rules.CTA_POLICIES,
}
_RULE_LIMITS = {
    "residency": (1, rules.MAX_RESIDENCY),
    "ctas": (1, rules.MAX_COMM_CTAS),
    "cluster": (0, rules.MAX_CLUSTER),
    "chunk": rules.CHUNKS,
    "min_bytes": (0, rules.MAX_COMM_BYTES),
    "max_bytes": (0, rules.MAX_COMM_BYTES),
}
_LIMITS = {
    "head_start_us": (0, policy.MAX_PLACED_US),
    "max_ctas": (1, policy.MAX_CTAS),
    "residency": (1, rules.MAX_RESIDENCY),
    "sm_reserve": (0, policy.MAX_SM_RESERVE),
    "forward_prefetch": (1, policy.MAX_PREFETCH),
    "backward_prefetch": (1, policy.MAX_PREFETCH),
}
_ABOVE_ZERO = dict.fromkeys(("bucket_mb", "first_bucket_mb"), policy.MAX_BUCKET_MB)
_OR_NULL = ("min_bytes",)
"""Fields that are never None, but may be null in a file."""
_TOGETHER = [
    {
        "if": {"properties": {"head_start": {"const": "placed"}}, "required": ["head_start"]},
        "else": {"properties": {"head_start_us": {"maximum": policy.MAX_HEAD_START_US}}},
    },
    {
        "if": {"properties": {"head_start": {"const": "timed"}}, "required": ["head_start"]},
        "then": {"properties": {"head_start_us": {"exclusiveMinimum": 0}}, "required": ["head_start_us"]},
    },
    {
        "if": {"properties": {"head_start": {"const": "none"}}, "required": ["head_start"]},
        "then": {"properties": {"head_start_us": {"const": 0}}},
    },
]
"""How the two keys of a head start constrain each other."""


def policy_schema(texts: dict[str, str]) -> dict[str, Any]:
    """JSON Schema of a policy. `texts`: description of each field, from its docstring."""
    hints = get_type_hints(Policy)
    names = [field.name for field in fields(Policy)]
    schemas, definitions = msgspec.json.schema_components(
        [hints[name] for name in names], ref_template="#/$defs/{name}"
    )
    for rule in definitions.values():
        rule["additionalProperties"] = False
        rule["properties"] = {
            key: _limited(key, part, _RULE_CHOICES, _RULE_LIMITS) for key, part in rule["properties"].items()
        }
    sections: dict[str, Any] = {}
    top: dict[str, Any] = {"version": {"const": policy.VERSION}}
    for name, schema in zip(names, schemas, strict=True):
        section, key = policy.place_of(name)
        limited = _limited(name, schema, _CHOICES, _LIMITS)
        if name in texts:
            limited["description"] = texts[name]
        if section is None:
            top[key] = limited
        else:
            sections.setdefault(section, {})[key] = limited
    for section, keys in sections.items():
        top[section] = {"type": "object", "properties": keys, "additionalProperties": False}
    top["comm"]["allOf"] = _TOGETHER
    return {
        "title": "Policy",
        "description": "How compute and communication share the GPU; absent keys leave settings unchanged.",
        "type": "object",
        "properties": top,
        "required": ["version"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _limited(
    name: str, schema: dict[str, Any], choices: Mapping[str, Any], limits: Mapping[str, Any]
) -> dict[str, Any]:
    """The schema of a field with its choices or limits; still allows null if the field may be None."""
    options = schema.get("anyOf", [schema])
    found = []
    for option in options:
        limited = {key: value for key, value in option.items() if key != "default"}
        if limited.get("type") == "string" and name in choices:
            limited["enum"] = list(choices[name])
        if limited.get("type") in ("integer", "number") and name in limits:
            limited["minimum"], limited["maximum"] = limits[name]
        if limited.get("type") == "number" and name in _ABOVE_ZERO:
            limited["exclusiveMinimum"], limited["maximum"] = 0, _ABOVE_ZERO[name]
        if name == "kernel":
            limited["minLength"], limited["maxLength"] = 1, rules.MAX_PATTERN_BYTES
        found.append(limited)
    if name in _OR_NULL:
        found.append({"type": "null"})
    return found[0] if len(found) == 1 else {"anyOf": found}
