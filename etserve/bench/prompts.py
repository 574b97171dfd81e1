"""Prompts of exact token counts, cut from public-domain text. Knows a tokenizer, no server."""

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Protocol

import numpy as np

from etserve.bench.errors import BenchError

MAX_TRIES = 200
OPENING_TOKENS = 11  # below a KV block, so that two prompts sharing a whole block need two equal draws
_PROBE = " The"


class Encoder(Protocol):
    """The two calls of a tokenizer that are needed here."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Text and the exact ids it encodes to, alone and with a word appended."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What goes into a request, as text or as token ids, and how many prompt tokens a server must count."""

    content: str | list[int]
    num_tokens: int


class PromptMaker:
    """Cuts pieces of the corpus that a tokenizer turns into exactly N tokens; every draw is keyed by `key`.

    `overhead_tokens` is what the server adds around the text (a chat template); None: the tokenizer's special tokens.
    With `send_ids` the ids are what is sent, so the text need not encode back to them.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        overhead_tokens: int | None = None,
        send_ids: bool = False,
        corpus: str | None = None,
    ) -> None:
        self._encoder = encoder
        self._send_ids = send_ids
        self._corpus = corpus if corpus is not None else shipped_corpus()
        self._word_starts = [match.start() for match in re.finditer(r"(?<=[a-z,;] )[a-zA-Z]", self._corpus)]
        plain = encoder.encode("x", False)
        marked = encoder.encode("x", True)
        self._special_ids = marked[: len(marked) - len(plain)]
        self.overhead_tokens = len(self._special_ids) if overhead_tokens is None else overhead_tokens

    def prompt(self, num_tokens: int, key: tuple[int, ...]) -> Prompt:
        """A prompt that a server counts as exactly `num_tokens`, sharing no KV block with one of another key."""
        body = self.body_tokens(num_tokens)
        if body <= 2 * OPENING_TOKENS:
            return self.joined([self.piece(body, key)])
        opening = self.piece(OPENING_TOKENS, (*key, 0))
        return self.joined([opening, self.piece(body - OPENING_TOKENS, (*key, 1), leading_space=True)])

    def body_tokens(self, num_tokens: int) -> int:
        """Tokens of text in a prompt of `num_tokens`. Raises BenchError when there are none."""
        if num_tokens <= self.overhead_tokens:
            raise BenchError(
                f"a prompt of {num_tokens} tokens leaves none for text: {self.overhead_tokens} are added to it"
            )
        return num_tokens - self.overhead_tokens

    def piece(self, num_tokens: int, key: tuple[int, ...], *, leading_space: bool = False) -> Piece:
        """Text of exactly `num_tokens` tokens that starts at a word and stays itself when a word follows.

        Raises BenchError when no such cut is found.
        """
        generator = np.random.default_rng(key)
        for _ in range(MAX_TRIES):
            start = self._word_starts[int(generator.integers(0, len(self._word_starts)))]
            found = self._cut(num_tokens, start, " " if leading_space else "")
            if found is not None:
                return found
        raise BenchError(
            f"no text of exactly {num_tokens} tokens in {MAX_TRIES} tries; use --send-ids or another length"
        )

    def joined(self, pieces: list[Piece]) -> Prompt:
        """The pieces in a row as one prompt. Raises BenchError if the tokenizer counts the whole differently."""
        ids = [token for piece in pieces for token in piece.ids]
        if self._send_ids:
            return Prompt([*self._special_ids, *ids], len(ids) + len(self._special_ids))
        text = "".join(piece.text for piece in pieces)
        counted = len(self._encoder.encode(text, False))
        if counted != len(ids):
            raise BenchError(
                f"the tokenizer merges across words: {counted} tokens, {len(ids)} expected; use --send-ids"
            )
        return Prompt(text, len(ids) + self.overhead_tokens)

    def _cut(self, num_tokens: int, start: int, space: str) -> Piece | None:
        ids: list[int] = []
        length = 4 * num_tokens + 64
        while len(ids) <= num_tokens:
            length *= 2
            ids = self._encoder.encode(space + self._cyclic(start, length), False)
        if self._send_ids:
            return Piece("", ids[:num_tokens])
        text = self._encoder.decode(ids[:num_tokens], False)
        text = text if text.startswith(space) else space + text  # some decoders drop the leading space
        cut = self._encoder.encode(text, False)
        followed = self._encoder.encode(text + _PROBE, False)
        is_stable = followed == cut + self._encoder.encode(_PROBE, False)
        return Piece(text, cut) if len(cut) == num_tokens and is_stable else None

    def _cyclic(self, start: int, length: int) -> str:
        repeated = self._corpus[start : start + length]
        while len(repeated) < length:
            repeated += " " + self._corpus[: length - len(repeated)]
        return repeated[:length]


def shipped_corpus() -> str:
    """The excerpt that comes with the package, as one line: paragraph breaks tokenize differently across tokenizers."""
    text = files("etserve.bench").joinpath("data/emma_excerpt.txt").read_text(encoding="utf-8")
    return " ".join(text.split())
