"""The page of live tuning in a real browser: nothing goes wrong, every step is drawn."""

from __future__ import annotations

from pathlib import Path

from devtools import Browser
from live_samples import HOSTILE, tuned_job

from weft.report.live import live_page


def test_steps_are_drawn_and_tables_sort(browser: Browser, tmp_path: Path):
    document, steps = tuned_job(drift=True)
    document["candidates"][0]["note"] = HOSTILE
    path = tmp_path / "page.html"
    path.write_text(live_page(document, steps), encoding="utf-8")
    shown = browser.open(path)
    assert shown.run("document.querySelectorAll('.steps circle').length") == len(steps["times"])
    assert shown.run("document.querySelectorAll('.steps .decided').length") >= 1
    fill = "getComputedStyle(document.querySelector('.step-watch')).fill"
    assert shown.run(fill) != "rgb(0, 0, 0)"
    assert shown.run("document.querySelectorAll('img').length") == 0
    shown.run("document.querySelector('#part0-tried th:nth-child(2) button').click()")
    assert shown.run("document.querySelector('#part0-tried th:nth-child(2)').ariaSort") in (
        "ascending",
        "descending",
    )
    assert shown.events("Runtime.exceptionThrown") == []
    assert [e["entry"]["text"] for e in shown.events("Log.entryAdded")] == []
    shown.close()
