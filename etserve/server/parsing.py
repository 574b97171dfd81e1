"""From a body to a checked schema. Every refusal names the field and the problem, and quotes no value."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from etserve.errors import RequestError
from etserve.server.faults import http_error
from etserve.server.schemas import ENTROPIC_NOT_OFFERED, MAX_LOGIT_BIAS, NOT_OFFERED, Strict
from etserve.server.strict_json import parse_json

MAX_FIELDS = 128  # of the top object: no route knows as many
MAX_NAME_CHARACTERS = 96  # of a field's name that is said back
INLINE_BODY_BYTES = 32 * 1024  # larger bodies are parsed off the event loop

Schema = TypeVar("Schema", bound=Strict)


async def read_request(request: Request, schema: type[Schema]) -> Schema:
    """Read, parse and check a JSON body.

    Raises HttpError (408, 413, 415) or RequestError.
    """
    content_type = request.headers.get("content-type", "")
    media_type, _, parameters = content_type.partition(";")
    if media_type.strip().lower() != "application/json" or not _is_utf8(parameters):
        raise http_error(415, "The content type must be application/json in UTF-8.", code="unsupported_media_type")
    body = await request.body()
    if len(body) <= INLINE_BODY_BYTES:
        return check(parse_json(body), schema)
    return await asyncio.to_thread(lambda: check(parse_json(body), schema))


def check(value: Any, schema: type[Schema]) -> Schema:
    """Validate parsed JSON against a schema. Raises RequestError for the first problem found."""
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_type")
    if len(value) > MAX_FIELDS:
        raise RequestError(f"The request has more than {MAX_FIELDS} fields.", code="too_many_fields")
    _check_sizes(value)
    offered = {k: v for k, v in value.items() if v is not None or k not in NOT_OFFERED or k in schema.model_fields}
    try:
        return schema.model_validate(offered)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refusal(first["type"], first["loc"], first["msg"], offered) from None


def _check_sizes(value: Mapping[str, Any]) -> None:
    """Bound the free-form objects before the schema looks at each of their entries."""
    for name, most in (("logit_bias", MAX_LOGIT_BIAS), ("metadata", 16)):
        entries = value.get(name)
        if isinstance(entries, dict) and len(entries) > most:
            raise RequestError(f"`{name}` takes at most {most} entries.", param=name, code="too_long")


def _refusal(kind: str, location: tuple[str | int, ...], message: str, value: Any) -> RequestError:
    param = _spell(location, value)
    if kind != "extra_forbidden":
        code = "unsupported_parameter" if kind == "not_offered" else "invalid_value"
        return RequestError(f"`{param}`: {message}.", param=param, code=code)
    parent = location[0] if len(location) > 1 else None
    name = location[-1]
    if (parent is None and name in NOT_OFFERED) or (parent == "entropic" and name in ENTROPIC_NOT_OFFERED):
        return RequestError(f"`{param}` is not offered by this server.", param=param, code="unsupported_parameter")
    return RequestError(f"`{param}` is not a known field.", param=param, code="unknown_parameter")


def _spell(location: tuple[str | int, ...], value: Any) -> str:
    """Spell an error's place as the client wrote it: `messages[2].content`.

    The validator also puts the branch of a union into the place; what is no key of the value is left out.
    """
    text = ""
    for depth, part in enumerate(location):
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            text += f"[{part}]"
            value = value[part]
        elif isinstance(value, dict) and (part in value or depth == len(location) - 1):
            text += f".{part}" if text else str(part)
            value = value.get(part)
    return text[:MAX_NAME_CHARACTERS]


def _is_utf8(parameters: str) -> bool:
    name, _, charset = parameters.strip().partition("=")
    return name.strip().lower() != "charset" or charset.strip(' "').lower() in ("utf-8", "utf8")
