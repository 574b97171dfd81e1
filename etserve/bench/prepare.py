"""From what was asked on the command line to a load: tokenizer, lengths, prompts, plan."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from etserve.bench import workloads
from etserve.bench.client import Api
from etserve.bench.errors import BenchError
from etserve.bench.prompts import PromptMaker
from etserve.bench.session import Load, Planner
from etserve.bench.traces import TraceEntry, read_trace
from etserve.bench.workloads import Lengths, PlannedRequest, Workload
from etserve.models.files import resolve_model
from etserve.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of `bench serve` and `bench compare` that shape the load."""

    workload: str
    tokenizer: str = "demo"
    api: Api = "completions"
    send_ids: bool = False
    seed: int = 0
    scale: float = 1.0
    warmup: int = 2
    num_requests: int | None = None
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    shared_prefix: int = 0
    trace: Path | None = None
    speedup: float = 1.0
    limit: int | None = None
    max_context: int | None = None


def prepare(asked: Asked) -> Load:
    """Read tokenizer and trace, check everything. Raises BenchError, or ModelError for the tokenizer."""
    workload, entries = _workload(asked)
    if asked.api == "chat" and asked.send_ids:
        raise BenchError("--send-ids needs --api completions: chat takes text only")
    tokenizer = load_tokenizer(resolve_model(asked.tokenizer))
    overhead = chat_overhead(tokenizer) if asked.api == "chat" else None
    maker = PromptMaker(tokenizer, overhead_tokens=overhead, send_ids=asked.send_ids)
    described = {**workloads.describe(workload), "tokenizer": asked.tokenizer, "send_ids": asked.send_ids}
    if asked.trace is not None:
        described |= {"speedup": asked.speedup, "limit": asked.limit, "max_context": asked.max_context}
    return Load(_planner(asked, workload, entries, maker), workload.concurrency, described, asked.seed)


def chat_overhead(tokenizer: Tokenizer) -> int:
    """Tokens that the model's chat template puts around one user message."""
    framed = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
    return len(framed) - len(tokenizer.encode("x", False))


def parse_lengths(text: str) -> Lengths:
    """`128`, or `32-512` for a log-normal spread. Raises BenchError."""
    parts = text.split("-")
    try:
        bounds = [int(part) for part in parts]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or bounds[0] < 1 or bounds[-1] < bounds[0]:
        raise BenchError(f"a token count is N or LOW-HIGH, got {text!r}")
    return Lengths(bounds[0], bounds[-1])


def _planner(asked: Asked, workload: Workload, entries: list[TraceEntry] | None, maker: PromptMaker) -> Planner:
    def planner(seed: int) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
        if entries is None:
            counted = workloads.plan(workload, maker, seed)
        else:
            counted = workloads.plan_trace(entries, maker, seed)
        return workloads.warmup(counted, asked.warmup, maker, seed), counted

    return planner


def _workload(asked: Asked) -> tuple[Workload, list[TraceEntry] | None]:
    if asked.trace is not None:
        return _trace_workload(asked, asked.trace)
    if asked.workload.lower() == "custom":
        return workloads.scaled(_custom(asked), asked.scale), None
    own = ("prompt_tokens", "output_tokens", "num_requests", "concurrency", "shared_prefix")
    given = [name for name in own if getattr(asked, name)]
    if given:
        raise BenchError(f"{asked.workload} is fixed: --{given[0].replace('_', '-')} needs --workload custom")
    workload = workloads.standard(asked.workload, rate=asked.rate)
    if workload.rate is not None:
        workload = msgspec.structs.replace(workload, burstiness=asked.burstiness)
    return workloads.scaled(workload, asked.scale), None


def _custom(asked: Asked) -> Workload:
    if (asked.rate is None) == (asked.concurrency is None):
        raise BenchError("a custom workload needs one of --concurrency (closed loop) and --rate (open loop)")
    return Workload(
        name="custom",
        num_requests=asked.num_requests or 16,
        prompt_tokens=parse_lengths(asked.prompt_tokens or "128"),
        output_tokens=parse_lengths(asked.output_tokens or "128"),
        concurrency=asked.concurrency,
        rate=asked.rate,
        burstiness=asked.burstiness,
        shared_prefix_tokens=asked.shared_prefix,
    )


def _trace_workload(asked: Asked, path: Path) -> tuple[Workload, list[TraceEntry]]:
    entries = read_trace(path, speedup=asked.speedup, limit=asked.limit, max_context=asked.max_context)
    num_in = [entry.num_prompt_tokens for entry in entries]
    num_out = [entry.num_output_tokens for entry in entries]
    workload = Workload(
        name="trace",
        num_requests=len(entries),
        prompt_tokens=Lengths(min(num_in), max(num_in)),
        output_tokens=Lengths(min(num_out), max(num_out)),
        rate=len(entries) / entries[-1].arrival_seconds if entries[-1].arrival_seconds > 0.0 else None,
        trace=path.name,
    )
    return workload, entries
