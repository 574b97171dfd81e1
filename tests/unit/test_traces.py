"""Arrival traces are read as their publishers wrote them, and a bad line is named."""

from pathlib import Path

import pytest

from etserve.bench.errors import BenchError
from etserve.bench.traces import TraceEntry, clip, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,12,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1030, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_azure_trace_is_sorted_by_arrival_and_starts_at_zero(tmp_path: Path) -> None:
    entries = read_trace(written(tmp_path, AZURE.replace("\n", "\r\n")))
    assert [(e.num_prompt_tokens, e.num_output_tokens) for e in entries] == [(374, 44), (12, 1), (396, 109)]
    assert [e.arrival_seconds for e in entries] == pytest.approx([0.0, 1.31941, 4.314579], abs=1e-5)


def test_a_mooncake_trace_keeps_its_block_hashes(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, MOONCAKE)) == [
        TraceEntry(0.0, 1030, 50, (0, 1, 2)),
        TraceEntry(3.0, 600, 9, (0, 7)),
    ]


def test_speedup_limit_and_clipping_act_together(tmp_path: Path) -> None:
    entries = read_trace(written(tmp_path, MOONCAKE), speedup=10.0, max_context=640)
    assert entries == [TraceEntry(0.0, 590, 50, (0, 1)), TraceEntry(0.3, 600, 9, (0, 7))]
    assert len(read_trace(written(tmp_path, AZURE), limit=2)) == 2


@pytest.mark.parametrize(("num_in", "num_out"), [(100_000, 50), (5, 100_000), (700, 700), (1, 1)])
def test_a_clipped_entry_fits_and_keeps_a_token_on_each_side(num_in: int, num_out: int) -> None:
    entry = clip(TraceEntry(0.0, num_in, num_out), 1024)
    assert entry.num_prompt_tokens + entry.num_output_tokens <= 1024
    assert entry.num_prompt_tokens >= 1
    assert entry.num_output_tokens >= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither"),
        ("a,b\n1,2\n", "neither"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no entries"),
        (AZURE + "yesterday,1,2\n", "line 5"),
        (AZURE + "2023-11-16 18:15:48.0000000,1\n", "line 5"),
        (AZURE + "2023-11-16 18:15:48.0000000,0,2\n", "line 5"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 3"),
        (MOONCAKE + "{nonsense\n", "line 3"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 2000, "output_length": 1, "hash_ids": [1]}\n', "line 3"),
        (MOONCAKE + '{"timestamp": 1, "input_length": -5, "output_length": 1}\n', "line 3"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        read_trace(written(tmp_path, text))


def test_a_missing_or_binary_file_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        read_trace(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BenchError, match="UTF-8"):
        read_trace(tmp_path / "binary")


def test_speedup_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="speedup"):
        read_trace(written(tmp_path, AZURE), speedup=0.0)
