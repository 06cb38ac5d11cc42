"""A headless Chromium, driven through its devtools over a pair of pipes."""

import base64
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium")
"""Debian's Chromium, if it is installed."""

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
# Chromium reads messages from descriptor 3 and writes them to 4.
_START = 'exec "$0" "${@:3}" 3<&"$1" 4>&"$2"'


class Page:
    """A tab, and what was seen in it: `errors` of the console and `requests`."""

    def __init__(self, commands: int, answers: BinaryIO):
        self._commands = commands
        self._answers = answers
        self._numbers = itertools.count()
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._events: set[str] = set()
        targets = self.call("Target.getTargets")["targetInfos"]
        (tab,) = (target for target in targets if target["type"] == "page")
        attached = {"targetId": tab["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **attached)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one message of the devtools protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._see(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "chromium has ended"
            text += byte
        return json.loads(text)

    def _see(self, event: dict[str, Any]) -> None:
        params, method = event.get("params", {}), event.get("method", "")
        self._events.add(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(
                f"{params['entry']['text']} {params['entry'].get('url')}"
            )
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the window in pixels."""
        size = {"width": width, "height": height}
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{**size, "deviceScaleFactor": 1, "mobile": False},
        )

    def prefer(self, scheme: str) -> None:
        """Asks pages for the "light" or the "dark" theme."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        """Loads a page with all that it asks for."""
        self._events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._see(self._read())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of its promise, in the page."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def broken_pictures(self) -> list[str]:
        """Addresses of the pictures that could not be shown."""
        return self.value(
            "[...document.images].filter((i) => !i.naturalWidth).map((i) => i.src)"
        )

    def screenshot(self, path: pathlib.Path, whole: bool = False) -> None:
        """Writes what the window shows, or the whole page, as a PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """A Chromium with one empty page, ended at the end."""
    # Its processes write to the profile until the last of them has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        read_commands, write_commands = os.pipe()
        read_answers, write_answers = os.pipe()
        ends = str(read_commands), str(write_answers)
        flags = (*_FLAGS, f"--user-data-dir={profile}", "about:blank")
        process = subprocess.Popen(
            ["bash", "-c", _START, CHROMIUM, *ends, *flags],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            with os.fdopen(read_answers, "rb") as answers:
                yield Page(write_commands, answers)
        finally:
            os.close(write_commands)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
