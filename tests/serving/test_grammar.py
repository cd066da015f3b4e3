"""JSON mode and JSON schemas: valid texts from a model that knows no JSON, and schemas that must not harm a server."""

import copy
import json
import math
import threading
import time

import pytest
import torch
from transformers import AutoTokenizer

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.serving import grammar
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.grammar import CallForm, Grammars, ToolSchema
from medusa_decoding.serving.penalties import penalty_processors

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

NAME = {"type": "string", "maxLength": 12}
PERSON = {
    "type": "object",
    "properties": {
        "name": NAME,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "déf"]}, "minItems": 1, "maxItems": 3},
        "married": {"type": "boolean"},
        "spouse": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/name"}]},
    },
    "required": ["name", "age", "tags", "spouse"],
    "additionalProperties": False,
    "$defs": {"name": NAME},
}
SCHEMAS = {
    "person": PERSON,
    "one of several": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, "n": value}, "required": ["kind", "n"],
             "additionalProperties": False}
            for kind, value in (("text", NAME), ("flag", {"type": "boolean"}))
        ]
    },
    "pattern": {"type": "string", "pattern": "^[A-C]{2,4}-[0-9]{3}$"},
    "list": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 4, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"enum": [1, 2.5, None, [], {"c": "d"}]}},
                             "required": ["b"], "additionalProperties": False}},
        "required": ["a"], "additionalProperties": False,
    },
    "date": {"type": "string", "format": "date"},
}  # fmt: skip
TREES = {"plain": Tree([]), "chain": Tree.chain(3), "siblings": Tree.cartesian([3, 2]), "auto": "auto"}
END = 0


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT / "base")


@pytest.fixture(scope="module")
def demo():
    return MedusaModel.from_pretrained(CHECKPOINT / "heads", CHECKPOINT / "base", dtype=torch.float32)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 1024, [END])


def allowed(processor, text, vocab=1024):
    """The tokens that may follow a text."""
    scores = processor(torch.tensor([text]), torch.zeros(1, vocab))
    return set(torch.nonzero(scores[0] > -math.inf)[:, 0].tolist())


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 0}], ids=str)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_satisfies_its_schema_and_trees_write_the_same(name, sampling, demo, tokenizer, grammars):
    prompt = torch.tensor([ids_of(tokenizer, "Write a class Dog with name and age.")])
    make = grammars.json(SCHEMAS[name])
    texts = {}
    for tree, shape in TREES.items():
        output = demo.generate(
            prompt, max_new_tokens=400, tree=shape, logits_processor=[make()], eos_token_id=END, **sampling
        )
        texts[tree] = output.sequences[0, prompt.shape[1] :].tolist()
    assert all(text == texts["plain"] for text in texts.values())
    assert texts["plain"][-1] == END, "the model ended within its budget"
    value = json.loads(tokenizer.decode(texts["plain"], skip_special_tokens=True))
    assert jsonschema_rs.is_valid(SCHEMAS[name], value, validate_formats=True)


@pytest.mark.parametrize("seed", range(4))
def test_json_mode_writes_an_object(seed, demo, tokenizer, grammars):
    prompt = torch.tensor([ids_of(tokenizer, "{")])
    # At a high temperature: a model that knows no JSON may otherwise fill its budget with one string.
    make, settings = grammars.json(), {"do_sample": True, "seed": seed, "temperature": 3.0}
    one, other = (
        demo.generate(prompt, max_new_tokens=900, tree=tree, logits_processor=[make()], eos_token_id=END, **settings)
        for tree in (Tree([]), Tree.chain(4))
    )
    assert one.sequences.equal(other.sequences)
    text = one.sequences[0, 1:].tolist()
    assert text[-1] == END
    assert isinstance(json.loads(tokenizer.decode(text, skip_special_tokens=True)), dict)


def test_rows_of_an_engine_have_grammars_of_their_own(demo, tokenizer, grammars):
    """Each answer is the one that `generate` writes, next to rows with other grammars, penalties and none."""
    prompt = ids_of(tokenizer, "Write a class Dog with name and age.")

    def makes(schema):
        make = grammars.json(schema)
        return lambda: [make()]

    makers = [*map(makes, SCHEMAS.values())]
    makers += [None, lambda: [*penalty_processors(len(prompt), 1.0, 0.5, {}), grammars.json(PERSON)()]]
    settings = {"max_new_tokens": 200, "do_sample": True, "temperature": 0.8, "seed": 5}
    expected = [
        demo.generate(
            torch.tensor([prompt]), tree=Tree([]), eos_token_id=END,
            logits_processor=[] if make is None else make(), **settings,
        ).sequences[0, len(prompt) :].tolist()
        for make in makers
    ]  # fmt: skip
    texts, ended = [[] for _ in makers], threading.Semaphore(0)
    with Engine(demo, slots=len(makers), context=300) as engine:
        for text, make in zip(texts, makers, strict=True):

            def deliver(_, delta, text=text):
                text.extend(delta.tokens)
                if delta.finish is not None:
                    ended.release()

            engine.submit(prompt, deliver, make_processors=make, tree=Tree.cartesian([2, 2]), **settings)
        assert all(ended.acquire(timeout=60) for _ in makers)
    assert texts == expected


def test_a_text_may_grow_by_several_tokens(tokenizer, grammars):
    make, prompt = grammars.json(PERSON), ids_of(tokenizer, "anything {")
    new = ids_of(tokenizer, '{"name":"Bo","age":33,"tags":["a"],"spouse":null}')
    one_by_one, at_once = make(), make()
    steps = [allowed(one_by_one, prompt + new[:length]) for length in range(len(new) + 1)]
    assert all(token in step for token, step in zip(new, steps, strict=False))
    assert allowed(at_once, prompt) == steps[0]
    assert allowed(at_once, prompt + new[:5]) == steps[5]
    assert allowed(at_once, prompt + new) == steps[-1] == {END}


def test_end_tokens_are_allowed_exactly_where_the_text_may_end(tokenizer):
    processor = Grammars(tokenizer, 1024, [END, 2]).json({"type": "integer"})()
    text = [5]
    assert not {END, 2} & allowed(processor, text)
    (minus,), (four,) = ids_of(tokenizer, "-"), ids_of(tokenizer, "4")
    assert not {END, 2} & allowed(processor, [*text, minus])
    after = allowed(processor, [*text, minus, four])
    assert {END, 2} < after, "more digits may follow, or the end"
    assert 1 not in after, "another special token is not part of JSON"


@pytest.mark.parametrize("rows", [1500, 1000])
def test_vocabularies_of_another_size_than_the_tokenizer(rows, tokenizer):
    processor = Grammars(tokenizer, rows, [END]).json()()
    got = allowed(processor, [5], rows)
    assert got
    assert max(got) < min(rows, len(tokenizer))


def test_white_space_is_bounded(tokenizer, grammars):
    processor, (blank,) = grammars.json()(), ids_of(tokenizer, " ")
    text = [5, *ids_of(tokenizer, "{")]
    allowed(processor, text[:1])
    assert blank in allowed(processor, text)
    with pytest.raises(ValueError, match=r"^grammar: expected an allowed token at new token 52, got"):
        allowed(processor, text + [blank] * 51)


def test_a_text_that_leaves_the_grammar_is_an_error(tokenizer, grammars):
    processor = grammars.json()()
    allowed(processor, [5, 6])
    (bracket,) = ids_of(tokenizer, "[")
    with pytest.raises(ValueError, match=f"^grammar: expected an allowed token at new token 1, got {bracket}$"):
        allowed(processor, [5, 6, bracket])
    with pytest.raises(ValueError, match=r"^grammar: expected a text of at least 2 tokens, got 1; use a new one$"):
        allowed(grammars_used := grammars.json()(), [5, 6]), allowed(grammars_used, [5])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "banana"}, "Invalid type: banana"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "#"}, ""),
        ({"$ref": "file:///etc/passwd"}, "Default retriever does not fetch resources"),
        ({"enum": ["\ud800"]}, "hex escape"),
        ({"minimum": math.nan}, "a schema of JSON values"),
        ({"default": {1, 2}}, "a schema of JSON values"),
        (True, "an object, got True"),
    ],
)
def test_bad_and_unsupported_schemas_are_named(schema, words, grammars):
    with pytest.raises(ValueError, match=f"^json_schema: expected .*{words}"):
        grammars.json(schema)


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling(levels):
    """Definitions that each use the one before twice: 2 to the power of `levels` if written out."""
    defs = {"0": {"type": "string", "pattern": "(.*a){3}b"}}
    for level in range(1, levels + 1):
        defs[str(level)] = {"allOf": [{"$ref": f"#/$defs/{level - 1}"}] * 2 + [{"pattern": f".*{level}"}]}
    return {"$defs": defs, "$ref": f"#/$defs/{levels}"}


HOSTILE = {
    "nested beyond Python's stack": nested(100_000),
    "doubling": doubling(30),
    "large enum": {"enum": [f"value {number}" for number in range(100_000)]},
    "many intersections": {"allOf": [{"type": "string", "pattern": f".*a{number}.*"} for number in range(1500)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_schemas_that_are_too_large_are_refused_in_time(name, grammars, monkeypatch):
    monkeypatch.setattr(grammar, "TRIAL_SECONDS", 1)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^json_schema: expected .{20,}, got.{6,}") as raised:
        grammars.json(HOSTILE[name])
    assert len(str(raised.value)) < 400
    assert time.monotonic() - start < 6


ADD = ToolSchema("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FREE = ToolSchema("say.it", {"type": "object"})
BARE = '{"name": "add", "parameters": {"a": 1}}'
CALL = f"<tool_call>\n{BARE}\n</tool_call>".replace("parameters", "arguments")
SAY = '<tool_call>{"name": "say.it", "arguments": {"b": [1]}}</tool_call>'


def ends(processor, tokenizer, text, vocab=1024):
    """Whether a text may be written, and may end there."""
    written = [5]
    for token in ids_of(tokenizer, text):
        if token not in allowed(processor, written, vocab):
            return False
        written.append(token)
    return END in allowed(processor, written, vocab)


@pytest.fixture(scope="module", params=[(), ("<tool_call>", "</tool_call>", "<think>")], ids=["text", "tokens"])
def calling(request, tokenizer):
    """A tokenizer that may have tokens for the tags, and grammars of each kind."""
    own = copy.deepcopy(tokenizer)
    own.add_tokens(list(request.param))
    grammars, tools = Grammars(own, 1100, [END]), [ADD, FREE]
    return own, {
        "many": grammars.calls(tools),
        "one": grammars.calls(tools, several=False),
        "tagged": grammars.calls(tools, form=CallForm(True, "arguments")),
        "bare": grammars.calls(tools, form=CallForm(False, "parameters")),
        "answer": grammars.calls(tools, form=CallForm(True, "arguments"), answer=ADD.schema),
    }


@pytest.mark.parametrize(
    ("text", "allowed_by"),
    [
        ("", "many one"),
        ('Not {"name": "add", "parameters": {}}, nor <tool_cat>.', "many one"),
        ('{"name": "Ada"}', "many one"),
        ("<think>Add?</think> Yes: " + CALL, "many one"),
        ('{"a":1}', "many one answer"),
        (CALL, "many one tagged answer"),
        (SAY, "many one tagged answer"),
        (f"{CALL}\n{SAY}", "many tagged answer"),
        (CALL + '{"a":1}', "many"),
        (f"{CALL} Done.", "many"),
        (f"So {CALL} and {SAY}.", "many"),
        (CALL.replace('"a"', '"b"'), ""),
        (f"{SAY} {CALL}".replace('"a": 1', '"a": null'), ""),
        (CALL.replace("1", '1, "b": 2'), ""),
        (CALL.replace("add", "sub"), ""),
        ("<tool_call>no JSON</tool_call>", ""),
        (BARE, "many one bare"),
        (f"{BARE}; {BARE}", "many bare"),
        (BARE.replace('"a"', '"b"'), ""),
        (f"{BARE}; {BARE}".replace("1}}; ", "1}}; x"), ""),
    ],
)
def test_calls_obey_their_schemas_in_any_text(calling, text, allowed_by):
    tokenizer, makers = calling
    assert [name for name, make in makers.items() if ends(make(), tokenizer, text, 1100)] == allowed_by.split()


def test_a_tool_whose_schema_is_not_supported_is_named(grammars):
    unsupported = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(ValueError, match=r"^json_schema: of second, expected .*uniqueItems"):
        grammars.calls([ADD, ToolSchema("second", unsupported)])
    assert grammars.calls([ADD, ToolSchema("second", unsupported, lenient=True)])


def test_a_lenient_tool_ignores_patterns_that_are_not_supported(grammars, tokenizer):
    decimal = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
    code = {"type": "string", "pattern": "^[a-c]{2}$"}
    schema = {"type": "object", "properties": {"pattern": decimal, "code": code}, "required": ["pattern", "code"]}
    with pytest.raises(ValueError, match="look-around"):
        grammars.calls([ToolSchema("pay", schema)])
    make = grammars.calls([ToolSchema("pay", schema, lenient=True)], form=CallForm(False, "arguments"))
    for value, obeyed in (("ab", True), ("xy", False)):
        call = f'{{"name": "pay", "arguments": {{"pattern": "1.5", "code": "{value}"}}}}'
        assert ends(make(), tokenizer, call) is obeyed


A, B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
OPEN_A = {**A, "additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (A, ['{"a":1}', "{}"], ['{"b":1}', '{"a":1,"b":1}']),
        (OPEN_A, ['{"a":1,"b":1}'], ['{"a":null}']),
        ({"type": "object"}, ['{"b":1}'], []),
        ({"properties": {"x": {"type": "array", "items": A}}}, ['{"x":[{"a":1}]}'], ['{"x":[{"b":1}]}']),
        ({"allOf": [A, B]}, ['{"a":1,"b":1}', '{"a":1,"c":1}'], ['{"a":1,"b":null}']),
        ({"properties": {"x": A, "y": {"allOf": [A, B]}}}, ['{"x":{"b":1},"y":{"a":1,"b":1}}'], []),
        ({"anyOf": [A, {"type": "null"}]}, ['{"a":1}', "null"], ['{"b":1}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"c":1}']),
        ({**A, "anyOf": [B, {"properties": {"c": {}}}]}, ['{"a":1,"b":1}'], []),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}]}, ['{"a":1}'], ['{"b":1}']),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, ['{"a":1,"b":1}'], []),
        (
            {"$defs": {"A": {"properties": {"a": {"$ref": "#/$defs/A"}}}}, "$ref": "#/$defs/A"},
            ['{"a":{"a":{}}}'],
            ['{"a":{"b":{}}}'],
        ),
        ({**A, "required": ["z"]}, ['{"a":1,"z":1}'], []),
        ({**A, "patternProperties": {"^x": {}}}, ['{"a":1,"x1":1}'], ['{"b":1}']),
        ({"const": A}, [json.dumps(A)], []),
        ({"properties": {"properties": {"type": "integer"}}}, ['{"properties":1}'], ['{"b":1}']),
    ],
    ids=str,
)
def test_objects_with_properties_admit_no_others_unless_they_say_so(schema, valid, invalid, tokenizer, grammars):
    make = grammars.json(schema)
    assert all(jsonschema_rs.is_valid(schema, json.loads(text)) for text in valid)
    assert [text for text in [*valid, *invalid] if ends(make(), tokenizer, text)] == valid


def test_a_client_cannot_set_the_librarys_options(tokenizer, grammars):
    make = grammars.json({"type": "object", "x-guidance": {"whitespace_pattern": "(", "item_separator": ";"}})
    processor, text = make(), ids_of(tokenizer, '{"a":1, "b":2}')
    allowed(processor, [5])
    assert allowed(processor, [5, *text]) == {END}
