"""The page of `medusa serve` in a headless Chromium, mostly against scripted answers."""

import contextlib
import io
import json
import re
import shlex

import pytest
from browser import ENTER, ESCAPE
from fake_server import PAGE, Reply
from page_fixtures import STEPS, TEXT, ask, contents, figures, open_page, serve_replies, start_window  # noqa: F401

EXAMPLE = "Write a class Job with name: str and priority: int that is sorted by priority."


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


def test_figures(page, serve):
    serve({"go": Reply(STEPS, delay=0.03)})
    ask(page, "go")
    found = figures(page)
    assert found["tokens"] == 12  # with the end token
    assert found["step"] == pytest.approx(11 / 5, abs=0.01)  # the prefill is no step
    assert 20 < found["second"] <= 12 / (5 * 0.03)
    assert 30 <= found["wait"] < 1000


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


def test_texts_that_differ(page, serve):
    server = serve({"go": Reply(STEPS, plain=["def", " mean"])})
    page.click("#both")
    page.click("[value=typical]")
    page.type("#temperature", "0.5")
    page.type("#seed", "7")
    ask(page, "go")
    said = page.text(".verdict")
    assert said.endswith("The texts differ from character 5 on: typical acceptance is lossy. Both used seed 7.")
    assert all(request["acceptance"] == "typical" for request in server.requests)


def test_settings(page, serve):
    server = serve({"go": Reply(STEPS, finish="length")})
    ask(page, "go")
    message = {"role": "user", "content": "go"}
    assert server.requests == [{"model": "scripted", "messages": [message], "stream": True}]
    assert "maximum number of tokens" in page.text(".note")
    page.click("#new")
    for name, value in {"temperature": "0.7", "max_tokens": "50", "seed": "3", "system": "Be brief."}.items():
        page.type(f"#{name}", value)
    ask(page, "go")
    messages = [{"role": "system", "content": "Be brief."}, message]
    chosen = {"temperature": 0.7, "max_tokens": 50, "seed": 3}
    assert server.requests[1] == {"model": "scripted", "messages": messages, "stream": True, **chosen}
    page.run("document.querySelector('#temperature').value = '3'; document.querySelector('#settings').open = false")
    page.type("#message", "go" + ENTER)
    page.wait(lambda: page.shown("#temperature"))
    assert len(server.requests) == 2


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


def test_a_server_that_is_gone(page, serve):
    server = serve({})
    server.http.shutdown()
    server.http.server_close()
    ask(page, "hello")
    assert contents(page, ".error") == ["The server does not answer. Is it still running?"]
    assert page.value("#message") == "hello"


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


def test_no_key_field_without_need(page, serve):
    serve({})
    assert not page.shown("#keyed")


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


def test_examples_of_the_demo_model(page, serve):
    server = serve({EXAMPLE: Reply(STEPS)}, model="demo")
    page.click("#examples button")
    page.wait(lambda: page.shown("#send") and contents(page, ".text") == [TEXT])
    ask(page, EXAMPLE)
    assert [len(request["messages"]) for request in server.requests] == [1, 1]  # it knows single requests only
    assert "mono" in page.run("return getComputedStyle(document.querySelector('.text')).fontFamily")
    serve({})
    assert EXAMPLE not in contents(page, "#examples button")


def test_questions_for_any_other_model(page, serve):
    server = serve({})
    questions = contents(page, "#examples button")
    server.replies = dict.fromkeys(questions, Reply(STEPS))
    assert len(questions) >= 3
    page.click("#examples button:last-child")
    page.wait(lambda: page.shown("#send") and contents(page, ".text") == [TEXT])
    assert [message["content"] for message in server.requests[0]["messages"]] == [questions[-1]]


@pytest.mark.parametrize(
    ("decoding", "acceptance", "name"),
    [
        ("medusa", "typical", "Medusa, typical acceptance"),
        ("plain", "lossless", "Plain decoding, as the server does"),
    ],
)
def test_a_comparison_names_what_runs(page, serve, decoding, acceptance, name):
    serve({"go": Reply(STEPS)}, decoding=decoding)
    page.click("#both")
    page.click(f"[value={acceptance}]")
    ask(page, "go")
    assert contents(page, ".answer h3") == ["Plain decoding", name]
    assert ("Medusa" in page.text(".verdict")) == (decoding == "medusa")


def test_a_question_stays_in_sight(page, serve):
    serve({"go": Reply([["line\n\n"]] * 60)})
    page.click("#both")
    ask(page, "go")
    page.wait(lambda: contents(page, ".verdict"))
    seen = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.top, box.bottom]"
    (top, bottom), (upper, lower) = page.run(seen, ".asked"), page.run(seen, "#log")
    assert page.run("return document.querySelector('#log').scrollTop") > 500
    assert upper <= top < bottom <= lower


MARKDOWN = """\
## A *title*
So **very `x*y` good**, 2 * 3 * 4 and
**open
```python
  x = a*b*c  # **not** bold
```
1. one `code`
   more
2. two
   - inner
- other

3) three
~~~
``` <b>unclosed"""
BLOCKS = [
    ["h5", "A title\n", {"em": ["title"]}],
    ["p", "So very x*y good, 2 * 3 * 4 and\n**open\n", {"strong": ["very x*y good"], "strong code": ["x*y"]}],
    ["pre", "  x = a*b*c  # **not** bold\n", {}],
    [
        "div", "one code\n   more\ntwo\ninner\nother\n",
        {"code": ["code"], "ol > li": ["one code\n   more\n", "two\ninner\n"], "ol ul > li": ["inner\n"],
         "ul > li": ["inner\n", "other\n"]},
    ],
    ["div", "three\n", {"ol > li": ["three\n"]}],
    ["pre", "``` <b>unclosed", {}],
]  # fmt: skip
READ = """return [...document.querySelectorAll('.text > *')].map((block, place) => [block.localName, block.textContent,
  Object.fromEntries(arguments[0][place].map((name) => [name, [...block.querySelectorAll(name)].map((it) =>
    it.textContent)]))])"""


@pytest.mark.parametrize("size", [1, 2, 7, 300])
def test_markdown_is_shown_while_it_arrives(page, serve, size):
    pieces = [MARKDOWN[place : place + size] for place in range(0, len(MARKDOWN), size)]
    serve({"go": Reply([["", piece] for piece in pieces])})
    ask(page, "go")
    names = ["em", "strong", "code", "strong code", "ol > li", "ol ul > li", "ul > li"]
    found = page.run(READ, [names] * len(BLOCKS))
    assert [[kind, text, {name: some for name, some in inner.items() if some}] for kind, text, inner in found] == [
        [kind, text, {"code": inner["strong code"]} | inner if "strong code" in inner else inner]
        for kind, text, inner in BLOCKS
    ]
    assert page.run("return [...document.querySelectorAll('.text li')].map((it) => it.value)") == [1, 2, 0, 0, 3]
    assert page.run("return [...document.querySelectorAll('.text .step')].every((it) => /a|b/.test(it.className))")
    assert page.run("return getComputedStyle(document.querySelector('.text pre')).fontFamily").count("mono")


def test_code_for_the_current_settings(page, serve):
    server = serve({'it\'s "so"': Reply(STEPS)})
    page.type("#seed", "3")
    page.click("[value=typical]")
    page.click("#code summary")
    page.type("#message", 'it\'s "so"')
    command = shlex.split(page.text("#curl").replace("\\\n", ""))
    program = page.text("#python")
    page.press(ENTER)
    page.wait(lambda: server.requests)
    assert command[:3] == ["curl", "-N", f"{server.url}v1/chat/completions"]
    assert json.loads(command[command.index("-d") + 1]) == server.requests[0]
    compile(program, "page", "exec")
    assert 'extra_body={"acceptance": "typical"}' in program
    page.click("[data-copies=python]")
    page.wait(lambda: contents(page, "[data-copies=python]") != ["Copy"])


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
