"""The engine in a thread behaves behind the seam as the one in a process."""

import asyncio
from typing import Any

import pytest

from etserve.config import EngineConfig
from etserve.engine.inprocess import InProcessEngine
from etserve.engine.llm_engine import LLMEngine
from etserve.engine.streams import merge
from etserve.errors import ModelError
from etserve.llm import LLM
from etserve.outputs import GenerateRequest, SequenceOutput
from etserve.sampling_params import SamplingParams
from tests.engine.helpers import PROMPTS, UNIT_MODEL, make_engine, request, run, unit_config


def build(_config: EngineConfig) -> LLMEngine:
    return make_engine()


async def collect(engine: InProcessEngine, wanted: GenerateRequest) -> list[SequenceOutput]:
    return [output async for output in engine.generate(wanted)]


def test_streams_are_those_of_the_plain_engine_and_an_abort_ends_one() -> None:
    wanted = [request(str(i), prompt, temperature=0.8, seed=i) for i, prompt in enumerate(PROMPTS)]
    expected = run(make_engine(), wanted)

    async def main() -> None:
        engine = InProcessEngine(unit_config(), build=build)
        await engine.start()
        assert engine.health().is_ready
        long = asyncio.create_task(collect(engine, request("long", PROMPTS[0], max_tokens=1500, ignore_eos=True)))
        for outputs in await asyncio.gather(*(collect(engine, item) for item in wanted)):
            whole = merge(outputs)
            assert whole.token_ids == expected[whole.request_id, 0].token_ids
        engine.abort("long")
        assert (await long)[-1].finish_reason == "abort"
        assert await engine.drain(5.0)
        await engine.stop()
        await engine.stop()

    asyncio.run(main())


def test_an_engine_thread_that_dies_ends_every_request_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = InProcessEngine(unit_config(), build=build)
        await engine.start()

        def broken(*_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr("etserve.runner.model_runner.ModelRunner.execute", broken)
        last = (await collect(engine, request("r", PROMPTS[0])))[-1]
        assert (last.finish_reason, last.error_code) == ("error", "engine_failed")
        assert "MemoryError" in await engine.wait_failed()
        await engine.stop()

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_raises_from_start() -> None:
    async def main() -> None:
        engine = InProcessEngine(unit_config(model="nowhere.gguf"))
        with pytest.raises(ModelError):
            await engine.start()
        await engine.stop()

    asyncio.run(main())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(UNIT_MODEL, dtype="float32", num_kv_blocks=256, threads=1)


def test_offline_generation_keeps_the_order_and_tells_its_progress(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    params = [SamplingParams(max_tokens=4 + i, temperature=0.0, ignore_eos=True) for i in range(3)]
    results = llm.generate(PROMPTS[:3], params, progress=lambda done, total: told.append((done, total)))
    assert [result.choices[0].num_output_tokens for result in results] == [4, 5, 6]
    assert [len(result.text) for result in results] == [4, 5, 6]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert results[0].prompt_token_ids == llm.tokenizer.encode(PROMPTS[0])
    ids = llm.generate(results[0].prompt_token_ids, params[0])
    assert ids[0].text == results[0].text


def test_offline_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=3, temperature=0.0)
    prompt = llm.tokenizer.apply_chat_template(messages)
    assert llm.chat(messages, params).text == llm.generate(prompt, params)[0].text


def test_an_offline_stream_that_is_closed_early_leaves_the_model_usable(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=50, temperature=0.0))
    first = next(stream)
    stream.close()  # type: ignore[attr-defined]
    whole = llm.generate(PROMPTS[0], SamplingParams(max_tokens=5, temperature=0.0))[0]
    assert whole.choices[0].token_ids[:1] == first.token_ids
