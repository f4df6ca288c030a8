"""A headless Chromium that a test drives: over a pipe, so that it needs no port and no other package."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SECONDS = 60.0
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # CI runs as root
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


def chromium_missing() -> str | None:
    """Return why there is no browser, or None."""
    return None if shutil.which("chromium") else "needs Chromium (apt-get install chromium)"


class Page:
    """A page, and all that it has asked for and complained about.

    Attributes:
        requests: The addresses it has asked for.
        complaints: What stood in its console, and exceptions.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        (target,) = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"][:1]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise EOFError("Chromium has ended")
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, parameters: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(str([each.get("value") for each in parameters["args"]]))
        elif event == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])

    def evaluate(self, expression: str) -> Any:
        """Return what JavaScript gives; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description"))
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until JavaScript gives something true."""
        deadline = time.monotonic() + _SECONDS
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} stays false; complaints: {self.complaints}")
            time.sleep(0.05)

    def look(self, width: int = 1280, height: int = 900, *, scheme: str = "light", ratio: float = 1) -> None:
        """Have a window of this size, and a light or dark desktop around it."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=ratio, mobile=False
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Go there."""
        self.call("Page.navigate", url=address)
        self.wait_for(f"document.readyState === 'complete' && location.href === {json.dumps(address)}")

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at one place of the window and let it go at another."""
        for kind, (x, y), buttons in (
            ("mouseMoved", start, 0),
            ("mousePressed", start, 1),
            ("mouseMoved", ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2), 1),
            ("mouseMoved", end, 1),
            ("mouseReleased", end, 0),
        ):
            button = "none" if kind == "mouseMoved" and not buttons else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1)

    def hover(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextlib.contextmanager
def chromium() -> Iterator[Page]:
    """Yield an empty page; the browser and all its processes end with the block, and leave nothing."""
    # Its sockets are here, whose paths may be 108 characters long; pytest's own folders are too long.
    folder = Path(tempfile.mkdtemp(prefix="chromium-", dir="/tmp"))
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()
    command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{to_us}', "chromium", "chromium"]
    command += [*_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command,
        pass_fds=(to_browser, to_us),
        env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder)},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(to_us)
    try:
        page = Page(from_browser, from_us)
        yield page
        with contextlib.suppress(RuntimeError, OSError, EOFError, TimeoutError):
            page.call("Browser.close")
            process.wait(10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(from_us)
        os.close(from_browser)
        shutil.rmtree(folder, ignore_errors=True)
