"""A headless Chromium driven over the DevTools protocol's pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """The browser to use, or None."""
    return os.environ.get("WEFT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class DevToolsError(Exception):
    """The browser refused, threw, or did not answer in time."""


class PageGoneError(DevToolsError):
    """The page was replaced by another one during the request."""


GONE = (
    "context was destroyed",
    "Cannot find context",
    "Cannot find default execution context",
    "navigated or closed",
)


class Browser:
    """One browser process with its own profile."""

    def __init__(self, executable: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="weft-chromium-", ignore_cleanup_errors=True)
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()

        def place_pipes() -> None:  # the protocol's pipe is file descriptors 3 and 4
            high = [os.dup(read_commands), os.dup(write_answers)]
            while min(high) < 5:
                high = [os.dup(fd) for fd in high]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={self._profile.name}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=place_pipes,
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the browser and all its child processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> Any:
        """Send one command and wait for its answer; events that arrive meanwhile are kept."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(110)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    gone = any(words in str(answer["error"]) for words in GONE)
                    raise (PageGoneError if gone else DevToolsError)(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise DevToolsError(f"no answer within {timeout} s")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise DevToolsError("the browser ended")
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Open a file and wait until the page says that it is ready."""
        page = self.tab(width=width, height=height, dark=dark)
        page.call("Page.navigate", {"url": path.absolute().as_uri()})
        page.wait("document.documentElement?.dataset.ready !== undefined")
        return page

    def tab(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """An empty tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Network", "Log", "Security"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.prefer("dark" if dark else "light")
        return page


class Page:
    """A tab."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        return self._browser.call(method, params, self._session)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", {"targetId": self._target})

    def events(self, method: str) -> list[dict[str, Any]]:
        """The events of this kind reported for this tab so far."""
        self.run("0")  # the answer arrives after all earlier events
        mine = (event for event in self._browser.events if event.get("sessionId") == self._session)
        return [event["params"] for event in mine if event["method"] == method]

    def forget(self) -> None:
        """Drop the events reported so far."""
        self._browser.events.clear()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; waits for a promise."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", asked)
        if "exceptionDetails" in answer:
            raise DevToolsError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str, timeout: float = 90.0) -> None:
        """Wait until an expression is true. If the page is replaced meanwhile, ask the new one."""
        deadline, last = time.monotonic() + timeout, ""
        while True:
            try:
                if self.run(condition):
                    return
            except PageGoneError as error:
                last = f"; {error}"
            if time.monotonic() > deadline:
                raise DevToolsError(f"still not true after {timeout} s: {condition}{last}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until the next frame is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", {"features": features})

    def key(self, key: str, *, text: str | None = None) -> None:
        """Press and release a key."""
        codes = {
            "Enter": 13,
            "Tab": 9,
            "Home": 36,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        typed = text if text is not None else {"Enter": "\r"}.get(key, key if len(key) == 1 else None)
        if typed:
            event["text"] = typed
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **event})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", "key": key})
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", buttons=1, clickCount=1)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save a PNG of the window, or of the whole page."""
        found = self.call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(found["data"]))
