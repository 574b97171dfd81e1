"""A model's chat template in transformers' immutable sandbox, bounded in time, output and arithmetic.

A template is code from the model's files and gets a client's words as data. A request can never bring a template.
"""

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etserve.errors import ModelError, RequestError

MAX_RENDER_SECONDS = 1.0
MAX_OUTPUT_RATIO = 4  # characters out per character in, beyond SPARE_OUTPUT
SPARE_OUTPUT = 64 * 1024
MAX_VALUE = 16 * 1024 * 1024  # elements of one computed string or list
MAX_EXPONENT = 64
MAX_TEMPLATE = 1024 * 1024  # characters of source

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class ChatTemplate:
    """Compiled on first use; `check` compiles now."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token, ... by name
        self._origin = origin  # the file, for messages

    def check(self) -> None:
        """Raise ModelError naming the file if the template does not compile."""
        _ = self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        if len(self._source) > MAX_TEMPLATE:
            raise ModelError(f"{self._origin}: the chat template is longer than {MAX_TEMPLATE} characters")
        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{self._origin}: the chat template does not parse: {_one_line(error)}") from None
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError):
            raise ModelError(f"{self._origin}: the chat template nests too deeply") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **options: object) -> str:
        """The prompt text. Raises RequestError with the template's own message."""
        limit = MAX_OUTPUT_RATIO * _num_characters(messages) + SPARE_OUTPUT
        chunks = self._template.generate(
            {"tools": None, "documents": None, **self._special_tokens, **options},
            messages=messages,
            add_generation_prompt=add_generation_prompt,
        )
        try:
            with _deadline(MAX_RENDER_SECONDS):
                return "".join(_bounded(chunks, limit))
        except RecursionError:
            raise _refusal("it recurses too deeply") from None
        except jinja2.TemplateError as error:
            raise RequestError(_one_line(error), param="messages", code="invalid_messages") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, TimeoutError) as error:
            raise _refusal(_one_line(error)) from None


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with the operators that make large values out of small ones watched."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > MAX_VALUE:
            raise jinja2.exceptions.SecurityError("The chat template computes a value that is too large.")
        return super().call_binop(context, operator, left, right)


def _environment() -> jinja2.Environment:
    """transformers' environment for chat templates, filters, globals and tags, under the bounds above."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs: jinja2.Environment = _compile_jinja_template("").environment
    ours = _BoundedEnvironment(trim_blocks=theirs.trim_blocks, lstrip_blocks=theirs.lstrip_blocks)
    ours.filters.update(theirs.filters)
    ours.globals.update(theirs.globals)
    ours.tests.update(theirs.tests)
    ours.extensions.update({name: extension.bind(ours) for name, extension in theirs.extensions.items()})
    return ours


def _result_size(operator: str, left: Any, right: Any) -> int:
    if operator == "**":
        is_small = isinstance(right, int | float) and abs(right) <= MAX_EXPONENT and abs(left) <= 1 << 32
        return 0 if is_small else MAX_VALUE + 1
    if operator == "*":
        sequence, count = (left, right) if hasattr(left, "__len__") else (right, left)
        if hasattr(sequence, "__len__") and isinstance(count, int):
            return len(sequence) * max(count, 0)
        return 0
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        return len(left) + len(right)
    if operator == "%" and isinstance(left, str):  # a width in a format makes any length
        return max((int(digits) for digits in re.findall(r"\d{1,18}", left)), default=0)
    return 0


def _bounded(chunks: Iterable[str], limit: int) -> Iterator[str]:
    length = 0
    for chunk in chunks:
        length += len(chunk)
        if length > limit:
            raise ValueError("its output is too long")
        yield chunk


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in template code that runs longer, also in a loop that puts nothing out.

    A trace function sees each line of this thread's template frames only; under a debugger it stands back.
    """
    end = time.monotonic() + seconds

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.startswith("<"):
            return None
        if time.monotonic() > end:
            raise TimeoutError("it takes too long")
        return trace

    if sys.gettrace() is not None:
        yield
        return
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def _num_characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _num_characters(item) for key, item in value.items())
    if isinstance(value, Sequence):
        return sum(_num_characters(item) for item in value)
    return 8


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"The chat template cannot render these messages: {reason}", param="messages", code="invalid_messages"
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return _ADDRESS.sub("...", text)
