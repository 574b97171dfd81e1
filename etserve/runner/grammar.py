"""Output that must parse: JSON by llguidance (extra `structured`). Torch-free, so that the front end validates too."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etserve.errors import RequestError
from etserve.sampling_params import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
_ANY_OBJECT = '{"type": "object"}'
_PARAM = "response_format"


def validate_grammar(grammar: Grammar) -> None:
    """Raise RequestError unless `grammar` can be compiled within the bounds. The answer is remembered."""
    if problem := _problem(grammar):
        raise RequestError(problem, param=_PARAM, code="invalid_schema")


@functools.lru_cache(maxsize=256)  # at most 256 x 64 KiB of schema text
def _problem(grammar: Grammar) -> str:
    if grammar.kind == "json_schema" and (problem := _schema_problem(grammar.schema)):
        return problem
    try:
        import llguidance
    except ImportError:
        return "Structured output needs the extra 'structured': pip install 'etserve[structured]'."
    fault = llguidance.LLMatcher.validate_grammar(_compile(grammar), None, limits=_limits())
    if not fault or fault.startswith("WARNING"):
        return ""
    return "The JSON schema cannot be used: it is invalid, too complex, or has a keyword that is not supported."


def _schema_problem(text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
        return f"The JSON schema is longer than {MAX_SCHEMA_BYTES} bytes."
    if _depth(text) > MAX_SCHEMA_DEPTH:
        return f"The JSON schema is nested deeper than {MAX_SCHEMA_DEPTH}."
    try:
        schema = json.loads(text)
    except ValueError:
        return "The JSON schema is not valid JSON."
    return "" if isinstance(schema, dict) else "The JSON schema must be an object."


def _depth(text: str) -> int:
    """Deepest nesting of brackets outside strings, found before any recursive parser sees the text."""
    depth = deepest = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def _compile(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    schema = grammar.schema if grammar.kind == "json_schema" else _ANY_OBJECT
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=100_000, initial_lexer_fuel=500_000, verbose_errors=False)


class GrammarCompiler:
    """Makes matchers over one vocabulary. The vocabulary is handed to llguidance on first use."""

    def __init__(
        self,
        vocab_size: int,
        token_bytes: Callable[[int], bytes],
        special_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self._vocab_size = vocab_size
        self._token_bytes = token_bytes
        self._special_token_ids = list(special_token_ids)
        self._eos_token_ids = list(eos_token_ids)
        self._encode = encode

    @functools.cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Vocabulary(self)), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)

    def matcher(self, grammar: Grammar) -> "GrammarMatcher":
        """Raises RequestError if the grammar cannot be compiled."""
        from llguidance import LLMatcher

        validate_grammar(grammar)
        matcher = LLMatcher(self._tokenizer, _compile(grammar), log_level=0, limits=_limits())
        if matcher.is_error():
            raise RequestError("The JSON schema cannot be used with this model.", param=_PARAM, code="invalid_schema")
        return GrammarMatcher(matcher, self._vocab_size)


class _Vocabulary:
    """The vocabulary as llguidance's TokenizerWrapper reads it."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.eos_token_id = compiler._eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = compiler._special_token_ids
        self.tokens = [compiler._token_bytes(token_id) for token_id in range(compiler._vocab_size)]
        self._encode = compiler._encode

    def __call__(self, text: Any) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text only")  # llguidance asks by trying; it then sends text
        return self._encode(text)


class GrammarMatcher:
    """How far one sequence's output has been matched. Depends on its tokens alone: replay gives the same state."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._num_consumed = 0
        self._bits = np.zeros(-(-vocab_size // 32), np.int32)
        self._vocab_size = vocab_size

    def advance(self, output_token_ids: Sequence[int]) -> bool:
        """Consume the tokens not seen yet. False if the output has left the grammar or a limit was hit."""
        for token_id in output_token_ids[self._num_consumed :]:
            self._num_consumed += 1
            if not self._matcher.consume_token(token_id):
                return False
        return not self._matcher.is_error()

    def allowed(self) -> NDArray[np.bool_] | None:
        """Which tokens may come next, [vocab]; None if a limit was hit."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            return None
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(np.bool_)

    def is_complete(self, num_output_tokens: int) -> bool:
        """Nothing but the end may follow that many tokens.

        When more have been consumed (accepted drafts, which are told one by one) something did.
        """
        is_at_end = self._num_consumed <= num_output_tokens
        return is_at_end and bool(self._matcher.is_stopped()) and not self._matcher.is_error()
