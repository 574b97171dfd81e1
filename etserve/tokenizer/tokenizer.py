"""A model's tokenizer: ids, exact bytes and chat prompts. The tokenizers library encodes, decoding goes by bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from etserve.errors import RequestError
from etserve.tokenizer.bytes import Spelling
from etserve.tokenizer.chat import ChatTemplate

Message = Mapping[str, Any]


class Tokenizer:
    """Safe to share between threads. Ids that the vocabulary lacks (a padded embedding has them) stand for no bytes."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: Spelling,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = spelling
        self._chat_template = chat_template
        self._tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        added = backend.get_added_tokens_decoder()
        self._bytes = {token_id: token.content.encode("utf-8") for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids  # of the tokenizer's own files; the model's may name more
        self.vocab_size = max(self._tokens, default=-1) + 1  # one past the highest id

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def drops_first_space(self) -> bool:
        return self._spelling.drops_first_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens spelled out in the text become their ids; a BOS already there is not doubled.

        Raises RequestError for text that is no Unicode (a lone surrogate).
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError):
            raise RequestError("The text contains a lone surrogate.", param="prompt") from None
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, at_start: bool = True) -> str:
        """The text of the tokens; bytes that are not UTF-8 become U+FFFD.

        `at_start` is False for tokens that go on after others: a SentencePiece space in front then stays.
        """
        text = b"".join(self.bytes_of(token_ids, skip_special_tokens)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if at_start and self.drops_first_space else text

    def bytes_of(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> list[bytes]:
        """One entry per token; empty for a skipped one."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        return [b"" if token_id in skipped else self.token_bytes(token_id) for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly what the token adds to the text, special tokens by their spelling."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokens.get(token_id)
            known = b"" if token is None else self._spelling.to_bytes(token)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, for people; a part of a code point shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: object) -> str:
        """The prompt text. Raises RequestError with the template's own message, or when the model has no template."""
        if self._chat_template is None:
            raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
        return self._chat_template.render(messages, add_generation_prompt, **options)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: object
    ) -> list[int]:
        """The prompt's ids. The template writes every special token itself, so none is added here."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **options), add_special_tokens=False)
