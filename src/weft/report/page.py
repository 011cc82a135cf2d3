"""The HTML page of a result: one self-contained file that needs no network.

Text from a document enters the page only through the templates' autoescape or in the escaped JSON block,
which the script shows with textContent. The page's CSP allows only its own script, identified by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import weft
from weft.report.build import Part, analysis_part, bench_part, comparison_parts, tune_part
from weft.report.occupancy import Picture
from weft.report.reading import shorten
from weft.timeline import Ns, Timeline
from weft.tuning.tuned_workload import TunedWorkload

_Document = dict[str, Any]

_ASSETS = Path(__file__).parent / "assets"
_STYLES = ("base", "blocks", "timeline", "ranks", "results", "plan", "live", "print")
_SCRIPTS = ("format", "data", "view", "paint", "hover", "timeline", "input", "table", "links", "heat", "main")
# Unescaped, these could end a script block or begin a comment; in JSON strings the escapes mean the same.
_NO_CONTROLS = {code: None for code in range(32) if chr(code) not in "\t\n\r"}
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def analysis_page(
    document: _Document, timelines: Sequence[Timeline], reasons: Sequence[Ns] | None = None
) -> str:
    """The page of `weft analyze`; `timelines` are those of `document["ranks"]`, in the same order.

    `reasons`: for each span of each timeline the reason of its exposed time, see `RankAnalysis.main_reasons`.
    """
    return render([analysis_part(document, timelines, reasons)])


def bench_page(document: _Document) -> str:
    """The page of `weft bench`."""
    return render([bench_part(document)])


def tune_page(
    tuned: TunedWorkload,
    before: Timeline | None = None,
    after: Timeline | None = None,
    pictures: Sequence[Picture] = (),
) -> str:
    """The page of `weft tune`, with timelines and occupancy before and after, if known."""
    return render([tune_part(tuned, before, after, pictures)])


def comparison_page(
    document: _Document, before: Sequence[Timeline] = (), after: Sequence[Timeline] = ()
) -> str:
    """The page of `weft analyze BEFORE AFTER`: the change, then both analyses."""
    return render(comparison_parts(document, before, after))


def render(parts: Sequence[Part]) -> str:
    """One page with several parts."""
    style = "\n".join(_asset(f"css/{name}.css") for name in _STYLES)
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(f"js/{name}.js") for name in _SCRIPTS) + "\n})();"
    numbered = [part.numbered(position) for position, part in enumerate(parts)]
    page = (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=numbered[0].title if len(numbered) == 1 else "Results",
            parts=numbered,
            version=weft.__version__,
            style=Markup(style),
            script=Markup(script),
            policy=(
                f"default-src 'none'; script-src '{_source_hash(script)}'; "
                f"style-src '{_source_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
            ),
        )
    )
    # A lone surrogate cannot be encoded, and control characters have no meaning on a page.
    return page.encode("utf-8", "replace").decode("utf-8").translate(_NO_CONTROLS)


def embedded(payload: Any) -> Markup:
    """JSON that is safe inside a script element."""
    return Markup(json.dumps(payload, separators=(",", ":"), allow_nan=False).translate(_ESCAPES))


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["embedded"] = embedded
    environment.filters["shorten"] = shorten
    return environment


def _source_hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()
