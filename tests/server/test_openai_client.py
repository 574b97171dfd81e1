"""The openai SDK, unchanged, against a live server."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from tests.fakes import FakeEngine
from tests.server.helpers import Live, live_server, wait_until

KEY = "key-of-anna-1234"
MESSAGES = [{"role": "user", "content": "hi"}]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(api_keys=(KEY,)) as running:
        yield running


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with client_for(live) as made:
        yield made


def client_for(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["unit"]
    assert client.models.retrieve("unit").owned_by == "etserve"


def test_chat_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="unit", messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=2, seed=1
    )
    text = whole.choices[0].message.content
    assert text is not None
    assert len(text) == 12
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 12
    stream = client.chat.completions.create(
        model="unit", messages=MESSAGES, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_the_stream_helper_gathers_the_reply(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="unit", messages=MESSAGES, max_tokens=90, stop="fox") as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == text
    assert text.endswith("brown ")


def test_parse_gives_an_object(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="unit", messages=MESSAGES, response_format=Person, max_tokens=200)
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)


def test_completions_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="unit", prompt=["a", "b"], max_tokens=7, logprobs=1, echo=True)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].logprobs is not None
    stream = client.completions.create(model="unit", prompt="a", max_tokens=7, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_extra_fields_pass_through_the_sdk(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "entropic": {"trace": "summary"}}
    reply = client.chat.completions.create(model="unit", messages=MESSAGES, max_tokens=3, extra_body=extra)
    assert reply.choices[0].model_extra is not None
    assert reply.choices[0].model_extra["entropic"]["tau_nats"] == 0.375


def test_errors_are_the_sdks_own_classes(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="unit", messages=MESSAGES, max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as absent:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert absent.value.code == "model_not_found"
    stranger = openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong-key-123", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_an_error_in_a_stream_is_raised_by_the_sdk() -> None:
    with live_server(FakeEngine(fail_after=3)) as failing, client_for(failing) as client:
        stream = client.chat.completions.create(model="unit", messages=MESSAGES, max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="not finite"):
            list(stream)


def test_overload_tells_the_sdk_when_to_come_back() -> None:
    busy = live_server(FakeEngine(overloaded=True))
    with busy as live, client_for(live) as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="unit", messages=MESSAGES)
    assert caught.value.response.headers["retry-after"] == "3"


def test_the_async_client_streams_many_at_once(live: Live) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        stream = await client.chat.completions.create(
            model="unit", messages=[{"role": "user", "content": str(index)}], max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, index) for index in range(20))))

    texts = asyncio.run(go())
    assert [len(text) for text in texts] == [20] * 20


def test_closing_an_sdk_stream_aborts_the_request() -> None:
    engine = FakeEngine(step_seconds=0.01)
    with live_server(engine) as running, client_for(running) as client:
        stream = client.chat.completions.create(model="unit", messages=MESSAGES, max_tokens=1500, stream=True)
        next(iter(stream))
        stream.close()
        wait_until(lambda: not engine.running)
    assert len(engine.aborted) == 1
