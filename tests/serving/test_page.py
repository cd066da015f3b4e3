"""The page of `medusa serve` in a headless Chromium, mostly against scripted answers."""

import contextlib
import io
import re

import pytest
from browser import ENTER, ESCAPE
from fake_server import PAGE, Reply
from page_fixtures import STEPS, TEXT, ask, contents, figures, open_page, serve_replies, start_window  # noqa: F401


def test_every_step_has_a_colour(page, serve):
    serve({"go": Reply(STEPS)})
    ask(page, "go")
    assert contents(page, ".text") == [TEXT]
    runs = page.run("return [...document.querySelectorAll('.text .step')].map((it) => [it.textContent, it.className])")
    assert [text for text, _ in runs] == ["def", " total(prices", "):\n", "return sum(p", " * p for p in prices)"]
    assert [name.removeprefix("step").strip() for _, name in runs] == ["", "a", "", "b", "a"]
    titles = page.run("return [...document.querySelectorAll('.text .step')].map((it) => it.title)")
    assert titles[:2] == ["Step 0: 1 token, 0 drafted", "Step 1: 3 tokens, 2 drafted"]
    background = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
    assert page.run(background, "#legend .a") == page.run(background, ".text .a") != page.run(background, ".text .b")
    assert page.run(background, ".text .step:not(.a, .b)") == "rgba(0, 0, 0, 0)"  # nothing was accepted
    page.click("#colours")
    assert page.run(background, ".text .a") == "rgba(0, 0, 0, 0)"


def test_compare_with_plain_decoding(page, serve):
    server = serve({"go": Reply(STEPS, delay=0.03)})
    page.click("#both")
    ask(page, "go", wait=False)
    assert "Starts after the plain answer." in contents(page, ".figures")
    page.wait(lambda: page.shown("#send"))
    plain, medusa = server.requests
    assert plain.pop("tree") == "plain"
    assert plain == medusa
    assert isinstance(medusa["seed"], int)
    assert contents(page, ".answer h3") == ["Plain decoding", "Medusa"]
    assert contents(page, ".text") == [TEXT, TEXT]
    assert figures(page, 0)["step"] == 1
    said = page.text(".verdict")
    ratio = re.match(r"([\d.]+)\S the tokens per second with Medusa\. The texts are identical\.$", said)
    assert float(ratio[1]) > 1.2


@pytest.mark.parametrize("way", ["button", "escape", "new chat"])
def test_stop(page, serve, way):
    server = serve({"slow": Reply([["word "]] * 200, delay=0.02), "next": Reply(STEPS)})
    ask(page, "slow", wait=False)
    page.wait(lambda: "word" in contents(page, ".text")[0])
    if way == "escape":
        page.press(ESCAPE)
    else:
        page.click("#stop" if way == "button" else "#new")
    page.wait(server.left.is_set)
    page.wait(lambda: page.shown("#send"))
    assert page.value("#message") == ""
    assert contents(page, ".note") == ([] if way == "new chat" else ["Stopped."])
    ask(page, "next")
    roles = [message["role"] for message in server.requests[-1]["messages"]]
    assert roles == (["user"] if way == "new chat" else ["user", "assistant", "user"])


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(status=400, error="max_tokens: expected at most 9, got 10"), "max_tokens: expected at most 9, got 10"),
        (Reply(STEPS, error="the server is shutting down"), "the server is shutting down"),
        (Reply(STEPS, closes=True), "The connection ended before the answer did."),
    ],
)
def test_errors_keep_the_message(page, serve, reply, message):
    server = serve({"bad": reply, "good": Reply(STEPS)})
    ask(page, "bad")
    assert contents(page, ".error") == [message]
    assert page.text("#announcer") == f"Error: {message}"
    assert page.value("#message") == "bad"
    page.run("document.querySelector('#message').value = ''")
    ask(page, "good")
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "good"}]


def test_key(page, serve):
    server = serve({"go": Reply(STEPS)}, key="secret")
    assert page.run("return document.activeElement.id") == "key"
    page.type("#message", "go" + ENTER)
    page.wait(lambda: contents(page, ".error"))
    assert page.value("#message") == "go"
    assert "$MEDUSA_API_KEY" in page.run("return document.querySelector('#curl').textContent")
    page.type("#key", "secret" + ENTER)  # also sends the message
    page.wait(lambda: contents(page, ".text")[-1] == TEXT)
    assert not page.shown("#keyed")
    assert [request["model"] for request in server.requests] == ["scripted"]
    assert "secret" not in "".join(contents(page, "pre"))


@pytest.mark.parametrize("place", ["answer", "error", "model"])
def test_text_is_never_html(page, serve, place):
    attack = '<img src=x onerror="document.title=\'broken\'"><script>document.title="broken"</script>'
    reply = Reply(status=400, error=attack) if place == "error" else Reply([["<img"], [attack, attack]])
    serve({attack: reply}, model=attack if place == "model" else "scripted")
    ask(page, attack)
    assert page.run("return document.querySelectorAll('img, .turn script').length") == 0
    assert page.run("return document.title") == "Medusa"
    assert attack in page.text(".turn")


def test_conversation(page, serve):
    server = serve({"first": Reply(STEPS), "second": Reply(STEPS)})
    ask(page, "first")
    ask(page, "second")
    assert [message["content"] for message in server.requests[1]["messages"]] == ["first", TEXT, "second"]
    page.click("#new")
    assert page.shown("#intro")
    ask(page, "second")
    assert len(server.requests[2]["messages"]) == 1


def test_the_page_asks_no_other_server():
    assert not re.search(r"https?://|url\(|@import|innerHTML|insertAdjacentHTML", re.sub("//.*", "", PAGE.read_text()))


@pytest.mark.slow
def test_demo_model(page, server):
    page.open(server.url)
    page.wait(lambda: page.shown("#examples button"))
    page.click("#both")
    page.click("#examples button")
    page.wait(lambda: contents(page, ".verdict"), 60)
    assert "The texts are identical." in page.text(".verdict")
    plain, medusa = contents(page, ".text")
    assert plain == medusa
    assert medusa.startswith("class Job:\n    def __init__(self, name: str, priority: int):\n")
    assert figures(page, 0)["step"] == 1
    assert figures(page, 1)["step"] > 1.5
    assert page.run("return document.querySelectorAll('.answer:last-child .a, .answer:last-child .b').length") > 5
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(page.run("return document.querySelector('#python').textContent"), {})
    assert printed.getvalue().strip() == medusa.strip()
