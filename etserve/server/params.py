"""From a checked schema to SamplingParams: the bounds that need the model, and OpenAI's defaults."""

import json
from typing import Final, TypeVar

import msgspec

from etserve.errors import RequestError
from etserve.outputs import ModelInfo
from etserve.sampling_params import EntropicParams, Grammar, SamplingParams
from etserve.server.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    EntropicOptions,
    ResponseFormat,
    SamplingFields,
)
from etserve.server.strict_json import depth_of

MAX_SCHEMA_BYTES: Final = 64 * 1024
MAX_SCHEMA_DEPTH: Final = 32
COMPLETION_MAX_TOKENS: Final = 16  # OpenAI's default of the older route
_POSITIVE_63_BITS: Final = (1 << 63) - 1
Number = TypeVar("Number", int, float)


def completion_params(body: CompletionRequest, model: ModelInfo) -> SamplingParams:
    """Sampling of POST /v1/completions. Raises RequestError."""
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise _refusal("max_tokens", "0 scores the prompt, which takes echo=true")
    if body.entropic and body.entropic.kv_protect:
        raise _refusal("entropic.kv_protect", "it takes messages, whose roles say what to protect")
    return _params(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def chat_params(body: ChatCompletionRequest, model: ModelInfo) -> SamplingParams:
    """Sampling of POST /v1/chat/completions. Raises RequestError."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise _refusal("max_completion_tokens", "it contradicts max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise _refusal("top_logprobs", "it takes logprobs=true")
    return _params(
        body,
        model,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )


def _params(
    body: SamplingFields, model: ModelInfo, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    _check_common(body, max_tokens)
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, min(_or(body.top_k, 0), model.vocab_size)),
        min_p=_or(body.min_p, 0.0),
        n=_or(body.n, 1),
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=_token_ids(body.stop_token_ids or [], "stop_token_ids", model.vocab_size),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        seed=None if body.seed is None else body.seed & _POSITIVE_63_BITS,
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, model.vocab_size),
        logprobs=None if logprobs is None else min(logprobs, model.vocab_size),
        prompt_logprobs=prompt_logprobs,
        grammar=_grammar(body.response_format),
        trace=body.entropic.trace if body.entropic and body.entropic.trace == "tokens" else "summary",
        entropic=_entropic(body.entropic),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _entropic(wanted: EntropicOptions | None) -> EntropicParams:
    if wanted is None:
        return EntropicParams()
    return EntropicParams(
        temperature_mode=wanted.temperature_mode,
        target_entropy_nats=wanted.target_entropy_nats,
        pruning=wanted.pruning,
        epsilon=wanted.epsilon,
        kv_protect=wanted.kv_protect,
        eviction=wanted.eviction,
        block_budget=wanted.block_budget,
        verify=wanted.verify,
        speculation=wanted.speculation,
    )


def protects(params: SamplingParams, model: ModelInfo) -> bool:
    """Whether some tokens of a chat prompt are to be read in every step where others may be skipped or evicted."""
    wanted = params.entropic
    skips = (wanted.pruning or model.pruning) == "on"
    evicts = (wanted.eviction or model.eviction) != "off"
    return (skips or evicts) and (model.kv_protect if wanted.kv_protect is None else wanted.kv_protect)


def with_protected(params: SamplingParams, spans: list[tuple[int, int]]) -> SamplingParams:
    """The same, with the protected spans of its prompt."""
    return msgspec.structs.replace(
        params, entropic=msgspec.structs.replace(params.entropic, protected_spans=tuple(spans))
    )


def _check_common(body: SamplingFields, max_tokens: int | None) -> None:
    if body.store:
        raise _refusal("store", "this server stores nothing", code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise _refusal("stream_options", "it takes stream=true")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise _refusal("min_tokens", "it is larger than max_tokens")


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _token_ids(ids: list[int], param: str, vocab_size: int) -> tuple[int, ...]:
    if any(token_id >= vocab_size for token_id in ids):
        raise _refusal(param, f"token ids go from 0 to {vocab_size - 1}")
    return tuple(ids)


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    _token_ids([int(token) for token in bias], "logit_bias", vocab_size)
    return {int(token): value for token, value in bias.items()}


def _grammar(wanted: ResponseFormat | None) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(kind="json_object")
    if wanted.json_schema is None:
        raise _refusal("response_format.json_schema", "it is required for this type")
    schema = wanted.json_schema.schema_
    text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise _refusal("response_format.json_schema.schema", f"it is larger than {MAX_SCHEMA_BYTES} bytes")
    if depth_of(schema) > MAX_SCHEMA_DEPTH:
        raise _refusal("response_format.json_schema.schema", f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    return Grammar(kind="json_schema", schema=text)


def _refusal(param: str, problem: str, code: str = "invalid_value") -> RequestError:
    return RequestError(f"`{param}`: {problem}.", param=param, code=code)
