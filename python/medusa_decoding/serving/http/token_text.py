"""The bytes of single tokens, which may be parts of a character."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Looks up the bytes that a token adds to a text, also if they are only a part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = b"" if backend is None or backend.decoder is None else backend.decoder.__getstate__()
        self._alphabet = _byte_alphabet() if b'"ByteLevel"' in decoder else None
        self._added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}

    def __call__(self, token: int) -> bytes:
        """Return a token's bytes; an id beyond the tokenizer's vocabulary, as some models have, has none."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._alphabet is not None and all(letter in self._alphabet for letter in piece):
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


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each letter that byte-level tokenizers write bytes with (as in GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
