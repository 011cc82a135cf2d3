"""The pages of `weft explore` in a real browser: nothing goes wrong, everything is drawn."""

from __future__ import annotations

from pathlib import Path

from devtools import Browser

from weft.ops.case import Case
from weft.ops.characterize import simulated
from weft.ops.explore import explore
from weft.report.explore import losses_page, page


def test_schedules_and_losses_are_drawn(browser: Browser, tmp_path: Path):
    case = Case(operation="all_gather_matmul", m=131072, n=2048, k=16384, ranks=8, gpu="mi300x")
    found = explore(case)
    lines = [("serial", found.serial.timeline), (found.best.name, found.best.timeline)]
    path = tmp_path / "page.html"
    path.write_text(page(found.to_dict(), lines), encoding="utf-8")
    shown = browser.open(path)
    assert shown.run("document.querySelectorAll('.whisker').length") == 6
    assert shown.run("document.querySelector('.timeline').hidden") is False
    assert "simulated" in shown.run("document.body.innerText").lower()
    assert shown.events("Runtime.exceptionThrown") == []
    assert [e["entry"]["text"] for e in shown.events("Log.entryAdded")] == []
    shown.close()
    path.write_text(losses_page(simulated("h200")), encoding="utf-8")
    shown = browser.open(path)
    shown.wait("[...document.images].length === 3 && [...document.images].every(i => i.naturalWidth > 100)")
    shown.resize(360, 700)
    assert shown.run("document.documentElement.scrollWidth") <= 360
    assert [e["entry"]["text"] for e in shown.events("Log.entryAdded")] == []
    shown.close()
