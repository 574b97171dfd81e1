"""An engine without a model: deterministic bytes of the unit model's byte tokenizer, and knobs for every fault."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etserve.engine.client import EngineHealth, EngineLoad, EngineState
from etserve.errors import EngineUnavailableError, OverloadedError, PromptTooLongError, RequestError
from etserve.outputs import (
    EntropySummary,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    RequestTimings,
    SequenceBlocks,
    SequenceOutput,
    StepStats,
    TokenEntropy,
    TokenLogprobs,
)
from etserve.tokenizer import load_tokenizer
from etserve.tokenizer.tokenizer import Tokenizer

UNIT_MODEL = Path(__file__).parent / "data" / "unit_model"
JSON_TEXT = '{"name": "Ada", "age": 36}'
PHRASE = "the quick brown fox jumps over the lazy dog "
Listener = Callable[[StepStats, list[SequenceOutput]], None]


@dataclass(frozen=True)
class UnitFiles:
    """What load_tokenizer needs to know of the unit model."""

    folder: Path | None = UNIT_MODEL
    gguf: Path | None = None


def unit_tokenizer() -> Tokenizer:
    return load_tokenizer(UnitFiles())


def fake_model_info(**changes: object) -> ModelInfo:
    facts: dict[str, object] = {
        "model_name": "unit",
        "architecture": "LlamaForCausalLM",
        "num_parameters": 800_000,
        "vocab_size": 320,
        "max_model_len": 2048,
        "dtype": "bfloat16",
        "quantization": None,
        "kv_dtype": "bfloat16",
        "num_kv_blocks": 256,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_step_tokens": 512,
        "eos_token_ids": [257],
        "backend": "fake",
        "startup_seconds": {"load": 0.25, "warm_up": 0.5},
        "weight_bytes": 1_600_000,
        "kv_cache_bytes": 4_000_000,
        **changes,
    }
    return ModelInfo(**facts)  # type: ignore[arg-type]


@dataclass
class _Running:
    request: GenerateRequest
    is_aborted: bool = False
    is_finished: bool = False  # the last output of every choice is out
    num_drawn: int = 0


@dataclass
class FakeEngine:
    """AsyncEngine whose text depends on the prompt and the choice alone.

    Knobs: `step_seconds` (slow), `text_per_step` (how much one output carries), `fail_after` (tokens before finish
    reason "error" with `fail_code`), `raise_after` (tokens before the iterator raises), `overloaded`, `state`.
    """

    step_seconds: float = 0.0
    silent_seconds: float = 0.0  # before the first token
    text_per_step: int = 1  # copies of each character
    fail_after: int | None = None
    fail_code: str | None = "model_numerics"
    raise_after: int | None = None
    overloaded: bool = False
    state: EngineState = "ready"
    start_seconds: float = 0.0
    start_error: Exception | None = None
    text: str | None = None  # instead of the phrase
    info: ModelInfo = field(default_factory=fake_model_info)
    running: dict[str, _Running] = field(default_factory=dict)
    seen: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)
    num_steps: int = 0
    is_draining: bool = False
    is_stopped: bool = False
    num_restarts: int = 0
    is_watched: bool = False
    kept_fraction: float = 0.5  # of the blocks it says it reads while watched; one in eight is evicted

    async def start(self) -> ModelInfo:
        await asyncio.sleep(self.start_seconds)
        if self.start_error is not None:
            raise self.start_error
        return self.info

    def generate(self, request: GenerateRequest) -> AsyncIterator[SequenceOutput]:
        return self.generate_all([request])[0]

    def generate_all(self, requests: Sequence[GenerateRequest]) -> list[AsyncIterator[SequenceOutput]]:
        for request in requests:
            self._check(request)
        return [self._take(request) for request in requests]

    def _check(self, request: GenerateRequest) -> None:
        if self.overloaded:
            raise OverloadedError("the queue is full", 2.5)
        if self.state != "ready" or self.is_draining:
            raise EngineUnavailableError(self.state)
        num_tokens = len(request.prompt_token_ids) + (request.params.max_tokens or 1)
        if num_tokens > self.info.max_model_len:
            raise PromptTooLongError(num_tokens, self.info.max_model_len)
        if request.params.grammar is not None and '"bad"' in request.params.grammar.schema:
            raise RequestError("The schema cannot be compiled.", param="response_format")

    def _take(self, request: GenerateRequest) -> AsyncIterator[SequenceOutput]:
        self.seen.append(request)
        entry = self.running[request.request_id] = _Running(request)
        return self._outputs(entry)

    async def _outputs(self, entry: _Running) -> AsyncIterator[SequenceOutput]:
        request = entry.request
        try:
            await asyncio.sleep(self.silent_seconds)
            texts = [self._text_of(request, choice) for choice in range(request.params.n)]
            limit = self._limit(request)
            reasons: list[FinishReason] = []
            for choice, (text, reason) in enumerate(texts):
                texts[choice] = (text[:limit], reason if len(text) <= limit else "length")
                reasons.append(texts[choice][1])
            for position in range(max(1, max(len(text) for text, _ in texts))):
                await asyncio.sleep(self.step_seconds)
                outputs = self._step(entry, [text for text, _ in texts], reasons, position)
                self._report(outputs)
                for output in outputs:
                    yield output
                if self.raise_after is not None and position + 1 >= self.raise_after:
                    raise ValueError("secret /etc/passwd 0x7f00deadbeef")
                if any(output.finish_reason in ("abort", "error") for output in outputs):
                    break
            entry.is_finished = True
        finally:
            if not entry.is_finished and request.request_id in self.running:
                self.aborted.append(request.request_id)
            self.running.pop(request.request_id, None)
            self._report([])

    def _limit(self, request: GenerateRequest) -> int:
        room = self.info.max_model_len - len(request.prompt_token_ids)
        return room if request.params.max_tokens is None else min(room, request.params.max_tokens)

    def _text_of(self, request: GenerateRequest, choice: int) -> tuple[str, FinishReason]:
        """The whole text of a choice, cut at its first stop string, and why it ends there."""
        if request.params.grammar is not None:
            return JSON_TEXT, "stop"
        text = self.text
        if text is None:
            start = (sum(request.prompt_token_ids) + 7 * choice) % len(PHRASE)
            text = (PHRASE[start:] + PHRASE[:start]) * (1 + self._limit(request) // len(PHRASE))
        cuts = [text.find(stop) for stop in request.params.stop if stop in text]
        return (text[: min(cuts)], "stop") if cuts else (text, "stop" if self.text is not None else "length")

    def _step(
        self, entry: _Running, texts: list[str], reasons: list[FinishReason], position: int
    ) -> list[SequenceOutput]:
        """One position of every choice, the last choice first: nothing may rely on their order."""
        outputs = []
        for choice, text in reversed(list(enumerate(texts))):
            if position < len(text) or (position == 0 and not text):
                entry.num_drawn += 1
                outputs.append(self._output(entry, choice, text, position, reasons[choice]))
        return outputs

    def _output(self, entry: _Running, choice: int, text: str, position: int, reason: FinishReason) -> SequenceOutput:
        params, request = entry.request.params, entry.request
        character = text[position : position + 1]
        token_ids = list(character.encode())
        finish: FinishReason | None = reason if position + 1 >= len(text) else None
        code = None
        if entry.is_aborted:
            finish = "abort"
        elif self.fail_after is not None and position + 1 >= self.fail_after:
            finish, code = "error", self.fail_code
        is_last = finish is not None
        return SequenceOutput(
            request_id=request.request_id,
            choice=choice,
            token_ids=token_ids,
            text=character * self.text_per_step,
            logprobs=[] if params.logprobs is None else [_logprobs(i, params.logprobs) for i in token_ids],
            entropies=[_entropy(position, params.temperature) for _ in token_ids] if params.trace == "tokens" else [],
            prompt_logprobs=_prompt_logprobs(request) if position == 0 and choice == 0 else None,
            finish_reason=finish,
            error_code=code,
            num_prompt_tokens=len(request.prompt_token_ids) if is_last else 0,
            num_cached_tokens=4 if is_last else 0,
            num_output_tokens=len(text[: position + 1].encode()) if is_last else 0,
            entropy_summary=_summary(position + 1) if is_last and params.trace != "none" else None,
            timings=RequestTimings(queue_seconds=0.001, prefill_seconds=0.01, decode_seconds=0.1) if is_last else None,
        )

    def _report(self, outputs: list[SequenceOutput]) -> None:
        self.num_steps += 1
        active = len(self.running)
        drawn = sum(len(output.token_ids) for output in outputs)
        stats = StepStats(
            step=self.num_steps,
            step_seconds=0.002,
            schedule_seconds=0.0001,
            num_prefill_tokens=0,
            num_decode_tokens=drawn,
            num_cached_tokens=0,
            num_prompt_tokens=0,
            num_preempted=0,
            num_nonfinite_rows=0,
            flops=1e6,
            bytes_read=2e6,
            num_running=active,
            num_waiting=0,
            num_waiting_tokens=0,
            kv_blocks_active=active,
            kv_blocks_cached=0,
            kv_blocks_free=255 - active,
            entropies=[0.5] * drawn,
            varentropies=[0.25] * drawn,
            temperatures=[1.0] * drawn,
            tau_nats=0.125 * drawn,
            tau_up_nats=0.0625 * drawn,
            nats_resolved=0.5 * drawn,
            kv_map=[
                SequenceBlocks(request_id, 0, num_blocks=64, num_evicted=8, kept_fraction=self.kept_fraction)
                for request_id in (self.running if self.is_watched else ())
            ],
        )
        for listener in self.listeners:
            listener(stats, outputs)

    def abort(self, request_id: str) -> None:
        entry = self.running.get(request_id)
        if entry is not None:
            entry.is_aborted = True
            if entry.num_drawn == 0:  # the iterator may never have been started
                self.aborted.append(request_id)
                self.running.pop(request_id, None)

    def health(self) -> EngineHealth:
        return EngineHealth(
            state=self.state,
            is_ready=self.state == "ready" and not self.is_draining,
            seconds_since_step=0.0,
            engine_pid=None,
            num_restarts=self.num_restarts,
        )

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self.running),
            num_waiting=0,
            num_waiting_tokens=0,
            kv_usage_ratio=len(self.running) / 255,
            estimated_wait_seconds=0.25,
            tau_nats_per_second=1.5,
        )

    def watch(self, is_watched: bool) -> None:
        self.is_watched = is_watched

    def add_step_listener(self, listener: Listener) -> None:
        self.listeners.append(listener)

    async def drain(self, timeout_seconds: float) -> bool:
        self.is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        return not self.running

    async def stop(self) -> None:
        self.is_stopped = True
        for request_id in list(self.running):
            self.abort(request_id)
        await asyncio.sleep(0)


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    ids = [(token_id + k) % 256 for k in range(num_top)]
    return TokenLogprobs(token_id, -0.5, ids, [-0.5 - k for k in range(num_top)])


def _prompt_logprobs(request: GenerateRequest) -> list[TokenLogprobs | None] | None:
    wanted = request.params.prompt_logprobs
    if wanted is None:
        return None
    return [None, *(_logprobs(token_id, wanted) for token_id in request.prompt_token_ids[1:])]


def _entropy(position: int, temperature: float) -> TokenEntropy:
    return TokenEntropy(0.5 + 0.25 * math.cos(position), 0.25, temperature, 1.0, 0.125 * position)


def _summary(num_tokens: int) -> EntropySummary:
    return EntropySummary(
        tau_nats=0.125 * num_tokens,
        tau_up_nats=0.0625 * num_tokens,
        nats_resolved=0.5 * num_tokens,
        mean_entropy_nats=0.5,
        final_entropy_nats=0.5,
        tau_per_gflop=1.0,
        mean_temperature=1.0,
        kept_fraction_mean=1.0,
        blocks_evicted=0,
    )
