"""The page of live tuning shows every trial, and runs nothing that a document contains."""

from __future__ import annotations

import math

from live_samples import HOSTILE, tuned_job

from weft.report.live import live_page


def test_steps_candidates_and_decisions_are_on_the_page():
    document, steps = tuned_job()
    page = live_page(document, steps)
    assert page.count("<circle") == len(steps["times"])
    assert 'class="step-proof"' in page
    assert "in force at the end" in page
    assert "my_gemm" in page
    for row in document["candidates"]:
        assert row["label"] in page


def test_a_revert_is_told():
    document, steps = tuned_job(drift=True)
    page = live_page(document, steps)
    assert "was reverted" in page
    assert 'class="decided"' in page


def test_hostile_text_is_escaped():
    document, steps = tuned_job()
    document["text"] = document["candidates"][0]["note"] = HOSTILE
    document["explanation"][0]["kernel"] = HOSTILE
    steps["policies"][0] = HOSTILE
    steps["notes"] = [[3, HOSTILE]]
    page = live_page(document, steps)
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert page.count("&lt;script&gt;alert") >= 4


def test_odd_documents_still_make_a_page():
    assert "Live tuning" in live_page({}, {})
    odd = {"times": [[1, math.inf, 0, "watch"], "x", [0, 5.0, 99, "??"], [1, 6.0, 0, []]], "notes": [1, [2]]}
    odd["policies"] = []
    assert "unknown policy" in live_page({"ci": "x", "candidates": [1], "watch": 3}, odd)


def test_a_long_run_is_thinned_out():
    document, _ = tuned_job()
    times = [[n, 50.0 + n % 3, 0, "watch"] for n in range(20_000)]
    page = live_page(document, {"policies": ["overlap"], "times": times, "notes": []})
    assert page.count("<circle") <= 3001
    assert len(page) < 1_500_000


def test_steps_that_were_timed_together_are_all_counted():
    document, _ = tuned_job()
    times = [[10 * n, 50.0, 0, "watch"] for n in range(20)]
    page = live_page(document, {"steps": 200, "policies": ["overlap"], "times": times, "notes": []})
    assert "200 steps, from 50 to 50 ms" in page
    assert "step 199" in page
