"""The page of `medusa serve` in a browser that a module's tests share, and what they do with it."""

import contextlib

import pytest
from browser import ENTER, MISSING, chromium
from fake_server import fake_server

STEPS = [["def"], [" total", "(", "prices"], ["):\n"], ["    return", " sum(", "p"], [" * p", " for p in prices", ")"]]
TEXT = "def total(prices):\n    return sum(p * p for p in prices)"


@pytest.fixture(name="window", scope="module")
def start_window(tmp_path_factory):
    if MISSING:
        pytest.skip(f"needs {' and '.join(MISSING)}")
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(name="page")
def open_page(window):
    """The browser as every test finds it; afterwards, the page must have kept to its policy and raised no error."""
    window.complaints()
    yield window
    faults = [entry for entry in window.complaints() if "Failed to load resource" not in entry]
    assert not faults


@pytest.fixture(name="serve")
def serve_replies(page):
    """Start a scripted server and open its page."""
    with contextlib.ExitStack() as servers:

        def start(replies, key=None, model="scripted", **described):
            server = servers.enter_context(fake_server(replies, {"id": model, **described}, key))
            page.open(server.url)
            page.wait(lambda: page.text("#model") == model or page.shown("#keyed"))
            return server

        yield start
        page.open("about:blank")  # so that nothing is asked of a server that is gone


def ask(page, text, wait=True):
    turns = page.run("return document.querySelectorAll('.turn').length")
    page.type("#message", text + ENTER)
    page.wait(lambda: page.run("return document.querySelectorAll('.turn').length") > turns)
    if wait:
        page.wait(lambda: page.shown("#send"))


def contents(page, selector):
    return page.run("return [...document.querySelectorAll(arguments[0])].map((it) => it.textContent)", selector)


def figures(page, place=0):
    found = contents(page, ".figures")[place].split()
    return {"step": float(found[0]), "second": float(found[4]), "wait": float(found[8]), "tokens": int(found[-2])}
