"""The front half by itself: admission, merging for slow readers, health. The engine is played by the test."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from etserve.config import EngineConfig
from etserve.engine.admission import Rates
from etserve.engine.frames import AbortRequest, AddRequest, StepDone, ToEngine
from etserve.engine.front import EngineFront
from etserve.engine.streams import OutputStream, merge
from etserve.errors import EngineUnavailableError, OverloadedError, PromptTooLongError, RequestError
from etserve.outputs import GenerateRequest, ModelInfo, SequenceOutput, StepStats
from etserve.sampling_params import SamplingParams

INFO = ModelInfo(
    model_name="m", architecture="a", num_parameters=1, vocab_size=100, max_model_len=64, dtype="float32",
    quantization=None, kv_dtype="float32", num_kv_blocks=10, block_size=16, max_num_seqs=4, max_step_tokens=64,
    eos_token_ids=[0], backend="none", startup_seconds={}, weight_bytes=1, kv_cache_bytes=1,
)  # fmt: skip


def stats(**changes: Any) -> StepStats:
    numbers: dict[str, Any] = {name: 0 for name in StepStats.__struct_fields__ if "entrop" not in name}
    del numbers["temperatures"]
    return StepStats(**{**numbers, "step_seconds": 0.1, **changes})


class FakeFront(EngineFront):
    """Records what it would send; time stands still unless moved."""

    def __init__(self, **settings: Any) -> None:
        self.time = 0.0
        super().__init__(EngineConfig(**settings), now=lambda: self.time)
        self.sent: list[ToEngine] = []
        self.is_there = True
        self._become_ready(INFO)

    def _post(self, message: ToEngine) -> None:
        self.sent.append(message)

    @property
    def _can_post(self) -> bool:
        return self.is_there

    @property
    def _engine_pid(self) -> int | None:
        return 1

    def step(self, *outputs: SequenceOutput, num_accepted: int = 0, **changes: Any) -> None:
        self._on_step(StepDone(list(outputs), stats(**changes), num_accepted))


def request(request_id: str = "r", num_prompt: int = 4, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=[1] * num_prompt, params=SamplingParams(**{"max_tokens": 8, **params})
    )


def token(request_id: str, token_id: int, **fields: Any) -> SequenceOutput:
    return SequenceOutput(request_id=request_id, token_ids=[token_id], text=chr(64 + token_id), **fields)


def go(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_what_the_model_cannot_serve_is_refused_at_the_call() -> None:
    async def main() -> None:
        front = FakeFront()
        with pytest.raises(PromptTooLongError) as caught:
            front.generate(request(num_prompt=60))
        assert "64" in caught.value.message
        assert "68" in caught.value.message
        refused = [
            request(num_prompt=0),
            msgspec.structs.replace(request(), prompt_token_ids=[1, 100]),
            msgspec.structs.replace(request(), prompt_token_ids=[-1]),
            request(logit_bias={100: 1.0}),
            request(stop_token_ids=(-1,)),
        ]
        for wanted in refused:
            with pytest.raises(RequestError):
                front.generate(wanted)
        assert front.sent == []
        front.generate(request("fits", num_prompt=56))
        front.generate(request("scores", num_prompt=64, max_tokens=0))
        front.generate(request("open end", num_prompt=63, max_tokens=None))
        with pytest.raises(PromptTooLongError):
            front.generate(request("no room", num_prompt=64, max_tokens=None))

    go(main())


def test_the_queue_is_bounded_by_requests_and_an_honest_wait_is_told() -> None:
    async def main() -> None:
        front = FakeFront(max_num_seqs=2, max_waiting_requests=3)
        iterators = [front.generate(request(str(i))) for i in range(5)]
        with pytest.raises(OverloadedError):
            front.generate(request("too many"))
        front.step(num_accepted=5, num_running=2, num_waiting=3, num_waiting_tokens=12, num_prefill_tokens=10)
        with pytest.raises(OverloadedError) as caught:
            front.generate(request("still too many"))
        assert 1.0 <= caught.value.retry_after_seconds <= 60.0
        front.step(num_accepted=5, num_running=2, num_waiting=2, num_waiting_tokens=8, num_prefill_tokens=10)
        iterators.append(front.generate(request("now there is room")))
        assert front.load().num_waiting == 3
        assert front.load().num_waiting_tokens == 12

    go(main())


def test_of_several_prompts_that_do_not_all_fit_none_is_queued_and_others_are_not_refused_for_them() -> None:
    async def main() -> None:
        front = FakeFront(max_num_seqs=2, max_waiting_requests=3)
        kept = [front.generate(request(str(i))) for i in range(4)]
        num_sent = len(front.sent)
        with pytest.raises(OverloadedError):
            front.generate_all([request("a"), request("b")])
        with pytest.raises(PromptTooLongError):
            front.generate_all([request("a"), request("b", num_prompt=64)])
        assert len(front.sent) == num_sent
        kept.append(front.generate(request("the last place")))
        assert len(front.sent) == num_sent + 1

    go(main())


def test_the_queue_is_bounded_by_prompt_tokens_but_one_prompt_always_fits() -> None:
    async def main() -> None:
        front = FakeFront(max_num_seqs=1, max_waiting_tokens=10)
        kept = [front.generate(request("long", num_prompt=40))]
        front.step(num_accepted=1, num_running=1)
        kept.append(front.generate(request("waits", num_prompt=9)))
        with pytest.raises(OverloadedError):
            front.generate(request("over", num_prompt=2))

    go(main())


def test_the_wait_grows_with_what_waits_and_shrinks_with_the_rate() -> None:
    slow = Rates().after_step(stats(num_prefill_tokens=10)).after_finish(20)
    fast = Rates().after_step(stats(num_prefill_tokens=100)).after_finish(20)
    assert slow.seconds_for(100, 1) == pytest.approx(120 / 100)
    assert slow.seconds_for(200, 1) > slow.seconds_for(100, 1) > fast.seconds_for(100, 1)
    assert Rates().seconds_for(100, 1) == 0.0


def test_steps_that_count_nothing_are_time_of_the_next_that_counts() -> None:
    """Such as those that only guess: four of them and one that verifies five tokens are not five tokens a step."""
    nothing, some = stats(), stats(num_decode_tokens=5, tau_nats=2.0)
    rates = Rates()
    for step in (nothing, nothing, nothing, nothing, some):
        rates = rates.after_step(step).after_finish(20)
    alone = Rates().after_step(some)
    assert rates.tokens_per_second == pytest.approx(alone.tokens_per_second / 5)
    assert rates.tau_nats_per_second == pytest.approx(alone.tau_nats_per_second / 5)
    assert rates.uncounted_seconds == 0.0


def test_outputs_reach_their_request_and_end_it() -> None:
    async def main() -> None:
        front = FakeFront()
        first, second = front.generate(request("a")), front.generate(request("b"))
        front.step(token("a", 1), token("b", 2))
        front.step(token("b", 3, finish_reason="length"), token("a", 4, finish_reason="stop"), token("gone", 5))
        assert [output.token_ids for output in [item async for item in first]] == [[1], [4]]
        assert [output.token_ids for output in [item async for item in second]] == [[2], [3]]
        assert await front.drain(1.0)

    go(main())


def test_a_slow_reader_gets_the_same_in_fewer_pieces() -> None:
    async def main() -> None:
        stream = OutputStream(max_queued=8)
        for index in range(1000):
            stream.put(token("r", index % 26, choice=index % 2))
        stream.put(token("r", 0, choice=0, finish_reason="stop"))
        assert len(stream) < 20
        parts: dict[int, list[SequenceOutput]] = {0: [], 1: []}
        while len(stream):
            output = await stream.get()
            parts[output.choice].append(output)
        assert merge(parts[0]).token_ids == [i % 26 for i in range(0, 1000, 2)] + [0]
        assert merge(parts[1]).token_ids == [i % 26 for i in range(1, 1000, 2)]
        assert merge(parts[0]).finish_reason == "stop"

    go(main())


def test_merging_keeps_every_field_of_every_part() -> None:
    first = token("r", 1, prompt_logprobs=[None])
    last = token("r", 2, finish_reason="length", num_output_tokens=2)
    merged = merge([first, last])
    assert (merged.token_ids, merged.text, merged.prompt_logprobs) == ([1, 2], "AB", [None])
    assert (merged.finish_reason, merged.num_output_tokens) == ("length", 2)


def test_closing_or_dropping_an_iterator_aborts_its_request_once() -> None:
    async def main() -> None:
        front = FakeFront()
        closed, dropped = front.generate(request("closed")), front.generate(request("dropped"))
        await closed.aclose()
        await closed.aclose()
        del dropped
        gc.collect()
        aborts = [message for message in front.sent if isinstance(message, AbortRequest)]
        assert aborts == [AbortRequest("closed"), AbortRequest("dropped")]
        assert await front.drain(0.1)

    go(main())


def test_an_iterator_read_to_its_end_aborts_nothing() -> None:
    async def main() -> None:
        front = FakeFront()
        iterator = front.generate(request("a", n=2))
        front.step(token("a", 1, finish_reason="stop"), token("a", 1, choice=1, finish_reason="length"))
        assert len([output async for output in iterator]) == 2
        await iterator.aclose()
        assert [type(message) for message in front.sent] == [AddRequest]

    go(main())


def test_abort_without_an_engine_ends_the_request_here() -> None:
    async def main() -> None:
        front = FakeFront()
        reports: list[list[SequenceOutput]] = []
        front.add_step_listener(lambda _, outputs: reports.append(outputs))
        iterator = front.generate(request("a", n=2))
        front.is_there = False
        front.abort("a")
        front.abort("a")
        front.abort("unknown")
        assert [output.finish_reason async for output in iterator] == ["abort", "abort"]
        assert len(reports) == 1

    go(main())


def test_an_engine_that_has_work_but_does_not_step_is_not_ready() -> None:
    async def main() -> None:
        front = FakeFront()
        front.time = 100.0
        assert front.health().is_ready
        iterator = front.generate(request("a"))
        front.time = 104.0
        assert front.health().is_ready
        front.time = 106.0
        assert not front.health().is_ready
        assert front.health().seconds_since_step == 6.0
        front.step(num_decode_tokens=1)
        assert front.health().is_ready
        await iterator.aclose()

    go(main())


def test_readers_that_give_up_do_not_hide_an_engine_that_hangs() -> None:
    async def main() -> None:
        front = FakeFront()
        for number in range(3):
            iterator = front.generate(request(f"r{number}"))
            front.time += 4.0
            await iterator.aclose()
        assert front.health().seconds_since_step == 12.0
        assert not front.health().is_ready
        front.step(num_accepted=3)
        front.time += 60.0
        assert front.health().is_ready
        assert front.health().seconds_since_step == 0.0

    go(main())


def test_draining_refuses_and_waits() -> None:
    async def main() -> None:
        front = FakeFront()
        iterator = front.generate(request("a"))
        assert not await front.drain(0.01)
        with pytest.raises(EngineUnavailableError):
            front.generate(request("b"))
        assert not front.health().is_ready
        front.step(token("a", 1, finish_reason="stop"))
        assert await front.drain(0.01)
        await iterator.aclose()

    go(main())


def test_a_request_without_a_seed_gets_one_that_a_restart_will_reuse() -> None:
    async def main() -> None:
        front = FakeFront()
        kept = front.generate(request("a"))
        (message,) = front.sent
        assert isinstance(message, AddRequest)
        assert message.request.params.seed is not None
        front.step(token("a", 9))
        resumed = front._open["a"].resumed()
        assert resumed.params.seed == message.request.params.seed
        assert resumed.forced_output == [[9]]
        await kept.aclose()

    go(main())


def test_a_listener_that_fails_does_not_stop_the_outputs() -> None:
    async def main() -> None:
        front = FakeFront()

        def broken(_stats: StepStats, _outputs: list[SequenceOutput]) -> None:
            raise ZeroDivisionError

        front.add_step_listener(broken)
        iterator = front.generate(request("a"))
        front.step(token("a", 1, finish_reason="stop"))
        assert [output.token_ids async for output in iterator] == [[1]]

    go(main())
