"""A headless Chromium, told what to do by the WebDriver protocol (https://www.w3.org/TR/webdriver2/) over HTTP."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = [name for name, path in [("chromium", CHROMIUM), ("chromedriver", DRIVER)] if path is None]
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--window-size=1280,800", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER, ESCAPE = "\ue007", "\ue00c"


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self.http, self.session = http, session

    def send(self, method: str, path: str, **body: Any) -> Any:
        """Send a command and return its value."""
        answer = self.http.request(method, f"/session/{self.session}{path}", json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.is_success, f"{path}: {value['error']}: {value['message']}"
        return value

    def open(self, url: str) -> None:
        """Open a page."""
        self.send("POST", "/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """Run JavaScript and return what it returns."""
        return self.send("POST", "/execute/sync", script=script, args=args)

    def wait(self, condition: Callable[[], Any], seconds: float = 10.0) -> Any:
        """Wait until a condition holds, and return its value."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"did not happen within {seconds} s; the page says:\n{self.text('body')}"
            time.sleep(0.02)
        return value

    def element(self, selector: str) -> str:
        """Return the path of the first element that a selector matches."""
        found = self.send("POST", "/element", using="css selector", value=selector)
        return f"/element/{found[ELEMENT]}"

    def click(self, selector: str) -> None:
        """Click an element, which must be visible."""
        self.send("POST", self.element(selector) + "/click")

    def type(self, selector: str, text: str) -> None:
        """Focus an element and press keys."""
        self.send("POST", self.element(selector) + "/value", text=text)

    def press(self, key: str) -> None:
        """Press a key, wherever the focus is."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.send("POST", "/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def text(self, selector: str) -> str:
        """Return an element's visible text."""
        return self.send("GET", self.element(selector) + "/text")

    def value(self, selector: str) -> Any:
        """Return a field's value."""
        return self.run("return document.querySelector(arguments[0]).value", selector)

    def shown(self, selector: str) -> bool:
        """Return whether an element is displayed."""
        return self.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector)

    def complaints(self) -> list[str]:
        """Return what the page has written to the console since the last call, violations of its policy included."""
        return [entry["message"] for entry in self.send("POST", "/se/log", type="browser")]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Run a browser with a new profile in a folder until the block ends."""
    assert CHROMIUM, "chromium"
    assert DRIVER, "chromedriver"
    options = {"binary": CHROMIUM, "args": [*ARGUMENTS, f"--user-data-dir={folder}"]}
    wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert driver.stdout is not None
        started = next(line for line in driver.stdout if "started successfully on port" in line)
        port = int(started.rsplit("port", 1)[1].strip(" .\n"))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            session = answer.json()["value"]["sessionId"]
            try:
                yield Browser(http, session)
            finally:
                http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait()
