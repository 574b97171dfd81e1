"""Prompts to token ids. Long texts and chat templates go to a few threads, so that no stream waits for them."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from etserve.errors import OverloadedError, PromptTooLongError, RequestError
from etserve.server.schemas import MAX_PROMPTS, Message
from etserve.tokenizer.tokenizer import Tokenizer

INLINE_CHARACTERS = 2_000  # a text as short as this is encoded at once: a hop to a thread would take longer
MAX_PENDING = 256  # jobs waiting for a thread; beyond that the server sheds load
MAX_SYSTEM_SPANS = 8  # of one prompt: finding one takes rendering the conversation up to it, twice

T = TypeVar("T")


class PromptEncoder:
    """Turn what clients send into token ids, none of which lies outside the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="etserve-encode")
        self._num_pending = 0

    def close(self) -> None:
        """Let the threads end; jobs not yet begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prompts(self, prompt: Any) -> list[list[int]]:
        """Encode the `prompt` of a completion: text, texts, ids, or lists of ids. Raises RequestError."""
        if isinstance(prompt, str):
            return [await self.text(prompt)]
        if not isinstance(prompt, list) or not prompt:
            raise _refusal("it is a text, a list of texts, a list of token ids, or a list of such lists")
        if _is_id(prompt[0]):
            return [self._ids(prompt)]
        if len(prompt) > MAX_PROMPTS:
            raise _refusal(f"at most {MAX_PROMPTS} prompts fit into one request")
        if all(isinstance(item, str) for item in prompt):
            return [await self.text(item) for item in prompt]
        if all(isinstance(item, list) for item in prompt):
            return [self._ids(item) for item in prompt]
        raise _refusal("its items are not all of one kind")

    async def text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode one text. Raises RequestError when it holds no token."""
        ids = await self._run(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))
        if not ids:
            raise _refusal("it is empty")
        return ids

    async def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Render the model's chat template and encode it. Raises RequestError with the template's own message."""
        plain = [_plain(message) for message in messages]
        ids = await self._run(None, lambda: self.tokenizer.apply_chat_template(plain, add_generation_prompt))
        if not ids:
            raise RequestError("`messages`: the chat template makes an empty prompt of them.", param="messages")
        return ids

    async def system_spans(self, messages: Sequence[Message], ids: list[int]) -> list[tuple[int, int]]:
        """Return where in `ids`, the prompt made of `messages`, those of the system stand, as [start, end) of tokens.

        The last of MAX_SYSTEM_SPANS goes on to the end of the last system message. A template that does not render the
        beginning of the conversation alone makes the whole prompt the system's.
        """
        plain = [_plain(message) for message in messages]
        if all(message["role"] != "system" for message in plain):
            return []
        return await self._run(None, lambda: self._find_system_spans(plain, ids))

    def _find_system_spans(self, plain: list[dict[str, str]], ids: list[int]) -> list[tuple[int, int]]:
        try:
            return [
                (self._num_common(plain[:first], ids), self._num_common(plain[:end], ids))
                for first, end in _system_runs(plain)
            ]
        except RequestError:
            return [(0, len(ids))]

    def _num_common(self, messages: list[dict[str, str]], ids: list[int]) -> int:
        """How many tokens at the beginning of `ids` these first messages make."""
        if not messages:
            return 0
        beginning = self.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        pairs = zip(beginning, ids, strict=False)
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(beginning), len(ids)))

    async def decode(self, token_ids: list[int]) -> str:
        """Decode ids, special tokens included. Raises RequestError for ids outside the vocabulary."""
        self.check_ids(token_ids, "tokens")
        return await self._run(len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def check_ids(self, ids: list[Any], param: str) -> None:
        """Raise RequestError unless every item is a token id of the model."""
        if not all(type(item) is int and 0 <= item < self._vocab_size for item in ids):
            raise RequestError(
                f"`{param}`: token ids are integers from 0 to {self._vocab_size - 1}.",
                param=param,
                code="invalid_value",
            )

    def _ids(self, ids: list[Any]) -> list[int]:
        if not ids:
            raise _refusal("it is empty")
        if len(ids) > self._max_model_len:
            error = PromptTooLongError(len(ids), self._max_model_len)
            error.param = "prompt"
            raise error
        self.check_ids(ids, "prompt")
        return ids

    async def _run(self, size: int | None, job: Callable[[], T]) -> T:
        """Run `job` here when it is small, else in a thread; a None size is never small."""
        if size is not None and size <= INLINE_CHARACTERS:
            return job()
        if self._num_pending >= MAX_PENDING:
            raise OverloadedError("too many prompts wait to be encoded", 1.0)
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, job)
        finally:
            self._num_pending -= 1


def _plain(message: Message) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    # "developer" is OpenAI's newer word for "system"; models were trained on the older one.
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": text}
    return plain if message.name is None else {**plain, "name": message.name}


def _system_runs(plain: list[dict[str, str]]) -> list[tuple[int, int]]:
    """Where system messages follow each other, as [start, end) of messages; the last one holds all that are left."""
    runs: list[tuple[int, int]] = []
    position = 0
    for role, run in itertools.groupby(plain, key=lambda message: message["role"]):
        first, position = position, position + len(list(run))
        if role == "system" and len(runs) < MAX_SYSTEM_SPANS:
            runs.append((first, position))
        elif role == "system":
            runs[-1] = (runs[-1][0], position)
    return runs


def _is_id(item: Any) -> bool:
    return isinstance(item, int | float) or item is None


def _refusal(problem: str) -> RequestError:
    return RequestError(f"`prompt`: {problem}.", param="prompt", code="invalid_value")
