"""The routes. Each is short: read, check, admit, answer."""

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from etserve import __version__
from etserve.engine.admission import check_length
from etserve.errors import PromptTooLongError, RequestError
from etserve.metrics.recorder import CONTENT_TYPE
from etserve.outputs import GenerateRequest
from etserve.runner.grammar import validate_grammar
from etserve.sampling_params import SamplingParams
from etserve.server import live, static_page
from etserve.server.auth import cache_salt
from etserve.server.chat import ChatReply
from etserve.server.completions import CompletionReply
from etserve.server.edge import RequestContext
from etserve.server.generation import Generation
from etserve.server.params import chat_params, completion_params, protects, with_protected
from etserve.server.parsing import read_request
from etserve.server.record import GenerationRecord
from etserve.server.replies import ReplyFacts
from etserve.server.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from etserve.server.state import LoadedModel, ServerState
from etserve.server.streaming import EventStream, Reply, WholeReply

MAX_TOTAL_CHOICES = 128  # prompts times n of one request
MAX_SCORES = 1 << 20  # log-probabilities of echoed prompts in one reply, which is held in memory
router = APIRouter(redirect_slashes=False)
ROUTERS = (router, live.router, static_page.router)


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.etserve
    return state


def _context(request: Request) -> RequestContext:
    context: RequestContext = request.scope["etserve"]
    return context


def _model_for(request: Request, name: str | None) -> LoadedModel:
    model = _state(request).ready_model()
    if name is not None and name != model.info.model_name:
        raise RequestError("The model does not exist.", param="model", code="model_not_found")
    return model


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    body = await read_request(request, CompletionRequest)
    model = _model_for(request, body.model)
    params = completion_params(body, model.info)
    prompts = await model.encoder.prompts(body.prompt)
    if len(prompts) * params.n > MAX_TOTAL_CHOICES:
        raise RequestError(f"`n`: at most {MAX_TOTAL_CHOICES} choices over all prompts.", param="n")
    if params.prompt_logprobs is not None:
        _check_scores(prompts, params.n, params.prompt_logprobs)
    facts = _facts(model, "cmpl", prompts, params, body)
    echo = _echoed_texts(model, body.prompt, prompts) if body.echo else None
    try:
        return await _answer(request, body, facts, CompletionReply(facts, echo))
    except PromptTooLongError as error:
        error.param = "prompt"  # which this route calls what the chat's calls messages
        raise


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    body = await read_request(request, ChatCompletionRequest)
    model = _model_for(request, body.model)
    params = chat_params(body, model.info)
    prompt = await model.encoder.chat(body.messages)
    if protects(params, model.info):
        check_length(len(prompt), params, model.info)  # before the prompt is rendered again, several times
        params = with_protected(params, await model.encoder.system_spans(body.messages, prompt))
    facts = _facts(model, "chatcmpl", [prompt], params, body)
    return await _answer(request, body, facts, ChatReply(facts))


def _check_scores(prompts: list[list[int]], num_choices: int, num_top: int) -> None:
    if sum(map(len, prompts)) * num_choices * (1 + num_top) > MAX_SCORES:
        raise RequestError(
            f"`logprobs`: at most {MAX_SCORES} log-probabilities of prompts fit into one reply.", param="logprobs"
        )


def _echoed_texts(model: LoadedModel, prompt: Any, ids: list[list[int]]) -> list[str]:
    """A prompt's own text, or what its ids spell."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], str):
        return list(prompt)
    return [model.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in ids]


def _facts(
    model: LoadedModel, prefix: str, prompts: list[list[int]], params: SamplingParams, body: SamplingFields
) -> ReplyFacts:
    return ReplyFacts(
        reply_id=f"{prefix}-{uuid.uuid4().hex}",
        model_name=model.info.model_name,
        tokenizer=model.tokenizer,
        prompts=prompts,
        params=params,
        trace=body.entropic.trace if body.entropic else "none",
    )


def _record(facts: ReplyFacts, reply: Reply) -> GenerationRecord:
    return GenerationRecord(
        operation="chat" if isinstance(reply, ChatReply) else "text_completion",
        model_name=facts.model_name,
        reply_id=facts.reply_id,
        params=facts.params,
        num_prompt_tokens=sum(map(len, facts.prompts)),
    )


async def _answer(request: Request, body: SamplingFields, facts: ReplyFacts, reply: Reply) -> Response:
    """Admit the prompts, all or none, and answer as the client asked."""
    state, context = _state(request), _context(request)
    if facts.params.grammar is not None:  # compiling takes a while; the engine then finds the answer remembered
        await asyncio.to_thread(validate_grammar, facts.params.grammar)
    salt = cache_salt(context.key_digest, body.cache_salt)
    requests = [
        GenerateRequest(
            request_id=f"{facts.reply_id}-{index}",
            prompt_token_ids=prompt,
            params=facts.params,
            priority=body.priority or 0,
            cache_salt=salt,
        )
        for index, prompt in enumerate(facts.prompts)
    ]
    if state.rate_limits is not None:
        context.charge = state.rate_limits.charge(context.key_digest, requests, state.ready_model().info.max_model_len)
    record = _record(facts, reply)
    generation = Generation(state.engine, requests, state.metrics, context.arrival_seconds, record)
    context.record = record
    if not body.stream:
        return WholeReply(generation, reply)
    return EventStream(
        generation,
        reply,
        state.metrics,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        comment_seconds=state.config.keep_alive_comment_seconds,
        request_id=context.request_id,
    )


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_describe(_state(request))]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    _model_for(request, model_id)
    return JSONResponse(_describe(_state(request)))


def _describe(state: ServerState) -> dict[str, Any]:
    info = state.ready_model().info
    return {
        "id": info.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "etserve",
        "max_model_len": info.max_model_len,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "architecture": info.architecture,
        "num_parameters": info.num_parameters,
    }


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    body = await read_request(request, TokenizeRequest)
    model = _model_for(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("One of `prompt` and `messages` is required.", param="prompt")
    if body.messages is not None:
        ids = await model.encoder.chat(body.messages, body.add_generation_prompt)
    else:
        ids = await model.encoder.text(body.prompt or "", body.add_special_tokens) if body.prompt else []
    return JSONResponse({"count": len(ids), "max_model_len": model.info.max_model_len, "tokens": ids})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    body = await read_request(request, DetokenizeRequest)
    model = _model_for(request, body.model)
    return JSONResponse({"prompt": await model.encoder.decode(body.tokens)})


@router.get("/health/live")
async def is_live() -> Response:
    return JSONResponse({"status": "live"})


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    reason = _state(request).readiness()
    if reason is None:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": reason}, status_code=503, headers={"retry-after": "1"})


@router.get("/health")
async def health(request: Request) -> Response:
    return await ready(request)


@router.get("/version")
async def version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/load")
async def load(request: Request) -> Response:
    current = _state(request).engine.load()
    return JSONResponse(
        {
            "running": current.num_running,
            "waiting": current.num_waiting,
            "waiting_tokens": current.num_waiting_tokens,
            "kv_usage": current.kv_usage_ratio,
            "est_wait_ms": current.estimated_wait_seconds * 1000.0,
            "tau_rate": current.tau_nats_per_second,
        }
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(_state(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE})
