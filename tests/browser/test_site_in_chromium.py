"""Each page of the site in a real browser: axe-core's rules, narrow window, keyboard, no other server."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from devtools import Browser, Page, find_chromium
from site_building import build

NARROW = 400
# Axe-core's rules of WCAG and its best practices; none is switched off.
FOUND = """axe.run(PLACES, OPTIONS).then((result) => result.violations.map((violation) =>
    [violation.id, violation.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))]))"""
BROWSERS = 2  # in parallel: the check takes most of a second per page
# The check examines each text separately. Later table rows and the shared navigation add nothing new and
# take half of its time, so they are removed. The home page is checked whole.
SHORTEN = """for (const body of document.querySelectorAll("tbody")) while (body.rows.length > 8) body.deleteRow(-1);
    for (const item of document.querySelectorAll(".md-sidebar li:nth-child(n+4)")) item.remove(); 0"""
CONTRAST = "color-contrast"
# Contrast takes two thirds of the check's time, since it is computed for each text. Except on the home page,
# three texts of each look are enough; a look is the style of the text and of everything behind it.
LOOKS = """(() => {
    const behind = new Map(), counts = new Map();
    const back = (at) => {
        if (!at) return "";
        if (!behind.has(at)) {
            const s = getComputedStyle(at);
            const own = [s.backgroundColor, s.backgroundImage, s.opacity, s.filter, s.mixBlendMode, s.position].join();
            behind.set(at, own + ";" + back(at.parentElement));
        }
        return behind.get(at);
    };
    return [...document.body.querySelectorAll("*")].filter((one) => {
        const text = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (!text || !one.checkVisibility({visibilityProperty: true})) return false;
        const s = getComputedStyle(one);
        const look = [s.color, s.fontSize, s.fontWeight, s.textShadow, back(one)].join(";");
        counts.set(look, (counts.get(look) || 0) + 1);
        return counts.get(look) <= 3;
    });
})()"""
STILL = """document.head.insertAdjacentHTML("beforeend",
    "<style>*, *::before, *::after { transition: none !important; animation: none !important }</style>"); 0"""
HOME = "index.html"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Do not log requests."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return build(tmp_path_factory)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def axe() -> str:
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no axe-core: pip install --no-deps axe-playwright-python")
    return (Path(found.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")


def pages(site: Path) -> list[str]:
    return sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))


def tab(browser: Browser, address: str, dark: bool = False) -> Page:
    """A tab of a first-time reader: no stored theme."""
    page = browser.tab(dark=dark)
    page.call("Storage.clearDataForOrigin", {"origin": address.rstrip("/"), "storageTypes": "local_storage"})
    return page


def visit(page: Page, url: str) -> None:
    """Open a page with transitions off: axe would see colors in the middle of one."""
    page.call("Page.navigate", {"url": url})
    page.wait(f"location.href === {url!r} && document.readyState === 'complete'")
    page.run(STILL)
    page.settle()


def violations(
    page: Page, axe: str, places: str = "document", **options: object
) -> list[tuple[str, list[str]]]:
    """The rules that the page breaks, with up to three places each. `places`: a JavaScript expression."""
    if not page.run("!!window.axe"):
        page.run(f"{axe}; 0")
    asked = json.dumps({"resultTypes": ["violations"], "preload": False, "iframes": False, **options})
    return [
        (name, nodes) for name, nodes in page.run(FOUND.replace("OPTIONS", asked).replace("PLACES", places))
    ]


def violations_of_looks(page: Page, axe: str) -> list[tuple[str, list[str]]]:
    """The same, with contrast checked on three texts of each look only."""
    rest = violations(page, axe, rules={CONTRAST: {"enabled": False}})
    return rest + violations(page, axe, LOOKS, runOnly=[CONTRAST])


def troubles(
    executable: str, address: str, axe: str, names: list[str], checked: set[str]
) -> list[tuple[str, object]]:
    """What is wrong with these pages, in a separate browser. `checked`: the pages that axe also checks."""
    browser = Browser(executable)
    try:
        page, found = tab(browser, address), []
        for name in names:
            visit(page, address + name)
            page.resize(NARROW, 800)
            page.settle()
            width = page.run("document.documentElement.scrollWidth")
            found += [(name, f"{width} px wide")] if width > NARROW else []
            if name not in checked:
                continue
            page.resize(1280, 900)
            page.settle()
            if name != HOME:
                page.run(SHORTEN)
            check = violations if name == HOME else violations_of_looks
            found += [(name, broken) for broken in check(page, axe)]
        found += [("thrown", event) for event in page.events("Runtime.exceptionThrown")]
        urls = {event["request"]["url"] for event in page.events("Network.requestWillBeSent")}
        elsewhere = [url for url in urls if not url.startswith((address, "data:", "blob:"))]
        return found + [("requested", url) for url in elsewhere]
    finally:
        browser.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_page_is_accessible_and_fits_a_narrow_window(site: Path, address: str, axe: str, every: int):
    """Opens all pages at the width of a phone. In CI, axe-core checks the home page and every third page."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium found; install one or set WEFT_CHROMIUM")
    names = pages(site)
    assert len(names) > 30
    assert HOME in names
    checked = {HOME, *names[::every]}
    with ThreadPoolExecutor(BROWSERS) as pool:
        shares = [names[first::BROWSERS] for first in range(BROWSERS)]
        found = list(pool.map(lambda share: troubles(executable, address, axe, share, checked), shares))
    assert [trouble for share in found for trouble in share] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [HOME, "quickstart.html", "reference/python.html", "frameworks.html"])
def test_the_dark_theme_has_contrast(browser: Browser, address: str, axe: str, name: str):
    page = tab(browser, address, dark=True)
    visit(page, address + name)
    assert page.run("document.body.getAttribute('data-md-color-scheme')") == "slate"
    if name == HOME:
        assert violations(page, axe, runOnly=[CONTRAST, "link-in-text-block"]) == []
    else:
        page.run(SHORTEN)
        assert violations(page, axe, LOOKS, runOnly=[CONTRAST]) == []
        assert violations(page, axe, runOnly=["link-in-text-block"]) == []
    page.close()


def test_the_check_finds_what_is_wrong(browser: Browser, address: str, axe: str):
    page = tab(browser, address)
    visit(page, address + "quickstart.html")
    page.run(
        "document.querySelector('h2').outerHTML = '<h5>jump</h5><p style=\"color: #bbb\">pale</p><img src=x>'; 0"
    )
    for check in (violations, violations_of_looks):
        assert {name for name, _ in check(page, axe)} >= {CONTRAST, "heading-order", "image-alt"}
    page.close()


def test_by_keyboard(browser: Browser, address: str):
    page = tab(browser, address)
    visit(page, address + "analyze.html")
    page.key("Tab")
    assert page.run("document.activeElement.classList.contains('md-skip')")
    page.key("Enter")
    assert page.run("location.hash") != ""
    reached = set()
    for _ in range(80):
        page.key("Tab")
        reached.add(
            page.run("document.activeElement.closest('.md-content') && document.activeElement.localName")
        )
    assert {"a", "code", "div"} <= reached  # links; blocks and tables that scroll
    page.close()
