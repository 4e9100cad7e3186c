"""Chromium without a window, driven by its debugging protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")

_WAIT_S = 30.0


class Browser:
    """One tab."""

    def __init__(self, asks: int, answers: int) -> None:
        self._asks, self._answers = asks, answers
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its answer."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._asks, json.dumps(asked).encode() + b"\0")
        number = self._number
        for message in self._messages():
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                found: dict[str, Any] = message["result"]
                return found
            self.events.append(message)
        raise AssertionError("unreachable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" not in self._rest:
                some = os.read(self._answers, 1 << 20)
                assert some, "the browser is gone"
                self._rest += some
            message, _, self._rest = self._rest.partition(b"\0")
            yield json.loads(message)

    def show(
        self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False, media: str = ""
    ) -> None:
        """Open an address, and wait until it is loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return what an expression of JavaScript gives; promises are awaited."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str) -> Any:
        """Wait for an expression to be true; return its value."""
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            # The browser waits for its next frame: nobody polls.
            value = self.run(
                f"new Promise((done) => requestAnimationFrame(() => done({condition})))"
            )
            if value:
                return value
        raise AssertionError(f"never true: {condition}")

    def press(self, key: str, *, code: int = 0, text: str = "") -> None:
        """Press a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """Drag the mouse."""
        for kind, (x, y), buttons in (
            ("mouseMoved", start, 0),
            ("mousePressed", start, 1),
            ("mouseMoved", stop, 1),
            ("mouseReleased", stop, 0),
        ):
            button = "none" if kind == "mouseMoved" else "left"
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button=button,
                buttons=buttons,
                clickCount=int(button == "left"),
            )

    def picture(self, *, whole: bool = False) -> bytes:
        """Return a PNG of what is seen, or of the whole page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """Print the page."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"])

    def said(self) -> list[dict[str, Any]]:
        """Return what the page has logged, or what went wrong in it."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [each for each in self.events if each["method"] in kinds]


@contextmanager
def browser(prefix: Sequence[str] = ()) -> Iterator[Browser]:
    """Start a browser.

    Args:
        prefix: what to start it with, such as `unshare --net`.
    """
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads from its descriptor 3 and writes to 4: ours must be others.
        theirs_in, asks, answers, theirs_out = map(_moved, (*os.pipe(), *os.pipe()))
        command = [
            *prefix,
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            ["bash", "-c", f"exec {shlex.join(command)} 3<&{theirs_in} 4>&{theirs_out}"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        try:
            os.close(theirs_in)
            os.close(theirs_out)
            yield Browser(asks, answers)
        finally:
            process.kill()
            process.wait()
            os.close(asks)
            os.close(answers)


def _moved(end: int) -> int:
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return moved


def opened(path: Path) -> str:
    """Return the address of a file."""
    return path.absolute().as_uri()
