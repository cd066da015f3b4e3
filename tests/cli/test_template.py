"""A chat's prompt: which tokens are reused from the previous turn, what ends an answer, and how it is printed."""

import contextlib
import io

import pytest
import torch
from chats import PAIRS, chat_tokenizer
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_decoding.chat.streaming import AnswerStreamer, AnswerText
from medusa_decoding.chat.template import ChatTemplate, splice

MERGING = chat_tokenizer(PAIRS)


def bytes_tokenizer(metaspace):
    """A tokenizer whose characters may be several tokens: plain bytes, or byte fallback as in sentencepiece."""
    if metaspace:
        words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "bc", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        merges = [("a", "b"), ("\u2581", "a"), ("b", "c")]
        vocab = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "bc", "\u0120a", "\u00e2\u0124", "<s>"]
        merges = [("a", "b"), ("b", "c"), ("\u0120", "a"), ("\u00e2", "\u0124")]
        vocab = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


TOKENIZERS = {
    "pairs": (MERGING, "aeinorst"),
    "bytes": (bytes_tokenizer(False), "abc \u20ac"),
    "sentencepiece": (bytes_tokenizer(True), "abc \u20ac"),
}


def common(one, other):
    """Length of the common prefix."""
    return max(n for n in range(min(len(one), len(other)) + 1) if one[:n] == other[:n])


def best(tokenizer, known, fresh):
    """The expected result of `splice`, by brute force: the longest reusable prefix that gives the same text."""

    def text(tokens):
        return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    same = common(known, fresh)
    for end in range(len(known), same, -1):
        for place in range(same + 1, len(fresh) + 1):
            if same and text(known[:end]) == text(fresh[:place]) and text(known[:end] + fresh[place:]) == text(fresh):
                return end
    return same


@st.composite
def turns(draw):
    """A tokenizer, a prompt with the answer that the model wrote, and the next prompt."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer, letters = TOKENIZERS[name]
    text = st.text(letters, max_size=8)
    question, answer, following = draw(text), draw(text), draw(text)
    bos = tokenizer.bos_token or "<|start|>"
    prompt = tokenizer(bos + question, add_special_tokens=False)["input_ids"]
    pieces = {token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens}
    written = [tokenizer.convert_tokens_to_ids(piece) for piece in divided(draw, tokenizer, answer, pieces)]
    known = prompt + written
    said = tokenizer.decode(known, clean_up_tokenization_spaces=False).removeprefix(bos)
    kept = said[: draw(st.integers(0, len(said)))] if draw(st.booleans()) else said
    fresh = tokenizer(bos + kept + following, add_special_tokens=False)["input_ids"]
    return tokenizer, known, fresh


def divided(draw, tokenizer, text, pieces):
    """Encode a text in any possible way; bytes are used for what has no token."""
    inner = tokenizer.backend_tokenizer
    if isinstance(inner.model, models.BPE) and inner.model.byte_fallback:
        chars = text.replace(" ", "\u2581")
    else:
        chars = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))
    found = []
    while chars:
        fitting = sorted(piece for piece in pieces if chars.startswith(piece))
        if fitting:
            found.append(draw(st.sampled_from(fitting)))
            chars = chars[len(found[-1]) :]
        else:
            found += [f"<0x{byte:02X}>" for byte in chars[0].encode()]
            chars = chars[1:]
    return found


@given(turns())
@settings(max_examples=200, deadline=None)
def test_as_many_tokens_as_possible_are_reused_and_the_text_is_unchanged(turn):
    tokenizer, known, fresh = turn
    prompt = splice(tokenizer, known, fresh)
    assert tokenizer.decode(prompt) == tokenizer.decode(fresh)
    end = best(tokenizer, known, fresh)
    event(f"gained: {end > common(known, fresh)}")
    assert prompt[:end] == known[:end]


class Spelling:
    """A tokenizer of given pieces of bytes."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, **kwargs):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def test_parts_of_characters_are_not_confused():
    """Two bytes of a character and its first byte alone are both decoded to one mark, but are not the same."""
    tokenizer = Spelling(b"?", b"a", b"b", b"ab", b"\xe2\x82", b"\xac", b"\xe2", b"\x82\xacc")
    known, fresh = [0, 1, 2, 4, 5], [0, 3, 6, 7]
    assert tokenizer.decode(known[:4]) == tokenizer.decode(fresh[:3]) == "?ab\ufffd"
    assert splice(tokenizer, known, fresh) == [0, 1, 2, 6, 7]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}", "<|end|>"),
        ("{% for m in messages %}{{ m['content'] }}<|text|>{% endfor %}", "<|text|>"),
        ("{% for m in messages %}{{ m['content'] | trim }}<|end|>\n{% endfor %}", "<|end|>"),
        ("{% for m in messages %}{{ m['content'] }}<|end|><|text|>{% endfor %}", "<|end|>"),
        # After a space: does the space belong to the end marker or to the answer?
        ("{% for m in messages %}{{ m['content'] }} <|end|>{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", None),
        ("{% for m in messages %}<|start|>{{ m['content'] }}{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }}<|end|>{{ m['content'] }}{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] | upper }}<|end|>{% endfor %}", None),
        ("{{ messages[0]['content'] }}{% if messages | length > 1 %}{{ raise_exception('one!') }}{% endif %}", None),
    ],
)
def test_the_end_of_a_turn_is_found_in_the_template_or_unknown(template, end):
    tokenizer = chat_tokenizer([], template)
    found = ChatTemplate(tokenizer)
    assert found.end_of_turn == (end and tokenizer.convert_tokens_to_ids(end))
    eos = [3, 5]
    assert found.ends(eos) == (eos if end is None else [*eos, found.end_of_turn])
    assert found.ends([0, found.end_of_turn or 1]) == [0, found.end_of_turn or 1]


@given(st.text("ab \n", max_size=30), st.none() | st.text("ab\n", min_size=1, max_size=3))
@example("a\nba", "\nba")
@example("aa\nb", "\nba")
@settings(max_examples=200, deadline=None)
def test_printed_text_ends_before_the_end_marker(text, stop):
    tokenizer = chat_tokenizer([])
    printed = io.StringIO()
    streamer = AnswerStreamer(tokenizer, stop)
    with contextlib.redirect_stdout(printed):
        for ids in ([], tokenizer(text)["input_ids"]):  # the prompt comes first
            streamer.put(torch.tensor(ids))
        streamer.end()
    assert printed.getvalue() == (text if stop is None else text.partition(stop)[0]) + "\n"


def test_text_is_not_held_back_longer_than_needed(capsys):
    tokenizer = chat_tokenizer([])
    streamer = AnswerStreamer(tokenizer, "\nUser:")
    streamer.put(torch.tensor([]))
    for chunk, shown in (("a b\n", "a b"), ("Us", ""), ("ed to", "\nUsed to"), ("\nUser", ""), (": c", "")):
        streamer.put(torch.tensor(tokenizer(chunk)["input_ids"]))
        assert capsys.readouterr().out == shown


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_pieces_of_an_answer_make_up_its_text(name, data):
    tokenizer, letters = TOKENIZERS[name]
    text = data.draw(st.text(letters, max_size=12))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.bos_token_id is not None:  # special tokens anywhere are not shown
        for place in data.draw(st.lists(st.integers(0, len(tokens)), max_size=2)):
            tokens.insert(place, tokenizer.bos_token_id)
    whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    answer = AnswerText(tokenizer)
    pieces = [answer.add(token) for token in tokens] + [answer.end()]
    assert "".join(pieces) == whole
    event(f"special tokens: {tokenizer.bos_token_id in tokens}")


@given(st.text("abc \u20ac", max_size=8), st.lists(st.integers(0, 255), max_size=6))
@settings(max_examples=200, deadline=None)
def test_characters_are_shown_when_their_last_byte_is_there(text, more):
    tokenizer, _ = TOKENIZERS["bytes"]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] + more  # which are mostly no UTF-8
    answer, shown = AnswerText(tokenizer), ""
    for count, token in enumerate(tokens, 1):
        shown += answer.add(token)
        assert shown == tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False).rstrip("\ufffd")
    assert shown + answer.end() == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def test_bytes_that_never_become_a_character_are_shown_at_last():
    tokenizer, _ = TOKENIZERS["bytes"]
    answer = AnswerText(tokenizer)
    shown = "".join(answer.add(0x80) for _ in range(100))  # of which all would be decoded again with each token
    assert len(shown) > 80
    assert shown + answer.end() == "\ufffd" * 100
