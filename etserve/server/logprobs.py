"""Log-probabilities in OpenAI's two shapes. Values are raw log-softmax; token bytes are exact."""

import codecs
from typing import Any

from etserve.outputs import TokenLogprobs
from etserve.tokenizer.tokenizer import Tokenizer

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot spell


def chat_logprobs(entries: list[TokenLogprobs], num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Shape of chat completions: content[] of token, logprob, bytes, top_logprobs."""
    return {"content": [_chat_entry(entry, num_top, tokenizer) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    top = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    return {
        **_chat_token(entry.token_id, entry.logprob, tokenizer),
        "top_logprobs": [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in top],
    }


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, FLOOR),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """Shape of the older route; one per choice, since text offsets go on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def shape(
        self,
        token_ids: list[int],
        entries: "list[TokenLogprobs] | list[TokenLogprobs | None]",
        *,
        is_prompt: bool = False,
    ) -> dict[str, list[Any]]:
        """Shape the next tokens; an entry is None where there is no logprob (the first token of a prompt)."""
        shaped: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            is_text = is_prompt or token_id not in self._skipped
            raw = self._tokenizer.token_bytes(token_id) if is_text else b""
            if raw and not 0x80 <= raw[0] < 0xC0:  # it goes on with no code point: one left open before is U+FFFD
                self._offset += len(self._decoder.decode(b"", True))
            shaped["tokens"].append(self._spell(token_id))
            shaped["token_logprobs"].append(None if entry is None else max(entry.logprob, FLOOR))
            shaped["top_logprobs"].append(None if entry is None else self._top(entry))
            shaped["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(raw))
        return shaped

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._spell(entry.token_id): max(entry.logprob, FLOOR)}
        for token_id, logprob in zip(entry.top_ids[: self._num_top], entry.top_logprobs, strict=False):
            top.setdefault(self._spell(token_id), max(logprob, FLOOR))
        return top

    def _spell(self, token_id: int) -> str:
        """A token as text; one that is no whole UTF-8 as OpenAI spells it, so that no two tokens share a name."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
