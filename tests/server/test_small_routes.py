"""Models, tokenize, detokenize, version, load."""

import pytest

from etserve import __version__
from tests.server.helpers import call


def test_the_model_is_listed_and_described() -> None:
    listed = call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["unit"]
    described = call("GET", "/v1/models/unit").json()
    assert described == {**listed["data"][0], "created": described["created"]}
    assert described["max_model_len"] == 2048
    assert described["dtype"] == "bfloat16"
    assert described["quantization"] is None
    assert call("GET", "/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert call("GET", "/v1/models/a/b").status_code == 404


@pytest.mark.parametrize("text", ["", "hello", "h\u00e9 \u4e2d \U0001f600", "a" * 5000])
def test_text_survives_tokenize_and_detokenize(text: str) -> None:
    reply = call("POST", "/tokenize", json={"prompt": text}).json()
    assert reply["count"] == len(reply["tokens"]) == len(text.encode())
    assert reply["max_model_len"] == 2048
    assert call("POST", "/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}


def test_messages_are_tokenized_as_a_chat_would_be() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with_prompt = call("POST", "/tokenize", json={"messages": messages}).json()["tokens"]
    without = call("POST", "/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert bytes(with_prompt).decode() == "user: hi\nassistant: "
    assert bytes(without).decode() == "user: hi\n"


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 5}, {"prompt": "a", "x": 1}],
)
def test_tokenize_takes_either_a_prompt_or_messages(body: dict[str, object]) -> None:
    assert call("POST", "/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [320], [2**31], [2**63], ["a"], [True], [1.5], None, "a", [[1]]])
def test_detokenize_refuses_what_is_no_token(tokens: object) -> None:
    reply = call("POST", "/detokenize", json={"tokens": tokens})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("tokens")


def test_version_and_load_answer_what_a_router_wants() -> None:
    assert call("GET", "/version").json() == {"version": __version__}
    assert call("GET", "/load").json() == {
        "running": 0,
        "waiting": 0,
        "waiting_tokens": 0,
        "kv_usage": 0.0,
        "est_wait_ms": 250.0,
        "tau_rate": 1.5,
    }
