"""Compiles schemas made to blow up and walks through what they allow: `python -m tests.engine.grammar_attack`.

The caller limits CPU time and memory; one line per schema says that it was lived through.
"""

import json
import random
from typing import Any

from etserve.errors import RequestError
from etserve.runner.grammar import GrammarCompiler
from etserve.sampling_params import Grammar

NUM_STEPS = 60
_STRING: dict[str, Any] = {"type": "string"}
_OPTIONAL = {"anyOf": [{"properties": {"a": {"const": j}}} for j in range(4)]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "quantifiers of quantifiers": {**_STRING, "pattern": "^((a{1,999}){1,999}){1,999}$"},
    "alternatives": {**_STRING, "pattern": "^(" + "|".join(f"(a|b|c){{{i}}}x" for i in range(200)) + ")$"},
    "states that double": {**_STRING, "pattern": "^(.*a.{60}|.*b.{60}|.*c.{60})$"},
    "a long string": {**_STRING, "minLength": 10**6, "maxLength": 10**9},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9},
    "any of many": {"anyOf": [{"properties": {f"k{i}_{j}": _STRING for j in range(20)}} for i in range(80)]},
    "all of any": {"allOf": [_OPTIONAL] * 30},
    "many names": {"type": "object", "properties": {f"p{i}": _STRING for i in range(1500)}},
    "many values": {"enum": [f"{i:08d}" for i in range(4000)]},
    "names by pattern": {"type": "object", "patternProperties": {"^(x{1,500}){1,500}$": {"type": "integer"}}},
    "left recursion": {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, _STRING]}}, "$ref": "#/$defs/n"},
    "a multiple": {"type": "integer", "multipleOf": 999_999_937, "minimum": 0, "maximum": 10**18},
}


def vocabulary(num_words: int = 30_000) -> list[bytes]:
    """Bytes, words of random letters, and an end token last."""
    rng = random.Random(1)
    words = [bytes(rng.choices(range(32, 127), k=rng.randint(2, 6))) for _ in range(num_words)]
    return [bytes([i]) for i in range(256)] + words + [b"<eos>"]


def walk(compiler: GrammarCompiler, schema: dict[str, Any], eos: int) -> str:
    """Draw among what the schema allows, for some steps; how it ended."""
    rng = random.Random(2)
    try:
        matcher = compiler.matcher(Grammar(kind="json_schema", schema=json.dumps(schema)))
    except RequestError:
        return "refused"
    drawn: list[int] = []
    for _ in range(NUM_STEPS):
        allowed = matcher.allowed()
        if allowed is None or not allowed.any():
            return "limited"
        drawn.append(rng.choice(allowed.nonzero()[0].tolist()))
        if drawn[-1] == eos or not matcher.advance(drawn):
            return "ended"
    return "running"


def main() -> None:
    tokens = vocabulary()
    eos = len(tokens) - 1
    compiler = GrammarCompiler(len(tokens), tokens.__getitem__, [eos], [eos], lambda text: list(text.encode()))
    for name, schema in SCHEMAS.items():
        print(f"{name}: {walk(compiler, schema, eos)}", flush=True)


if __name__ == "__main__":
    main()
