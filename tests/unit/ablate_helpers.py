"""Rounds that never ran, with figures that can be counted by hand."""

from typing import Any

from etserve.bench.ablate.records import QualityRun, Replay, RequestRun, RoundRun, StepRuns


def request(index: int = 0, seconds: tuple[float, ...] = (1.0, 1.5, 2.0), **changes: Any) -> RequestRun:
    """Three tokens at 1, 1.5 and 2 s."""
    count = len(seconds)
    given: dict[str, Any] = {
        "index": index,
        "due_seconds": 0.0,
        "token_seconds": list(seconds),
        "end_seconds": seconds[-1],
        "num_prompt_tokens": 4,
        "token_ids": list(range(count)),
        "text": "the cat sat on the mat",
        "entropies": [2.0, 1.0, 0.5][:count],
        "temperatures": [0.8] * count,
        "kept_fractions": [1.0] * count,
        "tau_nats": [0.0, 1.0, 1.5][:count],
        "replay": Replay(tau_nats=1.5, nats_resolved=3.5),
    }
    return RequestRun(**{**given, **changes})


def steps(**changes: Any) -> StepRuns:
    """A prompt, then two tokens each for two sequences."""
    given: dict[str, Any] = {
        "end_seconds": [1.0, 1.5, 2.0],
        "step_seconds": [1.0, 0.5, 0.5],
        "num_prefill_tokens": [8, 0, 0],
        "num_decode_tokens": [0, 2, 2],
        "flops": [1e9, 5e8, 5e8],
        "bytes_read": [4e8, 2e8, 4e8],
        "num_blocks_skipped": [0, 3, 4],
        "num_preempted": [0, 1, 0],
        "num_forced": [0, 0, 0],
    }
    return StepRuns(**{**given, **changes})


def round_of(*requests: RequestRun, arm: str = "baseline", number: int = 0, **changes: Any) -> RoundRun:
    given: dict[str, Any] = {
        "arm": arm,
        "workload": "short-chat",
        "round": number,
        "seed": 0,
        "settings": {},
        "num_kv_blocks": 10,
        "weight_bytes": 100_000_000,
        "requests": list(requests) or [request()],
        "steps": steps(),
    }
    return RoundRun(**{**given, **changes})


def quality(arm: str, nll: list[float]) -> QualityRun:
    """One document for each value, of two tokens."""
    return QualityRun(
        arm=arm,
        settings={},
        nll_nats=[[value - 0.5, value + 0.5] for value in nll],
        entropies=[[1.0, 2.0] for _ in nll],
        kept_fractions=[[0.5, 0.25] for _ in nll],
        cloze_nll=[1.0],
        cloze_hits=[True],
        needle_nll=[1.0],
        needle_hits=[False],
    )
