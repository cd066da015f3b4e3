"""Self-generated data: the model's own tokens turn by turn, independent of batch, heads and interruptions."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import toy
from toy import CHATML, INST, SPACED, THINKING, chat, marked, unmarked
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_decoding import MedusaHeads, MedusaModel, Tree
from medusa_decoding.files.resumable import companion
from medusa_decoding.training.config import GenerationConfig, SourceConfig
from medusa_decoding.training.data.answer_states import AnswerStates
from medusa_decoding.training.data.encoding import ChatEncoder, Example, encode_records, fingerprint
from medusa_decoding.training.data.records import Record, Report, read_records
from medusa_decoding.training.distill import distill
from medusa_decoding.training.distill.distill import Distillation, generate_records
from medusa_decoding.training.distill.record_file import finished

IM_END = toy.SPECIAL.index("<|im_end|>")
GREEDY = GenerationConfig(max_new_tokens=12, temperature=0.0, turns=3, prompt_tokens=4, batch_size=3)
DRAWN = replace(GREEDY, temperature=0.9, top_p=0.95)
CHATS = [
    chat("Hello", "x", "Count to three.", "y", "And?", "z", "Häuser?", "w"),
    chat("How are you?", "x"),
    chat("What is the capital of France?", "x", "And of 東京?", "y", system="You are an assistant."),
    chat("one two three", "x", "four", "y", "five"),
    chat("Hi", "x"),
    chat("naïve", "x", "Hello there", "y"),
    chat("Paris", "x", "Paris", "y"),
]


def records(conversations=CHATS):
    return [Record(tuple(messages), None, f"seeds:{i + 1}") for i, messages in enumerate(conversations)]


def language_model(tokenizer, *, seed=0, context=160, end=IM_END, loud=1.6, layers=1):
    """A random model that often ends its answers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.4,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[end] *= loud
    return model


def heads_of(model):
    heads = MedusaHeads(model.config.hidden_size, model.config.vocab_size, 3)
    with torch.no_grad():
        heads.w2.copy_(model.lm_head.weight.expand_as(heads.w2))
    return heads.eval()


def write_records(model, tokenizer, seeds, settings, path, template="auto", turns="joint", length=None, **options):
    encoder = ChatEncoder(tokenizer, template, turns=turns)
    return generate_records(Distillation(model, encoder, settings, length), seeds, path, **options)


@pytest.fixture
def generate(tmp_path):
    """Run over seeds and return the file's lines; a run with the same name continues the same file."""

    def run(model, tokenizer, seeds, settings=GREEDY, name="out", heads=None, tree=None, feature_layers=(), **options):
        path = tmp_path / f"{name}.jsonl"
        with MedusaModel(model, heads, tree) as medusa:
            medusa.backbone.feature_layers = feature_layers
            run.report = write_records(medusa, tokenizer, seeds, settings, path, **options)
        run.path = path
        return [json.loads(line) for line in path.read_text().splitlines()]

    return run


@pytest.fixture
def chatml():
    return toy.tokenizer("bytes", unmarked(CHATML), eos_token="<|im_end|>")


def transformers_answer(model, ids, budget, ends=(IM_END,)):
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=budget, do_sample=False,
        eos_token_id=list(ends), pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def chatml_conversation(model, tokenizer, messages, turns=3, budget=12):
    """Tokens and learnt spans of one conversation by transformers alone, with the template written by hand."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def asked(message):
        return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"

    head = "".join(asked(message) for message in messages if message["role"] == "system")
    questions = [message for message in messages if message["role"] == "user"][:turns]
    tokens, spans = [], []
    for number, question in enumerate(questions):
        text = asked(question) + "<|im_start|>assistant\n"
        if number:
            tokens = tokens + ids(("" if tokens[-1] == IM_END else "<|im_end|>") + "\n" + text)
        else:
            tokens = ids(head + text)
        answer = transformers_answer(model, tokens, budget)
        spans.append([len(tokens), len(tokens) + len(answer)])
        tokens = tokens + answer
    return tokens, spans


@pytest.mark.parametrize("with_heads", [False, True])
def test_answers_equal_transformers_turn_by_turn(generate, chatml, with_heads):
    model = language_model(chatml)
    expected = [chatml_conversation(model, chatml, messages) for messages in CHATS]
    closed = [tokens[end - 1] == IM_END for tokens, spans in expected for _, end in spans]
    assert any(closed)
    assert not all(closed)
    heads, tree = (heads_of(model), Tree.cartesian([3, 2])) if with_heads else (None, None)
    lines = generate(model, chatml, records(), heads=heads, tree=tree)
    found = {line["seed"]["number"]: (line["input_ids"], line["learnt"]) for line in lines}
    assert [found[number] for number in range(len(CHATS))] == expected
    report = generate.report
    assert (report.records, report.answers, report.cut) == (7, len(closed), closed.count(False))
    assert report.new_tokens == report.tokens == sum(end - start for _, spans in expected for start, end in spans)
    steps = sum(end - start - 1 for _, spans in expected for start, end in spans)
    assert report.steps < steps if with_heads else report.steps == steps
    assert report.tokens_per_step == pytest.approx(steps / report.steps)


@pytest.mark.parametrize(("turns", "layers"), [("joint", ()), ("each", ()), ("joint", (1,))])
def test_saved_states_are_those_that_transformers_computes(generate, chatml, turns, layers):
    model = language_model(chatml, layers=1 + len(layers))
    lines = generate(model, chatml, records(), save_states=True, turns=turns, feature_layers=layers)
    file = companion(generate.path, "states-1" if layers else "states")

    def missing():
        """Compare all states that are there, and return how many are not."""
        saved, count = AnswerStates(file, 32 * (1 + len(layers)), torch.float32), 0
        for line in lines:
            learnt = np.zeros(len(line["input_ids"]), bool)
            for start, end in line["learnt"]:
                learnt[start:end] = True
            found = saved.get(Example(np.array(line["input_ids"], np.int32), learnt, "", False))
            if found is None:
                count += 1
                continue
            states = model.model(torch.tensor([line["input_ids"]]), output_hidden_states=True).hidden_states
            expected = torch.cat([states[-1], *(states[layer] for layer in layers)], -1)[0]
            expected[:-1][~torch.from_numpy(learnt[1:])] = 0.0
            expected[-1] = 0.0
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return count

    with torch.no_grad():
        assert missing() == 0
        with file.open("rb+") as stream:  # as if a kill had left half of the last block
            stream.truncate(file.stat().st_size - 5)
        assert missing() == 1
        generate.path.unlink()
        for what in ("settings", "finished"):
            companion(generate.path, what).unlink()
        assert generate(model, chatml, records(), save_states=True, turns=turns, feature_layers=layers) == lines
        assert missing() == 0


@pytest.mark.parametrize("turns", ["joint", "each"])
def test_answers_of_weight_0_stay_as_they_are(generate, chatml, turns):
    """As if the text of the turns before the model's answer were one turn of the user."""
    model = language_model(chatml)
    kept = {"role": "assistant", "content": "four", "weight": 0}
    seed = [*chat("Hello", "x", "three?"), kept, *chat("And?", "y", "Why?"), kept]
    lines = generate(model, chatml, records([seed]), turns=turns)
    joined = "three?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n<|im_start|>user\nAnd?"
    expected = generate(model, chatml, records([chat("Hello", "x", joined)]), turns=turns, name="joined")
    assert [(line["input_ids"], line["learnt"]) for line in lines] == [
        (line["input_ids"], line["learnt"]) for line in expected
    ]
    assert [turn["content"] for turn in lines[-1]["messages"]][2:5] == ["three?", "four", "And?"]
    assert len(lines[-1]["messages"]) == 6


def test_records_are_read_verbatim_and_only_the_models_tokens_are_learnt(generate, chatml):
    model = language_model(chatml)
    lines = generate(model, chatml, records())
    report = Report()
    found = list(read_records([SourceConfig(str(generate.path))], report))
    assert report.bad.total() == 0
    encoder = ChatEncoder(chatml)
    again = 0
    for record, line in zip(found, lines, strict=True):
        (example,) = encoder.encode(record)
        assert example.ids.tolist() == line["input_ids"]
        positions = [place for start, end in line["learnt"] for place in range(start, end)]
        assert example.learnt.nonzero()[0].tolist() == positions
        questions = [turn["content"] for turn in CHATS[line["seed"]["number"]] if turn["role"] == "user"]
        assert record.prompt == questions[0]
        spelt = "".join(chatml.decode(line["input_ids"][start:end]) for start, end in line["learnt"])
        said = "".join(turn["content"] for turn in line["messages"] if turn["role"] == "assistant")
        assert spelt.replace("<|im_end|>", "") == said.replace("<|im_end|>", "")
        again += chatml(chatml.decode(example.ids), add_special_tokens=False)["input_ids"] != line["input_ids"]
    # The case is not trivial: tokenised again, these would be other sequences.
    assert again > 0


def by_number(lines):
    return {(line["seed"]["number"], line["seed"]["part"]): line for line in lines}


@pytest.mark.parametrize("settings", [GREEDY, DRAWN])
def test_neither_the_batch_nor_the_heads_change_a_record(generate, chatml, settings):
    model = language_model(chatml)
    alone = by_number(generate(model, chatml, records(), replace(settings, batch_size=1), "one"))
    assert by_number(generate(model, chatml, records(), settings, "three")) == alone
    assert by_number(generate(model, chatml, records(), replace(settings, batch_size=8), "eight")) == alone
    with_heads = generate(model, chatml, records(), settings, "heads", heads_of(model), Tree.cartesian([3, 2]))
    assert by_number(with_heads) == alone


def test_sampling_depends_on_the_seed_the_record_index_and_the_turn(generate, chatml):
    model = language_model(chatml)
    same = records([chat("Hello", "x", "And?", "y")] * 4)
    # All tokens are about equally likely, so that equal random numbers would give equal tokens after any prefix.
    settings = replace(DRAWN, temperature=1e6, top_p=1.0)
    lines = generate(model, chatml, same, settings, "a") + generate(model, chatml, same, replace(settings, seed=1), "b")
    answers = [line["input_ids"][start:end][:8] for line in lines for start, end in line["learnt"]]
    for place, one in enumerate(answers):
        for other in answers[:place]:
            assert sum(a == b for a, b in zip(one, other, strict=False)) < 3


def test_answers_end_with_the_templates_end_token_if_the_model_config_has_no_eos(generate, chatml):
    model = language_model(chatml)
    model.generation_config.eos_token_id = None
    expected = chatml_conversation(model, chatml, CHATS[0])
    (line,) = generate(model, chatml, records(CHATS[:1]))
    assert (line["input_ids"], line["learnt"]) == expected
    assert any(line["input_ids"][end - 1] == IM_END for _, end in line["learnt"])


def test_answers_are_sampled_as_the_models_generation_config_says(generate, chatml):
    model = language_model(chatml)
    unset = replace(GREEDY, temperature=None)
    greedy = by_number(generate(model, chatml, records()))
    assert by_number(generate(model, chatml, records(), unset, "without do_sample")) == greedy
    drawn = by_number(generate(model, chatml, records(), DRAWN, "drawn"))
    assert drawn != greedy
    own = model.generation_config
    own.do_sample, own.temperature, own.top_p = True, DRAWN.temperature, DRAWN.top_p
    assert by_number(generate(model, chatml, records(), unset, "own")) == drawn
    # A single token is left to sample from: transformers' greedy answers, from tests of their own.
    assert by_number(generate(model, chatml, records(), replace(unset, top_k=1), "narrow")) == greedy
    assert by_number(generate(model, chatml, records(), replace(unset, min_p=0.999), "likely")) == greedy
    assert by_number(generate(model, chatml, records(), GREEDY, "zero")) == greedy
    words = r"generation.top_k: expected null with greedy answers .*temperature 0\), got 5"
    with pytest.raises(ValueError, match=words):
        generate(model, chatml, records(), replace(GREEDY, top_k=5), "contradiction")


def test_sampled_answers_have_the_models_distribution(generate, chatml):
    model = language_model(chatml)
    settings = replace(DRAWN, max_new_tokens=1, temperature=0.6, top_p=1.0, batch_size=400, turns=1)
    lines = generate(model, chatml, records([chat("Hello", "x")] * 2000), settings)
    prompt = torch.tensor([lines[0]["input_ids"][:-1]])
    expected = torch.softmax(model(prompt).logits[0, -1].double() / 0.6, -1)
    counts = torch.bincount(torch.tensor([line["input_ids"][-1] for line in lines]), minlength=len(expected))
    top = expected > 0.01
    error = (counts / 2000 - expected)[top].abs()
    assert int(top.sum()) > 3
    assert bool((error < 5 * (expected[top] * (1 - expected[top]) / 2000).sqrt()).all())


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("turns", ["joint", "each"])
def test_a_stopped_run_resumes_to_the_same_bytes(generate, chatml, turns):
    model = language_model(chatml)
    generate(model, chatml, records(), DRAWN, "whole", turns=turns)
    whole = generate.path.read_bytes()
    calls = []

    def stop(report):
        calls.append(report.records)
        if report.records > 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        generate(model, chatml, records(), DRAWN, "stopped", turns=turns, progress=stop)
    path = generate.path.with_name("stopped.jsonl")
    written = path.read_bytes()
    assert set(written.splitlines()) < set(whole.splitlines())
    assert 3 < written.count(b"\n") < whole.count(b"\n")
    # Answers end in another order than that of the seeds, in which a finished file is.
    kept = b"".join(written.splitlines(keepends=True)[:-1])
    for unfinished_line in (b"", written[len(kept) : -9], b"\0" * 50):
        path.write_bytes(kept + unfinished_line)
        generate(model, chatml, records(), DRAWN, "stopped", turns=turns, resume=True)
        assert path.read_bytes() == whole
        assert generate.report.before == kept.count(b"\n")
        assert generate.report.records == whole.count(b"\n")


def test_a_finished_run_generates_nothing_more_and_says_so(generate, chatml, monkeypatch):
    model = language_model(chatml)
    generate(model, chatml, records(), asked={"limit": 7})
    path, report = generate.path, generate.report
    assert finished(path, {"limit": 7})["tokens"] == report.tokens
    assert finished(path, {"limit": 8}) is None
    before = path.read_bytes()
    monkeypatch.setattr(distill, "Answers", lambda *args, **settings: pytest.fail("generates"))
    generate(model, chatml, records(), resume=True)
    assert path.read_bytes() == before
    assert (generate.report.records, generate.report.tokens, generate.report.new_tokens) == (7, report.tokens, 0)


def test_more_seeds_are_added_to_a_finished_run(generate, chatml):
    model = language_model(chatml)
    generate(model, chatml, records()[:4])
    few = generate.path.read_bytes()
    more = by_number(generate(model, chatml, records(), resume=True))
    assert generate.path.read_bytes().startswith(few)
    assert generate.report.before == 4
    assert more == by_number(generate(model, chatml, records(), name="whole"))


def test_records_of_other_settings_models_heads_and_seeds_are_not_mixed(generate, chatml):
    model = language_model(chatml)
    generate(model, chatml, records())
    before = generate.path.read_bytes()
    with pytest.raises(
        ValueError, match=r"output: expected no records of an earlier run in .*out.jsonl, got some; continue with"
    ):
        generate(model, chatml, records())
    other = language_model(chatml)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    heads = heads_of(model)
    cases = [
        (model, None, replace(GREEDY, temperature=0.5), {}, r"(decoding|generation.temperature): expected .* got"),
        (other, None, GREEDY, {}, "model: expected [0-9a-f]{16} like the records that are there"),
        (model, heads, GREEDY, {}, "heads: expected None like .* got [0-9a-f]{16}"),
        (model, None, GREEDY, {"turns": "each"}, "turns: expected joint like the records"),
    ]
    for which, with_heads, settings, options, message in cases:
        with pytest.raises(ValueError, match=message):
            generate(which, chatml, records(), settings, heads=with_heads, resume=True, **options)
    with pytest.raises(ValueError, match=r"data.train: expected the seeds that .* in place [0-9]"):
        generate(model, chatml, records()[1:], resume=True)
    generate.path.with_name("out.jsonl.settings").unlink()
    with pytest.raises(ValueError, match=r"out.jsonl.settings, which says what .* was made with, is missing"):
        generate(model, chatml, records(), resume=True)
    assert generate.path.read_bytes() == before


def test_prompts_without_room_for_an_answer_are_skipped_and_end_conversations(generate, chatml):
    model = language_model(chatml, end=0)  # answers that never end
    long = [chat("Hello " * 40, "x"), chat("Hi", "x", "Hello " * 10, "y", "Hello " * 10, "z"), chat("Hi", "x")]
    lines = by_number(generate(model, chatml, records(long), length=50))
    assert dict(generate.report.left_out) == {"its prompt leaves no room within 50 tokens": 1}
    assert generate.report.examples == [("seeds:1", "its prompt leaves no room within 50 tokens")]
    cut_short = lines[1, 1]
    assert cut_short["ended"] == "a further prompt leaves no room within 50 tokens"
    assert 1 <= len(cut_short["learnt"]) < 3
    assert len(cut_short["messages"]) == 2 * len(cut_short["learnt"])
    assert len(cut_short["input_ids"]) == cut_short["learnt"][-1][1] <= 50
    assert lines[2, 1]["ended"] is None
    assert dict(generate.report.ended) == {"a further prompt leaves no room within 50 tokens": 1}


def test_an_answer_is_limited_by_the_room_of_its_record(generate, chatml):
    model = language_model(chatml, end=0)
    settings = replace(GREEDY, max_new_tokens=40, batch_size=4)
    prompts = [chat("Hi", "x"), chat("Hello Hello Hello", "x"), chat("one", "x")]
    for line in generate(model, chatml, records(prompts), settings, length=40):
        ((start, end),) = line["learnt"]
        assert end == len(line["input_ids"]) == 40
        assert line["input_ids"][start:] == transformers_answer(model, line["input_ids"][:start], 40 - start)


@pytest.mark.parametrize("kind", ["bytes", "marks"])
def test_texts_are_continued(generate, kind):
    tokenizer = toy.tokenizer(kind)
    model = language_model(tokenizer, end=tokenizer.eos_token_id)
    texts = ["Hello there. I am fine, thank you.", "Count", "The capital of France"]
    seeds = [Record((), text, f"{i}") for i, text in enumerate(texts)]
    lines = by_number(generate(model, tokenizer, seeds, template="plain"))
    for number, text in enumerate(texts):
        line = lines[number, 1]
        prompt = tokenizer(text)["input_ids"][:4]
        answer = transformers_answer(model, prompt, 12, [tokenizer.eos_token_id])
        assert line["input_ids"] == prompt + answer
        assert line["learnt"] == [[len(prompt), len(prompt) + len(answer)]]
    (first, *_) = read_records([SourceConfig(str(generate.path))], Report())
    (example,) = ChatEncoder(tokenizer, "plain").encode(first)
    assert example.is_text


@pytest.mark.parametrize(
    ("template", "kind"),
    [(CHATML, "bytes"), (INST, "marks"), (SPACED, "bytes"), ("vicuna", "marks"), ("plain", "marks")],
)
def test_templates_that_keep_answers_continue_after_them(generate, template, kind):
    """The tokens that the template adds are those it has around any answer; the answers are the model's."""
    own = template not in ("vicuna", "plain")
    end = "<|im_end|>" if template == CHATML else "</s>"
    tokenizer = toy.tokenizer(kind, marked(template) if own else None, eos_token=end)
    model = language_model(tokenizer, end=tokenizer.eos_token_id)
    seeds = records([chat("How are you?", "x", "Count to three.", "y"), chat("Hello", "x", "And?", "y")])
    lines = generate(model, tokenizer, seeds, replace(GREEDY, turns=2), template="auto" if own else template)
    assert [len(line["learnt"]) for line in lines] == [2, 2]
    for line in lines:
        ids, ((first, second), (third, fourth)) = line["input_ids"], line["learnt"]
        assert ids[first:second] == transformers_answer(model, ids[:first], 12, [tokenizer.eos_token_id])
        assert ids[third:fourth] == transformers_answer(model, ids[:third], 12, [tokenizer.eos_token_id])
        questions = [turn["content"] for turn in line["messages"] if turn["role"] == "user"]
        # The same conversation with a word for its first answer, rendered and tokenised as a whole.
        (whole,) = ChatEncoder(tokenizer, "auto" if own else template).encode(
            Record(tuple(chat(questions[0], "fine", questions[1], "fine")), None, "")
        )
        positions = whole.learnt.nonzero()[0].tolist()
        gap = next(i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1)
        between = whole.ids[positions[gap - 1] + 1 : positions[gap]].tolist()
        closing = [] if ids[second - 1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
        prompt = whole.ids[: positions[0]].tolist()
        if template != SPACED:  # the last token of its prompt differs before an answer and at the end
            assert ids[:first] == prompt
            assert ids[second:third] == closing + between
        else:
            assert (
                toy.spelt(tokenizer, ids[second:third]) == "</s>" * bool(closing) + f"Question: {questions[1]} Answer: "
            )


QWEN_LIKE = THINKING.replace(
    "{{- message.content + '<|im_end|>\\n' -}}",
    "{{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' -}}",
)
OPENED = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n'")
LINES = "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}"
LINES += "{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (QWEN_LIKE, "does not keep an earlier answer as it was written"),
        (unmarked(OPENED), "renders earlier turns otherwise once others follow"),
        (LINES, "does not close an earlier answer with a special token"),
    ],
)
def test_templates_that_change_earlier_turns_are_refused_with_the_remedy(generate, template, reason):
    tokenizer = toy.tokenizer("bytes", template, eos_token="<|im_end|>")
    model = language_model(tokenizer)
    with pytest.raises(ValueError, match=rf"template: .*seeds:1 has several user turns.*{reason}; data.turns: each"):
        generate(model, tokenizer, records())
    # One turn is no problem, and neither are prompts that are rendered again.
    generate(model, tokenizer, records(), replace(GREEDY, turns=1), "once")
    lines = generate(model, tokenizer, records(), GREEDY, "anew", turns="each")
    assert max(line["seed"]["parts"] for line in lines) == 3
    for line in lines:
        ((start, end),) = line["learnt"]
        *before, last = line["messages"]
        rendered = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        assert line["input_ids"][:start] == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert line["input_ids"][start:end] == transformers_answer(model, line["input_ids"][:start], 12)
        assert last["role"] == "assistant"


def test_a_conversation_ends_at_a_turn_that_the_template_changes(generate):
    """Templates are checked with two answers; what they do to a real one shows when it is generated."""
    answer = "GENERATION{{- message.content"
    assert answer in CHATML
    template = unmarked(CHATML.replace(answer, "{{- message.content | replace(' a', ' A')"))
    tokenizer = toy.tokenizer("bytes", template, eos_token="<|im_end|>")
    model = language_model(tokenizer)
    lines = generate(model, tokenizer, records())
    reason = "the chat template does not keep an earlier answer as it was written"
    ended = [line for line in lines if line["ended"] == reason]
    assert 0 < len(ended) == generate.report.ended[reason]
    for line in ended:
        assert " a" in line["messages"][-1]["content"]
        assert line["input_ids"] == chatml_conversation(model, tokenizer, line["messages"])[0]


def test_an_answer_that_ends_with_another_token_is_the_last(generate, chatml):
    model = language_model(chatml, end=1, loud=3.0)
    model.generation_config.eos_token_id = [1]  # </s>, where the template has <|im_end|>
    lines = generate(model, chatml, records([chat("Hello", "x", "And?", "y"), *CHATS]))
    reason = "an answer ended with another token than the one the chat template puts there"
    assert 0 < generate.report.ended[reason] < len(lines)
    for line in lines:
        start, end = line["learnt"][-1]
        assert line["input_ids"][start:end] == transformers_answer(model, line["input_ids"][:start], 12, (1, IM_END))
        assert (line["ended"] == reason) == (line["input_ids"][-1] == 1 and len(line["learnt"]) < _turns(line))


def _turns(line):
    seeds = [chat("Hello", "x", "And?", "y"), *CHATS]
    return min(3, sum(turn["role"] == "user" for turn in seeds[line["seed"]["number"]]))


def test_seeds_that_the_template_refuses_are_skipped(generate):
    tokenizer = toy.tokenizer("bytes", unmarked(INST))
    generate(language_model(tokenizer, end=tokenizer.eos_token_id), tokenizer, records())
    assert dict(generate.report.left_out) == {"the chat template refuses it (no system messages here)": 1}
    assert generate.report.records == len(CHATS) - 1


def test_the_models_generation_config_applies(generate, chatml):
    model = language_model(chatml)
    model.generation_config.repetition_penalty = 5.0
    (line,) = generate(model, chatml, records()[4:5])
    ((start, end),) = line["learnt"]
    assert line["input_ids"][start:end] == transformers_answer(model, line["input_ids"][:start], 12)
    model.generation_config.repetition_penalty = None
    assert line["input_ids"][start:end] != transformers_answer(model, line["input_ids"][:start], 12)


# -- records with exact tokens -----------------------------------------------------------------------------------------

EXACT = {
    "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ""}],
    "input_ids": [5, 6, 300, 301, 3],
    "learnt": [[1, 2], [3, 5]],
}


def read_exact(tmp_path, *changes, tokenizer=None):
    own = {"tokenizer": fingerprint(tokenizer or toy.tokenizer())}
    lines = [{name: value for name, value in (EXACT | own | change).items() if value is not ...} for change in changes]
    report = Report()
    return list(read_records([SourceConfig(str(toy.write_lines(tmp_path / "a.jsonl", *lines)))], report)), report


def test_exact_tokens_are_taken_as_they_are(tmp_path):
    tokenizer = toy.tokenizer("bytes", unmarked(CHATML))
    text = {"messages": ..., "text": "ab", "prompt": "a"}
    (chat_record, text_record), report = read_exact(tmp_path, {}, text, tokenizer=tokenizer)
    assert report.bad.total() == 0
    assert chat_record.messages == tuple(EXACT["messages"])
    assert (chat_record.prompt, text_record.prompt, text_record.text) == ("Hello", "a", "ab")
    for turns in ("joint", "each"):
        for record in (chat_record, text_record):
            (example,) = ChatEncoder(tokenizer, turns=turns).encode(record)
            assert example.ids.tolist() == EXACT["input_ids"]
            assert example.ids.dtype.name == "int32"
            assert example.learnt.tolist() == [False, True, False, True, True]
            assert example.is_text == (record is text_record)


def test_tokens_of_another_tokenizer_or_beyond_the_vocabulary_are_refused(tmp_path):
    tokenizer = toy.tokenizer("bytes", unmarked(CHATML))
    size = len(tokenizer)
    found, _ = read_exact(tmp_path, {"input_ids": [5, 6, 7, 8, size - 1]}, {"input_ids": [5, 6, 7, 8, size]})
    report = Report(read=2)
    assert len(list(encode_records(found, ChatEncoder(tokenizer), report))) == 1
    assert report.examples == [
        (f"{tmp_path / 'a.jsonl'}:2", f"a token id is not below {size}, the size of the vocabulary")
    ]
    # A model may have more rows than its tokenizer has tokens.
    assert len(list(encode_records(found, ChatEncoder(tokenizer, vocab_size=size + 1), Report()))) == 2
    other = toy.tokenizer("marks", unmarked(CHATML))
    with pytest.raises(ValueError, match=r"tokenizer: expected the one that .*a.jsonl:1 was written with, fingerprint"):
        list(encode_records(found, ChatEncoder(other), Report()))


def test_seeds_need_no_answers(tmp_path):
    questions = [turn for turn in chat("Hello", "x", "And?") if turn["role"] == "user"]
    path = toy.write_lines(
        tmp_path / "a.jsonl", {"messages": questions}, toy.sharegpt("Hi"), toy.sharegpt("Hi", "x", "Last")
    )
    report = Report()
    found = list(read_records([SourceConfig(str(path))], report, seeds=True))
    assert [[turn["content"] for turn in record.messages] for record in found] == [
        ["Hello", "And?"],
        ["Hi"],
        ["Hi", "x", "Last"],
    ]
    assert report.bad.total() == 0
    without = Report()
    assert len(list(read_records([SourceConfig(str(path))], without))) == 1
    assert without.bad.total() == 2
