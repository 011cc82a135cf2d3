"""The JSON documents that weft's commands write: a type for each document, and its JSON Schema.

`SCHEMAS` maps names to types. A document may have more keys than its schema names: releases add keys, and
change `version` if they have to remove a key or change its type.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from itertools import pairwise
from typing import Any, get_type_hints

import msgspec

from weft.errors import UnavailableError, UsageError
from weft.monitor.sample import TopSample
from weft.policy import Policy
from weft.report.documents.analyze import AnalyzeCompareDocument, AnalyzeDocument
from weft.report.documents.job import RunDocument, TopChangeDocument
from weft.report.documents.lab import (
    BenchDocument,
    CharacterizeDocument,
    DoctorDocument,
    ExploreDocument,
    StoreDocument,
    TuneDocument,
)
from weft.report.documents.node import NodeDocument, NodeListDocument
from weft.report.documents.plan import PlanDocument, PlanScaleDocument, PlanSweepDocument
from weft.report.documents.policy import policy_schema
from weft.report.documents.reproduce import ReproduceDocument

POLICY_NAME = "PolicyJson"
_COUNTED = {"RunDocument", "ProcessJson"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS: dict[str, Any] = {
    "policy": Policy,
    "analyze": AnalyzeDocument,
    "analyze-compare": AnalyzeCompareDocument,
    "bench": BenchDocument,
    "characterize": CharacterizeDocument,
    "doctor": DoctorDocument,
    "explore": ExploreDocument,
    "node": NodeDocument,
    "node-list": NodeListDocument,
    "plan": PlanDocument,
    "plan-scale": PlanScaleDocument,
    "plan-sweep": PlanSweepDocument,
    "reproduce": ReproduceDocument,
    "run": RunDocument,
    "store": StoreDocument,
    "top": TopSample,
    "top-change": TopChangeDocument,
    "tune": TuneDocument,
}
"""Document types by the NAME of `weft schema NAME`."""


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a document. Raises UsageError for a name that is not in SCHEMAS."""
    kind = SCHEMAS.get(name)
    if kind is None:
        raise UsageError(f"schema {name!r} is not known; use one of {', '.join(SCHEMAS)}")
    if kind is Policy:
        return {"$schema": DIALECT, **policy_schema(field_texts(Policy))}
    _, definitions = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    classes = _classes(kind, {})
    for title, definition in definitions.items():
        texts = field_texts(classes[title]) if title in classes else {}
        for key, part in definition.get("properties", {}).items():
            if key in texts:
                part.setdefault("description", texts[key])
    if POLICY_NAME in definitions:
        control = policy_schema(field_texts(Policy))
        definitions |= control.pop("$defs")
        definitions[POLICY_NAME] = control
    for title in definitions.keys() & _COUNTED:
        counters = _counters()
        definitions[title]["properties"] |= {counter: {"type": "integer"} for counter in counters}
        definitions[title]["required"] += counters
    main = definitions.pop(kind.__name__)
    return {"$schema": DIALECT, **main, "$defs": definitions}


def _counters() -> tuple[str, ...]:
    try:
        from weft.shim.layout import COUNTERS
    except ImportError:  # the shim is Linux only
        raise UnavailableError("the schema of `weft run --stats` needs Linux, as weft run does") from None
    return COUNTERS


def field_texts(kind: type) -> dict[str, str]:
    """The docstring under each field of a class and of its bases."""
    texts: dict[str, str] = {}
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, ValueError):
        return texts
    if not isinstance(node, ast.ClassDef):
        return texts
    for base in node.bases:  # from the source: a TypedDict does not keep its bases
        found = vars(sys.modules[kind.__module__]).get(ast.unparse(base))
        if inspect.isclass(found) and found.__module__.startswith("weft."):
            texts |= field_texts(found)
    body = node.body
    for field, after in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            said = after.value if isinstance(after, ast.Expr) else None
            if isinstance(said, ast.Constant) and isinstance(said.value, str):
                texts[field.target.id] = " ".join(said.value.split())
    return texts


def _classes(kind: Any, found: dict[str, type]) -> dict[str, type]:
    """Every class that a type mentions, by name."""
    if inspect.isclass(kind) and getattr(kind, "__annotations__", None) and kind.__name__ not in found:
        found[kind.__name__] = kind
        for part in get_type_hints(kind).values():
            _classes(part, found)
    for part in getattr(kind, "__args__", ()):
        _classes(part, found)
    return found
