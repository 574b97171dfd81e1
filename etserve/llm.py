"""Offline use: a model in this process, prompts in, texts out. No event loop, no server."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from etserve.config import EngineConfig
from etserve.engine.building import build_engine
from etserve.engine.streams import merge
from etserve.errors import ConfigError
from etserve.outputs import GenerateRequest, ModelInfo, SequenceOutput
from etserve.sampling_params import SamplingParams
from etserve.tokenizer.tokenizer import Tokenizer

Prompt = str | list[int]
Progress = Callable[[int, int], None]  # (finished choices, all choices)


@dataclass(frozen=True, slots=True)
class Generation:
    """What one prompt led to."""

    prompt_token_ids: list[int]
    choices: list[SequenceOutput]  # one per choice, whole: every token, the text, the finish reason

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


class LLM:
    """A loaded model. `LLM("demo").generate("Once upon a time")[0].text`"""

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        """`settings` are fields of EngineConfig. Raises ConfigError or ModelError."""
        try:
            config = msgspec.convert({"model": model, **settings}, EngineConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None
        self._engine = build_engine(config)
        self._request_ids = itertools.count()

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[Generation]:
        """Complete all prompts (texts or token ids), batched; results in their order.

        `params`: one for all, or one per prompt; None: 16 tokens at temperature 1. Raises RequestError if a prompt
        cannot be served (none is run then).
        """
        batch = _as_batch(prompts)
        each = _params_for(params, len(batch))
        requests = [self._request(prompt, wanted) for prompt, wanted in zip(batch, each, strict=True)]
        return self._run(requests, progress)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template_options: object
    ) -> Generation:
        """Answer a conversation (dicts with role and content) by the model's chat template.

        `params` None: to the end of the answer at temperature 1.
        """
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template_options)
        return self._run([self._request(prompt, params or SamplingParams())], None)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[SequenceOutput]:
        """Yield what each step adds to the prompt's choices. Closing the iterator early aborts."""
        request = self._request(prompt, params or SamplingParams(max_tokens=16))
        self._engine.add_request(request)
        return self._stream(request)

    def _stream(self, request: GenerateRequest) -> Iterator[SequenceOutput]:
        try:
            while self._engine.has_work:
                yield from self._engine.step()[0]
        finally:
            self._engine.abort(request.request_id)
            while self._engine.has_work:
                self._engine.step()

    def _request(self, prompt: Prompt, params: SamplingParams) -> GenerateRequest:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return GenerateRequest(
            request_id=f"offline-{next(self._request_ids)}", prompt_token_ids=token_ids, params=params
        )

    def _run(self, requests: list[GenerateRequest], progress: Progress | None) -> list[Generation]:
        outputs: dict[str, list[list[SequenceOutput]]] = {
            request.request_id: [[] for _ in range(request.params.n)] for request in requests
        }
        num_open = sum(request.params.n for request in requests)
        num_choices = num_open
        try:
            for request in requests:
                self._engine.add_request(request)
            while num_open:
                for output in self._engine.step()[0]:
                    outputs[output.request_id][output.choice].append(output)
                    num_open -= output.finish_reason is not None
                    if progress is not None and output.finish_reason is not None:
                        progress(num_choices - num_open, num_choices)
        finally:  # also when interrupted: the model stays usable
            for request in requests:
                self._engine.abort(request.request_id)
            while self._engine.has_work:
                self._engine.step()
        return [
            Generation(request.prompt_token_ids, [merge(parts) for parts in outputs[request.request_id]])
            for request in requests
        ]


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text, a list of token ids, or a sequence of either."""
    if isinstance(prompts, str):
        return [prompts]
    token_ids = [item for item in prompts if isinstance(item, int)]
    if token_ids:
        return [token_ids]
    return [item for item in prompts if not isinstance(item, int)]


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams(max_tokens=16)
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts, but {len(params)} sampling parameters")
    return list(params)
