"""Chat templates that never end, fail, or fill memory: refused in bounded time, from a file and from a tokenizer."""

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import bounded
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from medusa_decoding.chat import rendering
from medusa_decoding.chat.rendering import render
from medusa_decoding.chat.template import ChatTemplate
from medusa_decoding.training.data.encoding import ChatEncoder
from medusa_decoding.training.data.records import BadRecordError, Record

MESSAGES = [{"role": "user", "content": "hi"}]
TWICE = "{% set ns = namespace(s='x') %}{% for i in range(60) %}WRITE{% endfor %}"
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{% for i in range(99999) %}{% for j in range(99999) %}much text in here{% endfor %}{% endfor %}",
    "kept": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}{% endset %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "filters": "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
}
LARGE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "times": "{{ 'x' * 10**10 }}",
    "list": "{{ [0] * 10**9 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "filter": "{{ 'x' | center(10**10) }}",
    "method": "{{ 'x'.center(10**10) }}",
    "round": "{{ 1.5 | round(10**9) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "star": "{{ '%*d' % (10**10, 1) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format method": "{{ '{:9999999999d}'.format(1) }}",
    "format map": "{{ '{a:9999999999d}'.format_map({'a': 1}) }}",
    "format from data": "{{ '{:{}}'.format(1, 10**9) }}",
    "format from text": "{{ '{:>{w}}'.format(1, w='9' * 9) }}",
    "formatted often": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "zeros": "{{ '1'.zfill(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**9) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "json": "{{ [1] | tojson(indent=10**9) }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "replace": "{{ ('x' * 1000000) | replace('x', 'x' * 1000000) }}",
    "map": "{{ [1.5] | map('round', 10**9, 'ceil') | list }}",
    "join": "{{ (['x' * 1000000] * 10000) | join | length }}",
    "join method": "{{ ''.join(['x' * 1000000] * 10000) | length }}",
    "tilde": TWICE.replace("WRITE", "{% set ns.s = ns.s ~ ns.s %}"),
    "plus": TWICE.replace("WRITE", "{% set ns.s = ns.s + ns.s %}"),
    "joined": TWICE.replace("WRITE", "{% set ns.s = [ns.s, ns.s] | join %}"),
    "formatted": TWICE.replace("WRITE", "{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    "kept": TWICE.replace("WRITE", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    "listed": TWICE.replace("'x'", "[1]").replace("WRITE", "{% set ns.s = ns.s + ns.s %}"),
}
FAILING = {
    "syntax": "{% if %}",
    "recursion": "{% macro f(n) %}{{ f(n - 1) }}{% endmacro %}{{ f(3) }}",
    "undefined": "{{ there.is.none }}",
    "refusing": "{{ raise_exception('not these') }}",
    "division": "{{ 1 / 0 }}",
    "types": "{{ 1 + 'x' }}",
    "import": "{% import 'x' as y %}",
    "unsafe": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "surrogate": "{{ '\\ud800' }}",
    "nested": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep list": "{{ " + "[" * 300 + "1" + "]" * 300 + " }}",
    "no such filter": "{{ 1 | none_such }}",
    "lipsum": "{{ lipsum(n=99999) }}",
}
NOT_TEXT = {"number": 5, "list": ["x"], "bytes": b"x", "named without default": {"other": "x"}}


@pytest.fixture
def short(monkeypatch):
    """A twentieth of the time that a template has."""
    monkeypatch.setattr(rendering, "SECONDS", 0.25)


def tokenizer(template=None):
    words = {"hi": 0, "<unk>": 1, "</s>": 2}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        eos_token="</s>",
        chat_template=template,
    )


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(short, name):
    with bounded(ValueError) as said:
        render(ENDLESS[name], MESSAGES)
    assert "renders within 0.25 seconds" in said[0]


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_fills_memory_is_refused(name):
    with bounded(ValueError) as said:
        render(LARGE[name], MESSAGES)
    assert "chat template: expected one that" in said[0]


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_refused(name, tmp_path):
    with bounded(ValueError, jinja2.TemplateError) as said:
        render(FAILING[name], MESSAGES)
    assert said
    for given_by in ("tokenizer", "file"):
        (tmp_path / "template.jinja").write_text(FAILING[name])
        with bounded(ValueError) as said:
            if given_by == "file":
                ChatTemplate(tokenizer(), str(tmp_path / "template.jinja"))
            else:
                ChatTemplate(tokenizer(FAILING[name]))
        assert "chat template: expected" in said[0]
    with bounded(ValueError, BadRecordError) as said:
        ChatEncoder(tokenizer(FAILING[name])).prompt(MESSAGES)
    assert said


@pytest.mark.parametrize("name", NOT_TEXT)
def test_a_template_that_is_no_text_is_refused(name):
    owner = tokenizer()
    owner.chat_template = NOT_TEXT[name]
    with bounded(ValueError) as said:
        ChatTemplate(owner)
    assert said


def test_training_stops_at_a_template_without_end(short):
    encoder = ChatEncoder(tokenizer(ENDLESS["loops"]))
    record = Record((*MESSAGES, {"role": "assistant", "content": "hi"}), None, "data:1")
    with bounded(ValueError) as said:
        encoder.encode(record)
    assert "renders within" in said[0]


@pytest.mark.parametrize("content", ["/dev/zero", b"\xff\xfe", b"{{ 1 }}" * 2**22])
def test_a_template_file_is_read_within_bounds(content, tmp_path):
    path = tmp_path / "template.jinja"
    if isinstance(content, bytes):
        path.write_bytes(content)
    with bounded(ValueError) as said:
        ChatTemplate(tokenizer(), content if isinstance(content, str) else str(path))
    assert said[0].startswith("template: ")


PIECES = [
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m['role'] * 9 }}", "{% if m %}", "{% endif %}",
    "{% set x = messages %}", "{{ x | tojson }}", "{{ x[0] ~ x }}", "{{ loop.index }}", "{% generation %}",
    "{% endgeneration %}", "{% break %}", "{{ -x }}", "{{ eos_token }}", "{{ x.pop() }}", "text", "{%", "}}", "{#",
    "{% macro f(a) %}", "{% endmacro %}", "{{ f(f) }}", "{{ 7 // 0 }}", "{{ x is mapping }}", "{{ dict(a=1) | items }}",
]  # fmt: skip


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_template_renders_text_or_is_refused(template):
    with bounded(ValueError, jinja2.TemplateError):
        text, spans = render(template, MESSAGES, eos_token="</s>")
        assert all(0 <= start <= end <= len(text) for start, end in spans)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content | trim }}\n{% endfor %}{{ eos_token }}",
        "{%- for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ '%s' % m.content + 'x' }}{% endfor %}",
        "{% macro say(m) %}<{{ m.content.replace('a', 'b') }}>{% endmacro %}{{ say(messages[1]) }}{{ 2 ** 3 % 5 }}",
        "{{ messages | tojson(indent=2) }}{{ messages | map(attribute='role') | join(',') }}",
        "{% set x %}a{{ 1 * 2 }}{% endset %}{{ x }}{% if add_generation_prompt %}go{% endif %}{{ tools }}",
        "{% macro say(n) %}{{ n }}{% endmacro %}{{ say(2**40) }}{{ '%s %d' | format(-250000, 2**40) }}"
        "{% set ns = namespace(n=2**40) %}{{ ns.n }}{{ [{'a': 2**40}] | selectattr('a', '==', 2**40) | list | tojson }}"
        "{{ [2**40] | map('default', 2**40) | join }}{{ dict(a=2**40) }}"
        "{{ x | default(2**40) }}{{ 'id 20260101: {:>{}}'.format(2**40, 14) }}",
        "{{ messages[0].get('x') }}{{ '{:>5}'.format(3) }}{{ messages[9] }}{% generation %}a{% endgeneration %}",
    ],
)
def test_text_is_that_of_transformers(template):
    messages = [{"role": "user", "content": " a\u20ac"}, {"role": "assistant", "content": "banana"}]
    owner = tokenizer(template)
    expected = owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text, _ = render(template, messages, add_generation_prompt=True, **owner.special_tokens_map)
    assert text == expected
