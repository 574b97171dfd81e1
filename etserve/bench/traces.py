"""Arrival traces of real services: Azure's LLM inference CSV and Mooncake's JSONL. Knows no server, no tokenizer."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from etserve.bench.errors import BenchError

MOONCAKE_BLOCK_TOKENS = 512  # the tokens one entry of hash_ids stands for (Mooncake, FAST'25, trace README)
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One arrival. Equal leading `block_hashes` of two entries mean equal leading blocks of 512 prompt tokens."""

    arrival_seconds: float  # since the trace's first entry
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(
    path: Path, *, speedup: float = 1.0, limit: int | None = None, max_context: int | None = None
) -> list[TraceEntry]:
    """The first `limit` entries in order of arrival, `speedup` times as dense, clipped to `max_context` tokens.

    Clipping takes tokens off the prompt's end, then off the output; neither falls below one token.
    Raises BenchError naming file and line.
    """
    if not speedup > 0.0:
        raise BenchError(f"speedup must be above 0, got {speedup}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            parse = _mooncake if first.lstrip().startswith("{") else _azure
            entries = sorted(parse(path, lines), key=lambda entry: entry.arrival_seconds)[:limit]
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BenchError(f"{path}: not UTF-8 text") from None
    if not entries:
        raise BenchError(f"{path}: no entries")
    origin = entries[0].arrival_seconds
    return [
        replace(clip(entry, max_context), arrival_seconds=(entry.arrival_seconds - origin) / speedup)
        for entry in entries
    ]


def clip(entry: TraceEntry, max_context: int | None) -> TraceEntry:
    """Fit prompt and output into `max_context` tokens, the output into at most half of them."""
    if max_context is None or entry.num_prompt_tokens + entry.num_output_tokens <= max_context:
        return entry
    if max_context < 2:
        raise BenchError(f"max-context must be at least 2, got {max_context}")
    num_output = max(1, min(entry.num_output_tokens, max_context // 2))
    num_prompt = max(1, min(entry.num_prompt_tokens, max_context - num_output))
    num_blocks = -(-num_prompt // MOONCAKE_BLOCK_TOKENS)
    return TraceEntry(entry.arrival_seconds, num_prompt, num_output, entry.block_hashes[:num_blocks])


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceEntry]:
    rows = csv.reader(lines)
    header = next(rows, None)
    if header != _AZURE_COLUMNS:
        raise BenchError(f"{path}: neither an Azure CSV ({','.join(_AZURE_COLUMNS)}) nor Mooncake JSONL")
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        try:
            # Azure writes 7 decimals; datetime takes at most 6.
            at = datetime.fromisoformat(row[0].strip()[:26]).replace(tzinfo=UTC)
            entry = TraceEntry(at.timestamp(), int(row[1]), int(row[2]))
        except (ValueError, IndexError):
            raise BenchError(f"{path}: line {number} is not a timestamp and two counts") from None
        yield _checked(path, number, entry)


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceEntry]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise BenchError(f"{path}: line {number}: {error}") from None
        entry = TraceEntry(row.timestamp / 1000.0, row.input_length, row.output_length, tuple(row.hash_ids))
        needed = -(-row.input_length // MOONCAKE_BLOCK_TOKENS)
        if row.hash_ids and len(row.hash_ids) < needed:
            raise BenchError(f"{path}: line {number}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens")
        yield _checked(path, number, replace(entry, block_hashes=entry.block_hashes[:needed]))


def _checked(path: Path, number: int, entry: TraceEntry) -> TraceEntry:
    if entry.num_prompt_tokens < 1 or entry.num_output_tokens < 0:
        raise BenchError(f"{path}: line {number}: token counts must be positive")
    return replace(entry, num_output_tokens=max(1, entry.num_output_tokens))
