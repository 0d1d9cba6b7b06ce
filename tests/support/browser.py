"""A headless Chromium, driven by its DevTools protocol: pages as a person sees and uses them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-extensions", "--hide-scrollbars", "--remote-debugging-port=0",
    "--force-device-scale-factor=1", "--window-size=1280,900",
)  # fmt: skip


class Browser:
    """One tab; every call waits for its answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse):
        self._loop, self._socket, self._number = loop, socket, 0
        self.problems: list[str] = []
        """messages of the page's console that are errors, and exceptions of its script"""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), 60))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = json.loads((await self._socket.receive()).data)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            is_error = answer.get("params", {}).get("entry", {}).get("level") == "error"
            if answer.get("method") == "Runtime.exceptionThrown" or is_error:
                self.problems.append(json.dumps(answer["params"])[:600])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, script: str, *, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, (script, self.value("location.href"), self.problems)
            time.sleep(0.05)

    def middle(self, selector: str) -> list[float]:
        """Where an element's middle is in the window."""
        box = "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        found: list[float] = self.value(f"{box}(document.querySelector({selector!r}).getBoundingClientRect())")
        return found

    def choose(self, selector: str, value: str, event: str = "input") -> None:
        """Give a field another value."""
        dispatch = f"one.dispatchEvent(new Event({event!r}))"
        self.value(
            f"(() => {{ const one = document.querySelector({selector!r}); one.value = {value!r}; {dispatch}; }})()"
        )

    def click(self, selector: str) -> None:
        """Click into the middle of an element with the mouse."""
        self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.value(f"document.querySelector({selector!r}).focus()")
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Save what is in the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        loop = asyncio.new_event_loop()
        try:
            port = _port(Path(profile), process)
            session, socket = loop.run_until_complete(_connected(port))
            yield Browser(loop, socket)
            loop.run_until_complete(session.close())
        finally:
            process.terminate()
            process.wait(20)
            loop.close()


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while not (found := profile / "DevToolsActivePort").exists() or "\n" not in found.read_text():
        assert process.poll() is None and time.monotonic() < deadline, "Chromium doesn't start"
        time.sleep(0.05)
    return int(found.read_text().splitlines()[0])


async def _connected(port: int) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    session = aiohttp.ClientSession()
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        [tab] = [tab for tab in await answer.json() if tab["type"] == "page"]
    return session, await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 27)
