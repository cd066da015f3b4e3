"""The page of `medusa serve` by keyboard, with a screen reader, on narrow screens, in both schemes, without motion."""

import pytest
from browser import ENTER, SHIFT, SPACE, TAB
from fake_server import Reply
from page_fixtures import STEPS, TEXT, ask, contents, open_page, serve_replies, start_window  # noqa: F401

CONTRAST = """
const channels = (colour) => colour.match(/[0-9.]+/g).map(Number);
const light = (colour) => {
  const shares = channels(colour).map((channel) => channel / 255);
  const [r, g, b] = shares.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = document.querySelector(arguments[0]);
let below = found;
while (channels(getComputedStyle(below).backgroundColor)[3] === 0) below = below.parentElement;
const lights = [getComputedStyle(found).color, getComputedStyle(below).backgroundColor].map(light);
return (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
"""


def test_keyboard(page, serve):
    server = serve({"one\ntwo": Reply(STEPS)})
    focused = "return document.activeElement.id || document.activeElement.textContent.trim()"
    assert page.run(focused) == "message"
    page.type("#message", "one")
    page.press(SHIFT + ENTER)
    page.type("#message", "two")
    visited = []
    for _ in range(14):
        page.press(TAB)
        visited.append(page.run(focused))
        assert page.run("return getComputedStyle(document.activeElement).outline").endswith("solid 2px")
        if visited[-1] == "both":
            page.press(SPACE)
        if visited[-1] == "Use it from code":
            page.press(ENTER)
    assert visited == [
        "send", "both", "Use it from code", "Copy", "curl", "Copy", "python", "Settings",
        "temperature", "max_tokens", "seed", "system", "", "colours",
    ]  # fmt: skip
    for _ in visited[1:]:
        page.press(SHIFT + TAB)
    assert page.run(focused) == "send"
    page.press(ENTER)
    page.wait(lambda: contents(page, ".verdict"))
    assert [request["messages"][0]["content"] for request in server.requests] == ["one\ntwo"] * 2
    assert page.run(focused) == "message"


def test_screen_reader(page, serve):
    serve({"go": Reply(STEPS, delay=0.05)})
    assert page.run("return document.querySelector('#announcer').ariaLive") == "polite"
    ask(page, "go", wait=False)
    assert page.text("#announcer") == "The answer is being written."
    page.wait(lambda: page.shown("#send"))
    assert page.run("return document.querySelector('#announcer').textContent").strip() == TEXT
    page.devtools("Accessibility.enable")
    nodes = page.devtools("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "textbox", "spinbutton", "checkbox", "radio", "region"}
    assert not [node for node in nodes if node["role"]["value"] in named and not node.get("name", {}).get("value")]
    assert page.run("return [...document.querySelectorAll('input, textarea')].every((it) => it.labels.length)")


@pytest.mark.parametrize("width", [320, 1280])
def test_width(page, serve, width):
    serve({"go": Reply(STEPS), "long": Reply([["x" * 300]])})
    page.resize(width, 640)
    page.click("#both")
    ask(page, "go")
    ask(page, "long")
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.run("const log = document.querySelector('#log'); return log.scrollWidth <= log.clientWidth")
    left, right = page.run("return [...document.querySelectorAll('.answer')].slice(0, 2).map((it) => it.offsetTop)")
    assert (left == right) == (width > 640)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page, serve, scheme):
    serve({"go": Reply(STEPS), "bad": Reply(status=400, error="no")})
    page.prefer(prefers_color_scheme=scheme)
    ask(page, "go")
    ask(page, "bad")
    page.run("for (const name of ['a', 'b']) document.querySelector('.text').append(element('span', name, 'x'))")
    for selector in [".asked", ".step", ".a", ".b", ".figures", ".hint", ".error", "#send", "#model", "summary"]:
        assert page.run(CONTRAST, selector) >= 4.5, selector
    assert page.run("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")


def test_reduced_motion(page, serve):
    serve({"slow": Reply([["word "]] * 100, delay=0.02)})
    ask(page, "slow", wait=False)
    page.wait(lambda: "word" in contents(page, ".text")[0])
    moves = "return getComputedStyle(document.querySelector('.busy .text > :last-child'), '::after').animationName"
    assert page.run(moves) == "blink"
    page.prefer(prefers_reduced_motion="reduce")
    assert page.run(moves) == "none"
