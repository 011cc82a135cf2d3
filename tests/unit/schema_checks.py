"""Real documents of commands against their JSON Schemas."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from weft.report.documents import json_schema

OF_CASE = {
    "analyze": "analyze",
    "analyze_8_ranks": "analyze",
    "analyze_compare": "analyze-compare",
    "bench": "bench",
    "doctor": "doctor",
    "explore": "explore",
    "explore_characterize": "characterize",
    "plan": "plan",
    "plan_calibrate": "plan",
    "plan_experts": "plan",
    "plan_scale": "plan-scale",
    "plan_sweep": "plan-sweep",
    "reproduce": "reproduce",
    "reproduce_ficco": "reproduce",
    "run_stats": "run",
    "run_tune_stats": "run",
    "run_tune_stats_job": "run",
    "store": "store",
    "store_forget": "store",
    "store_import": "store",
    "tune": "tune",
    "tune_policy": "policy",
}
"""The schema of each case in contract.py."""
WITHOUT = {"bench_file", "store_export"}
"""weft's own files without a schema: they carry a version, and only weft reads them."""


def schema_problems(case: str, document: Any) -> list[str]:
    """Where the document of a case does not validate: a key is missing or has another type."""
    return [] if case in WITHOUT else invalid(OF_CASE[case], document)


def invalid(name: str, document: Any) -> list[str]:
    """Where a document does not validate; keys that the schema does not name are allowed."""
    return _listed(Draft202012Validator(json_schema(name)), document)


def problems(name: str, document: Any) -> list[str]:
    """Where a document differs from its schema, including keys that the schema does not name."""
    return _listed(Draft202012Validator(_strict(name)), document)


def _listed(validator: Draft202012Validator, document: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(document)]


@cache
def _strict(name: str) -> dict[str, Any]:
    schema = json_schema(name)
    Draft202012Validator.check_schema(schema)
    strict = copy.deepcopy(schema)
    for part in (strict, *strict.get("$defs", {}).values()):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return strict
