"""JSON as the edge takes it: UTF-8, finite numbers, whole characters, no key twice, no deep nesting."""

import json
import math
import re
from typing import Any, NoReturn

from etserve.errors import RequestError

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 20
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_INTEGER = re.compile(rf"\d{{{MAX_INTEGER_DIGITS + 1}}}")


def parse_json(body: bytes) -> Any:
    """Parse a request body. Raises RequestError with code "invalid_json"."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise _invalid("it is not UTF-8") from None
    try:
        # Hooks that run per number are set only where the text can need them: prompts may be long lists of ids.
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_short_integer if _LONG_INTEGER.search(text) else None,
        )
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE_ESCAPE.search(text):
        _check_characters(value)
    return value


def depth_of(value: Any) -> int:
    """Levels of lists and objects in a parsed value; 0 for a scalar."""
    depth, level = 0, [value]
    while True:
        level = [item for item in level if isinstance(item, list | dict)]
        if not level:
            return depth
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]


def _invalid(reason: str) -> RequestError:
    return RequestError(f"The request body is not valid JSON: {reason}.", code="invalid_json")


def _too_deep() -> RequestError:
    return _invalid(f"it is nested more than {MAX_DEPTH} levels deep")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _invalid("an object has the same key twice")
    return found


def _refuse_constant(_: str) -> NoReturn:
    raise _invalid("NaN and Infinity are no JSON numbers")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid("a number is too large")
    return value


def _short_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise _invalid("a number is too large")
    return int(text)


def _check_depth(value: Any) -> None:
    if depth_of(value) > MAX_DEPTH:
        raise _too_deep()


def _check_characters(value: Any) -> None:
    """Refuse a lone surrogate: it has no UTF-8 form, so nothing behind the edge could write it down."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise _invalid("a string holds half of a surrogate pair") from None
