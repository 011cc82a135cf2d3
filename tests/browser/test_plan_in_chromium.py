"""The pages of a plan in a real browser: drawn, printed, narrow, dark, with hostile names, without a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from devtools import Browser

from weft.plan import TrainingJob
from weft.plan.answer import answer, document, scaling_document, sweep_document
from weft.plan.scaling import curves
from weft.plan.sweep import room, sweep
from weft.report.plan_page import plan_page

JOB = TrainingJob(model="llama3-8b", gpu="h100", gpus=16, tp=2, global_batch=32, policy="auto")
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


def made(kind: str) -> dict:
    if kind == "sweep":
        return sweep_document(JOB, sweep(JOB, limit=12, fits=room()))
    if kind == "scaling":
        return scaling_document(JOB, curves(JOB, 4, 32))
    return document(answer(JOB))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", ["plan", "sweep", "scaling"])
def test_the_page_is_drawn_and_asks_for_nothing(browser: Browser, tmp_path: Path, kind: str, dark: bool):
    found = made(kind)
    found["job"]["model"] = HOSTILE
    path = tmp_path / f"{kind}.html"
    path.write_text(plan_page(found), encoding="utf-8")
    page = browser.open(path, dark=dark)
    try:
        assert page.run("document.title").endswith("weft")
        assert page.run("document.querySelectorAll('img').length") == 0
        assert HOSTILE in page.run("document.querySelector('h1').textContent")
        marks = {"plan": ".bar rect:not(.track)", "sweep": ".plot circle.best", "scaling": ".plot circle"}[
            kind
        ]
        assert page.run(f"document.querySelectorAll('{marks}').length") > 1
        # Every mark has its own colour, not the black of a missing style.
        fills = page.run(f"[...document.querySelectorAll('{marks}')].map((e) => getComputedStyle(e).fill)")
        assert "rgb(0, 0, 0)" not in fills
        page.resize(380, 800)
        page.settle()
        assert page.run("document.documentElement.scrollWidth") <= 380
        requested = {event["request"]["url"] for event in page.events("Network.requestWillBeSent")}
        assert requested == {path.absolute().as_uri()}
        for trouble in ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"):
            assert page.events(trouble) == []
    finally:
        page.close()


def test_a_table_of_ways_sorts(browser: Browser, tmp_path: Path):
    path = tmp_path / "sweep.html"
    path.write_text(plan_page(made("sweep")), encoding="utf-8")
    page = browser.open(path)
    try:
        page.run(
            "[...document.querySelectorAll('th button')].find((b) => b.textContent === 'Memory').click()"
        )
        page.settle()
        values = page.run(
            "[...document.querySelectorAll('table.sortable tbody tr')].map((r) => Number(r.cells[6].dataset.sort))"
        )
        assert values in (sorted(values), sorted(values, reverse=True))
        assert len(set(values)) > 1
    finally:
        page.close()
