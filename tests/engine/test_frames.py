"""The border to the engine process: whatever comes, it is a message or a typed error."""

import pickle
import random
import socket
import struct

import msgspec
import pytest

from etserve.config import EngineConfig
from etserve.engine import frames
from etserve.engine.frames import (
    AbortRequest,
    AddRequest,
    Configure,
    EngineChannel,
    FrameBuffer,
    FrameError,
    Ready,
    Shutdown,
    StartFailed,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from etserve.outputs import GenerateRequest
from etserve.sampling_params import Grammar, SamplingParams

REQUEST = GenerateRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    params=SamplingParams(seed=2**63 - 1, logit_bias={5: -1.5}, grammar=Grammar(kind="json_object"), stop=("a", "b")),
    cache_salt=b"\x00salt",
    forced_output=[[7, 8]],
)
TO_ENGINE = [Configure(EngineConfig()), AddRequest(REQUEST), AbortRequest("r"), Shutdown()]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_a_message_comes_out_as_it_went_in(message: frames.ToEngine) -> None:
    (body,) = FrameBuffer().feed(encode(message))
    assert decode_to_engine(body) == message


def test_frames_are_cut_out_of_any_split_of_the_stream() -> None:
    stream = b"".join(encode(message) for message in TO_ENGINE)
    for size in (1, 2, 3, 7, 64, len(stream)):
        buffer, found = FrameBuffer(), []
        for begin in range(0, len(stream), size):
            found += [decode_to_engine(body) for body in buffer.feed(stream[begin : begin + size])]
        assert found == TO_ENGINE


def test_garbage_is_a_typed_error_and_runs_nothing() -> None:
    generator = random.Random(0)
    valid = encode(AddRequest(REQUEST))[4:]
    for attempt in range(20_000):
        kind = attempt % 4
        if kind == 0:
            body = generator.randbytes(generator.randrange(200))
        elif kind == 1:
            position = generator.randrange(len(valid))
            body = valid[:position] + generator.randbytes(1) + valid[position + 1 :]
        elif kind == 2:
            body = valid[: generator.randrange(len(valid))]
        else:
            body = pickle.dumps((exit, attempt))
        try:
            decode_to_engine(body)
        except FrameError:
            continue
        assert kind == 1  # a changed byte may leave a valid message: nothing else can


def test_nested_garbage_does_not_exhaust_the_stack() -> None:
    with pytest.raises(FrameError):
        decode_from_engine(b"\x91" * 1_000_000)


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(FrameError):
        decode_from_engine(encode(Shutdown())[4:])
    with pytest.raises(FrameError):
        decode_to_engine(encode(StartFailed("model", "x"))[4:])


def test_a_length_over_the_cap_is_refused_before_its_body_comes() -> None:
    with pytest.raises(FrameError):
        FrameBuffer().feed(struct.pack(">I", frames.MAX_FRAME_BYTES + 1))


def test_a_message_over_the_cap_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError):
        encode(AbortRequest("x" * 200))


def test_the_engine_end_waits_only_when_asked() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = EngineChannel(theirs)
        assert channel.receive(wait=False) == []
        ours.sendall(encode(AbortRequest("a")) + encode(AbortRequest("b")) + encode(Shutdown())[:5])
        assert channel.receive(wait=True) == [AbortRequest("a"), AbortRequest("b")]
        ours.sendall(encode(Shutdown())[5:])
        assert channel.receive(wait=False) == [Shutdown()]


def test_the_engine_end_learns_that_the_front_is_gone() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        EngineChannel(theirs).receive(wait=True)


def test_unknown_fields_are_ignored_but_wrong_types_are_not() -> None:
    body = msgspec.msgpack.encode({"type": "AbortRequest", "request_id": 5})
    with pytest.raises(FrameError):
        decode_to_engine(body)
    assert Ready.__struct_config__.tag == "Ready"
