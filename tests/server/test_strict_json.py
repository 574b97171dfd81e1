"""What the edge takes for JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etserve.errors import RequestError
from etserve.server.strict_json import MAX_DEPTH, depth_of, parse_json

HOSTILE = {
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": Infinity}',
    "minus infinity": b'{"a": -Infinity}',
    "1e999": b'{"a": 1e999}',
    "-1e999": b'{"a": -1e999}',
    "huge integer": b'{"a": ' + b"9" * 5000 + b"}",
    "long integer": b'{"a": ' + b"9" * 40 + b"}",
    "high surrogate": b'{"a": "\\ud800"}',
    "low surrogate": b'{"a": "\\uDFFF"}',
    "surrogates in the wrong order": b'{"a": "\\udc00\\ud800"}',
    "surrogate in a key": b'{"\\ud800": 1}',
    "surrogate deep inside": b'{"a": [1, {"b": ["x", "\\udabc"]}]}',
    "raw surrogate": b'{"a": "\xed\xa0\x80"}',
    "duplicate key": b'{"a": 1, "a": 1}',
    "duplicate key by escape": b'{"a": 1, "\\u0061": 2}',
    "duplicate key deep inside": b'{"a": [{"b": 1, "b": 2}]}',
    "deep lists": b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
    "very deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 65 + b"1" + b"}" * 65,
    "unclosed": b"[" * 100_000,
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "utf-16 le": '{"a": 1}'.encode("utf-16-le"),
    "utf-32": '{"a": 1}'.encode("utf-32"),
    "latin-1": '{"a": "é"}'.encode("latin-1"),
    "overlong": b'{"a": "\xc0\xaf"}',
    "empty": b"",
    "blank": b"  ",
    "nul": b'{"a": 1}\x00',
    "control character": b'{"a": "\x01"}',
    "trailing comma": b'{"a": 1,}',
    "comment": b'{"a": 1} // x',
    "two values": b'{"a": 1}{"a": 1}',
    "single quotes": b"{'a': 1}",
    "leading zero": b'{"a": 01}',
    "plus": b'{"a": +1}',
    "hex": b'{"a": 0x10}',
    "bare": b'{"a": b}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_json_is_refused_without_quoting_it(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(body)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\\ud83d\\ude00"}',
        b'{"a": "\\\\ud800"}',
        b'{"a": 1e308, "b": -0.0, "c": 9223372036854775808}',
        b'{"a": "99999999999999999999999999"}',
        b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"a": "' + b"[" * 200 + b'"}',
        b'{"a": "NaN"}',
        '{"a": "\U0001f600 \u4e2d"}'.encode(),
    ],
)
def test_lawful_json_is_taken(body: bytes) -> None:
    assert parse_json(body) == json.loads(body)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=30,
)  # fmt: skip


@given(_VALUES)
@settings(max_examples=200, deadline=None)
def test_what_the_standard_writes_is_read_the_same(value: object) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")) == value
    assert parse_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=64))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_json_or_a_refusal(body: bytes) -> None:
    try:
        value = parse_json(body)
    except RequestError:
        return
    assert value == json.loads(body)


def _depth_by_recursion(value: object) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max((_depth_by_recursion(child) for child in children), default=0)


@given(_VALUES)
@settings(max_examples=100, deadline=None)
def test_depth_equals_its_recursive_definition(value: object) -> None:
    assert depth_of(value) == _depth_by_recursion(value)
    assert MAX_DEPTH == 64
