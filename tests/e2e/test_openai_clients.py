"""The openai SDK, unchanged, against the demo model."""

import asyncio
import itertools
import math
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import Server

QUESTION: list[Any] = [{"role": "user", "content": "Please tell me the capital of France."}]


@pytest.fixture
def client(demo_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0)


def test_the_demo_model_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_reply(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": QUESTION, "max_tokens": 48, "temperature": 0.8, "seed": 11}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


def test_completions_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="demo", prompt="The cat sat on the mat.", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert reply.choices[0].text == "The cat sat on the mat."
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(p < 0 for p in logprobs.token_logprobs[1:])


async def _ask(url: str, seed: int) -> str:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="demo", messages=QUESTION, max_tokens=24, seed=seed, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


def test_async_clients_side_by_side_get_what_each_gets_alone(demo_server: Server) -> None:
    async def together() -> list[str]:
        return await asyncio.gather(*[_ask(demo_server.url, seed) for seed in range(8)])

    crowd = asyncio.run(together())
    assert crowd[3] == asyncio.run(_ask(demo_server.url, 3))
    assert len(set(crowd)) > 1


def test_parse_returns_the_schema_that_was_asked_for(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        capital: Literal["Berlin", "Madrid", "Paris"]
        is_city: bool

    reply = client.chat.completions.parse(
        model="demo", messages=QUESTION, response_format=Answer, temperature=0, max_tokens=64
    )
    assert reply.choices[0].message.parsed == Answer(capital="Paris", is_city=True)


def test_the_tau_of_the_trace_follows_from_its_entropies(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=40, seed=5, extra_body={"entropic": {"trace": "tokens"}}
    )
    record = reply.choices[0].model_extra["entropic"]  # type: ignore[index]
    entropies = [token["entropy_nats"] for token in record["tokens"]]
    assert reply.usage is not None
    assert len(entropies) == reply.usage.completion_tokens
    tau = sum(max(0.0, a - b) for a, b in itertools.pairwise(entropies))
    assert math.isclose(tau, record["tau_nats"], abs_tol=1e-4)
    assert all(0.0 <= h <= math.log(49_152) for h in entropies)
