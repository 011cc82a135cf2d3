"""Prints and writes a benchmark's result as one JSON document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def show(document: dict[str, Any], out: Path | None) -> None:
    """Print a document, and write it to a file if one is given."""
    text = json.dumps(document, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n")
