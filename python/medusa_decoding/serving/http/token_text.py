"""The bytes of single tokens, which may be parts of a character."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Looks up the bytes that a token adds to a text, also if they are only a part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
        letters = bytes_to_unicode() if b'"ByteLevel"' in decoder else {}
        self._alphabet = {letter: byte for byte, letter in letters.items()}
        self._added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}

    def __call__(self, token: int) -> bytes:
        """Return a token's bytes; an id beyond the tokenizer's vocabulary, as some models have, has none."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._alphabet and all(letter in self._alphabet for letter in piece):
            return bytes(self._alphabet[letter] for letter in piece)
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

    def places(self, tokens: Sequence[int], text: str) -> list[int]:
        """Return where each token of a text begins in it; what the tokens have before the text begins at 0."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ends = list(itertools.accumulate(len(decoder.decode(self(token))) for token in tokens))
        before = max(0, ends[-1] - len(text))  # a start token, or a space that the decoder removes
        return [min(max(0, end - before), len(text)) for end in (0, *ends[:-1])]

    def text(self, token: int) -> str:
        """Return a token's text; if it is only a part of a character, `bytes:` and their escapes, as OpenAI does."""
        found = self(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
