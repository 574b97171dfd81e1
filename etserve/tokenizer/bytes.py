"""Which bytes a token stands for, exactly. Knows the two spellings in use: byte-level BPE and SentencePiece pieces."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: its own where it is printable Latin-1, else U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in table.values():
            table[chr(0x100 + len(table) - len(printable))] = byte
    return table


_ALPHABET = byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Of a byte-level BPE token. One that is not spelled in the alphabet stands for itself, as in tokenizers."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def piece_bytes(token: str) -> bytes:
    """Of a SentencePiece piece: `<0xE2>` is one byte, the mark U+2581 a space."""
    match = _BYTE_PIECE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_SPACE_MARK, " ").encode("utf-8")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary writes bytes."""

    to_bytes: Callable[[str], bytes]
    drops_first_space: bool  # encoding put a space before the text, so decoding a whole text takes it away


def spelling_of(decoder: decoders.Decoder | None) -> Spelling | None:
    """Read off the decoder of a tokenizer.json; None where it is neither of the two."""
    if decoder is None:
        return None
    steps = _steps(json.loads(decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling(byte_level_bytes, drops_first_space=False)
    if not kinds & {"ByteFallback", "Metaspace"} and not _replaces_mark(steps):
        return None
    strips = any(step["type"] == "Strip" and step.get("start", 0) > 0 for step in steps)
    prepends = any(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
    return Spelling(piece_bytes, drops_first_space=strips or prepends)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    inner: list[dict[str, Any]] = decoder.get("decoders", [])
    return [step for part in inner for step in _steps(part)] if decoder["type"] == "Sequence" else [decoder]


def _replaces_mark(steps: list[dict[str, Any]]) -> bool:
    return any(step["type"] == "Replace" and step.get("pattern") == {"String": _SPACE_MARK} for step in steps)
