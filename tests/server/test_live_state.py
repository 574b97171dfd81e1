"""Frames of the live stream: what they say of steps and of each sequence, and what is not kept."""

import math
import random

import pytest

from etserve.control.clock import EntropyClock
from etserve.outputs import SequenceBlocks, SequenceOutput, StepStats, TokenEntropy
from etserve.server import live_state
from etserve.server.live_state import LiveState


def stats_of(entropies: list[float] = [], running: int = 1, seconds: float = 0.5, **changes: object) -> StepStats:  # noqa: B006
    facts: dict[str, object] = {
        "step": 7, "step_seconds": seconds, "schedule_seconds": 0.0, "num_prefill_tokens": 3,
        "num_decode_tokens": len(entropies), "num_cached_tokens": 0, "num_prompt_tokens": 0, "num_preempted": 0,
        "num_nonfinite_rows": 0, "flops": 0.0, "bytes_read": 0.0, "num_running": running, "num_waiting": 0,
        "num_waiting_tokens": 0, "kv_blocks_active": 5, "kv_blocks_cached": 2, "kv_blocks_free": 9,
        "entropies": entropies, "varentropies": [2 * h for h in entropies], "temperatures": [1.0] * len(entropies),
        "tau_nats": 0.25, "nats_resolved": sum(entropies), **changes,
    }  # fmt: skip
    return StepStats(**facts)  # type: ignore[arg-type]


def watched() -> LiveState:
    state = LiveState()
    state.is_watched = True
    return state


def drawn(request_id: str, choice: int = 0, num: int = 1, **facts: object) -> SequenceOutput:
    return SequenceOutput(request_id=request_id, choice=choice, token_ids=[1] * num, **facts)  # type: ignore[arg-type]


def test_a_frame_before_any_step_says_that_nothing_is_known() -> None:
    frame = watched().take_frame()
    assert (frame["step"], frame["num_steps"], frame["kv_blocks"], frame["sequences"]) == (0, 0, None, [])
    assert frame["mean_step_seconds"] is None


def test_a_frame_sums_the_steps_since_the_last_one() -> None:
    state = watched()
    for seconds in (0.5, 1.5):
        state.observe(stats_of([1.0], seconds=seconds), [drawn("a")])
    frame = state.take_frame()
    assert (frame["num_steps"], frame["mean_step_seconds"], frame["longest_step_seconds"]) == (2, 1.0, 1.5)
    assert (frame["num_prefill_tokens"], frame["num_decode_tokens"], frame["tau_nats"]) == (6, 2, 0.5)
    assert frame["kv_blocks"] == {"active": 5, "cached": 2, "free": 9}
    again = state.take_frame()
    assert (again["num_steps"], again["tau_nats"], again["sequences"][0]["entropies_nats"]) == (0, 0.0, [])
    assert again["sequences"][0]["num_tokens"] == 2


def test_a_report_that_is_no_step_is_not_counted_as_one() -> None:
    state = watched()
    state.observe(stats_of(seconds=0.0), [drawn("a", num=0, finish_reason="abort")])
    frame = state.take_frame()
    assert frame["num_steps"] == 0
    assert frame["sequences"][0]["finish_reason"] == "abort"


def test_each_sequence_gets_its_own_entropies_whatever_is_traced() -> None:
    """The clock kept here equals one that sees the sequence's entropies alone, with none or many at once."""
    rng = random.Random(4)
    state = watched()
    clocks: dict[str, EntropyClock] = {name: EntropyClock() for name in "abcde"}
    for _ in range(200):
        outputs, entropies = [], []
        for name in rng.sample("abcde", k=rng.randint(0, 5)):
            own = [rng.expovariate(1.0) for _ in range(rng.choice((0, 1, 1, 1, 3)))]
            for entropy in own:
                clocks[name] = clocks[name].observe(entropy)
            traced = [TokenEntropy(h, 2 * h, 0.7, 0.25, 0.0) for h in own] if name in "ab" else []
            outputs.append(drawn(name, num=len(own), entropies=traced))
            entropies += own
        state.observe(stats_of(entropies), outputs)
    found = {sequence["id"]: sequence for sequence in state.take_frame()["sequences"]}
    for name, clock in clocks.items():
        assert found[name]["num_tokens"] == clock.count
        assert found[name]["entropy_nats"] == clock.entropy_nats
        assert found[name]["tau_nats"] == clock.tau_nats
        assert found[name]["varentropy"] == 2 * clock.entropy_nats
        assert found[name]["kept_fraction"] == (0.25 if name in "ab" else None)
        assert found[name]["temperature"] == (0.7 if name in "ab" else 1.0)


def test_nothing_is_attributed_where_a_failed_output_hides_a_token() -> None:
    state = watched()
    outputs = [drawn("broken", num=0, finish_reason="error"), drawn("plain"),
               drawn("traced", entropies=[TokenEntropy(3.0, 1.0, 1.0, 1.0, 0.0)])]  # fmt: skip
    state.observe(stats_of([9.0, 1.0, 3.0]), outputs)
    found = {sequence["id"]: sequence["entropy_nats"] for sequence in state.take_frame()["sequences"]}
    assert found == {"broken": None, "plain": None, "traced": 3.0}


def test_a_sequence_that_ended_shows_once_and_choices_are_told_apart() -> None:
    state = watched()
    state.observe(stats_of([1.0, 2.0]), [drawn("a", 0), drawn("a", 1, finish_reason="stop")])
    first = {(s["id"], s["choice"]): s["finish_reason"] for s in state.take_frame()["sequences"]}
    assert first == {("a", 0): None, ("a", 1): "stop"}
    assert [s["choice"] for s in state.take_frame()["sequences"]] == [0]


def test_the_blocks_of_a_sequence_are_shown_once_told() -> None:
    state = watched()
    state.observe(stats_of([1.0, 1.0]), [drawn("a"), drawn("b")])
    assert [s["blocks"] for s in state.take_frame()["sequences"]] == [None, None]
    told = [SequenceBlocks("a", 0, 41, 8, 0.3), SequenceBlocks("unknown", 0, 1, 0, 1.0)]
    state.observe(stats_of([1.0], kv_map=told), [drawn("b")])
    found = {s["id"]: s for s in state.take_frame()["sequences"]}
    assert found["a"]["blocks"] == {"read": 10, "skipped": 23, "evicted": 8}
    assert (found["a"]["kept_fraction"], found["b"]["blocks"]) == (0.3, None)


def test_clocks_run_unwatched_but_nothing_is_gathered() -> None:
    state = LiveState()
    for entropy in (3.0, 1.0):
        state.observe(stats_of([entropy]), [drawn("a")])
    state.observe(stats_of([1.0]), [drawn("gone", finish_reason="stop")])
    state.is_watched = True
    frame = state.take_frame()
    assert [s["id"] for s in frame["sequences"]] == ["a"]
    assert (frame["sequences"][0]["tau_nats"], frame["sequences"][0]["entropies_nats"]) == (2.0, [])
    assert frame["num_steps"] == 0


def test_sequences_that_nobody_ends_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_state, "MAX_TRACKED", 3)
    state = watched()
    for name in "abcd":
        state.observe(stats_of([1.0]), [drawn(name)])
    state.observe(stats_of([1.0]), [drawn("b")])
    state.observe(stats_of([1.0]), [drawn("e")])
    assert [s["id"] for s in state.take_frame()["sequences"]] == ["e", "b", "d"]
    state.observe(stats_of(running=0), [])
    assert state.take_frame()["sequences"] == []


def test_a_frame_shows_a_bounded_number_of_sequences() -> None:
    state = watched()
    names = [f"s{i}" for i in range(100)]
    state.observe(stats_of([1.0] * 100, running=100), [drawn(name) for name in names])
    frame = state.take_frame()
    assert len(frame["sequences"]) == live_state.MAX_SHOWN
    assert frame["num_sequences_hidden"] == 100 - live_state.MAX_SHOWN
    assert math.isclose(frame["nats_resolved"], 100.0)
