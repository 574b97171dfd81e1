"""Every field of both routes against hostile values: 4xx or a sound reply, and nothing else."""

import asyncio
import json
import re
import resource
from typing import Any

import pytest

from etserve.server.schemas import ChatCompletionRequest, CompletionRequest
from tests.server.helpers import client_of, make_app

VALUES: list[Any] = [
    -1, 0, 1, 2, 16, 17, 20, 21, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, -1e308, 0.5, 1.0, "1", "", "x" * 300, True,
    False, None, [], [None], ["1"], [[]], {}, {"a": 1}, {"1": "1"}, {"-1": 1}, [-1], [2**31], ["x"] * 17, [1] * 65,
    {str(i): 1 for i in range(1025)}, "\u0000", "\U0001f600",
]  # fmt: skip
LEAKS = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|/work|/usr|site-packages|<class|pydantic|object at")
BASES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
SCHEMAS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}


@pytest.mark.parametrize("path", BASES)
def test_every_field_takes_a_value_in_bounds_or_refuses_it(path: str) -> None:
    async def go() -> None:
        async with client_of(make_app()) as client:
            for field in SCHEMAS[path].model_fields:
                for value in VALUES:
                    reply = await client.post(path, json={**BASES[path], field: value})
                    where = (field, str(value)[:40], reply.text[:300])
                    assert reply.status_code in (200, 400, 404), where
                    assert LEAKS.search(reply.text) is None, where
                    if reply.status_code == 400:
                        error = reply.json()["error"]
                        assert error["type"] == "invalid_request_error", where
                        assert error["param"], where

    asyncio.run(go())


TOO_FAR: dict[str, list[Any]] = {
    "n": [-1, 0, 17, 2**31, 2**63, 1e308, "1", True, [], 1.5],
    "max_tokens": [-1, 2**21, 2**31, 2**63, 1e308, "1", True, [], 1.5, 2048],
    "min_tokens": [-1, 2, 2**31, True, "1"],
    "logprobs": [-1, 21, 2**31, True, "1", []],
    "temperature": [-0.1, 2.1, 1e308, True, "1", []],
    "top_p": [-0.1, 0, 1.1, True, "1"],
    "top_k": [-2, 2**31, 2**63, True, 1.5, "1"],
    "min_p": [-0.1, 1.1, True],
    "presence_penalty": [-2.1, 2.1, 1e308, True],
    "frequency_penalty": [-2.1, 2.1, 1e308, True],
    "repetition_penalty": [0, -1, 11, 1e308, True],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "priority": [10**7, -(10**7), 1.5, True],
    "stop": [[""], "", ["x"] * 17, "x" * 257, [1], 1, {}],
    "stop_token_ids": [[-1], [320], [2**31], [True], ["1"], [1] * 65],
    "logit_bias": [{"320": 1}, {"-1": 1}, {"x": 1}, {"1": 101}, {"1": -101}, {"1": True}, {"1": "1"}, [1],
                   {str(i): 1 for i in range(1025)}, {"1\n": 1}, {"\u0661": 1}],
    "cache_salt": ["", "x" * 129, "a b", "a\n", "\u0000", "\u00e9", {}, 5, "a/b"],
    "stream": ["true", 1, 0, []],
    "stream_options": [{"include_usage": True}, {"x": 1}, 5],
    "user": [5, {}, "x" * 600],
    "metadata": [{"a": 1}, {str(i): "x" for i in range(17)}, []],
    "entropic": [{"trace": "all"}, {"trace": True}, "tokens", []],
}  # fmt: skip


def test_values_beyond_the_bounds_are_refused_by_name_and_reach_no_engine() -> None:
    async def go() -> None:
        app = make_app()
        async with client_of(app) as client:
            for field, values in TOO_FAR.items():
                for value in values:
                    reply = await client.post("/v1/completions", json={**BASES["/v1/completions"], field: value})
                    assert reply.status_code == 400, (field, str(value)[:40], reply.text[:200])
                    named = reply.json()["error"]["param"]
                    # A context that is too long is a matter of the prompt and of max_tokens alike.
                    assert named.startswith((field, "prompt")), (field, str(value)[:40], named)

    asyncio.run(go())


def test_refusing_a_large_hostile_body_does_not_multiply_its_memory() -> None:
    bodies = [
        {"prompt": "a", "stop_token_ids": ["x"] * 400_000},
        {"prompt": "a", "logit_bias": {str(i): "x" for i in range(150_000)}},
        {"prompt": "a", **{f"field{i}": 1 for i in range(150_000)}},
        {"prompt": ["a"] * 500_000},
        {"prompt": [1] * 1_000_000},
        {"prompt": [[1]] * 500_000},
    ]

    async def go() -> None:
        headers = {"content-type": "application/json"}
        async with client_of(make_app()) as client:
            for body in bodies:
                content = json.dumps(body, separators=(",", ":")).encode()
                reply = await client.post("/v1/completions", content=content, headers=headers)
                assert reply.status_code == 400

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(go())
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 400  # the bodies themselves, parsed, and nothing that multiplies them
