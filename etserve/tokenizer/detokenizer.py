"""Tokens to text as they come: only text that later tokens cannot change."""

import codecs
from collections.abc import Sequence

from etserve.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """What all `push` and the final `flush` return is `tokenizer.decode` of all the tokens, however they were split.

    A code point comes out whole. `at_start` as in Tokenizer.decode: False for text that goes on after a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, at_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._drops_space = at_start and tokenizer.drops_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain, often empty."""
        return self._decode(b"".join(self._tokenizer.bytes_of(token_ids, self._skip_special_tokens)), final=False)

    def flush(self) -> str:
        """End of the output: a code point that was never finished becomes U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text
