"""Takes the pictures of the docs: `python tests/browser/screenshot.py TRACE_DIR OUT.png [--dark] [--width N]`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from devtools import Browser, find_chromium

import weft.trace
from weft.report.page import analysis_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--keys", help="keys to press on the timeline first, such as 'nn'", default="")
    parser.add_argument(
        "--pointer", nargs=2, type=int, metavar=("X", "Y"), help="where the pointer is, in pixels"
    )
    asked = parser.parse_args()
    found = weft.trace.analyze(asked.traces)
    browser = Browser(find_chromium() or "chromium")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            path.write_text(analysis_page(found.to_json(), found.timelines), encoding="utf-8")
            page = browser.open(path, width=asked.width, height=asked.height, dark=asked.dark)
            page.run("document.querySelector('.stage').focus({preventScroll: true})")
            for key in asked.keys:
                page.key(key)
            page.run("document.activeElement.blur(); scrollTo(0, 0)")
            if asked.pointer:
                page.mouse("mouseMoved", *asked.pointer)
            page.settle()
            page.screenshot(asked.picture)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
