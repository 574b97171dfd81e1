"""`etserve bench` from the command line to its files, against a small server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etserve.bench import session
from etserve.bench.errors import BenchError
from etserve.bench.prepare import parse_lengths
from etserve.bench.workloads import Lengths
from etserve.cli.main import run
from tests.unit.bench_helpers import FakeServer, serving

UNIT_MODEL = str(Path(__file__).parents[1] / "data" / "unit_model")
Capture = pytest.CaptureFixture[str]
PNG = b"\x89PNG\r\n"


def test_a_workload_leaves_tables_a_result_file_and_a_plot(tmp_path: Path, capsys: Capture) -> None:
    out, plot = tmp_path / "r" / "w2.json", tmp_path / "w2.png"
    with serving(FakeServer(pause_seconds=0.001)) as server:
        code = run(
            [
                *[
                    "bench",
                    "serve",
                    "--url",
                    server.url + "/v1",
                    "-w",
                    "w2",
                    "--scale",
                    "0.25",
                    "--rounds",
                    "2",
                    "--seed",
                    "4",
                ],
                *[
                    "--tokenizer",
                    UNIT_MODEL,
                    "--slo-ttft",
                    "5000",
                    "-o",
                    str(out),
                    "--plot",
                    str(plot),
                    "--name",
                    "fake",
                ],
            ]
        )
    assert code == 0
    shown = capsys.readouterr().out
    assert "output tokens/s" in shown
    assert "8/8 complete" in shown
    found = session.read(out)
    assert (found.name, found.model, found.seed, len(found.rounds)) == ("fake", "fake-model", 4, 2)
    assert [len(each.records) for each in found.rounds] == [4, 4]
    assert all(r.prompt_tokens == r.prompt_tokens_asked == 32 for each in found.rounds for r in each.records)
    assert json.loads(out.read_text())["summaries"][0]["good_requests_per_second"] > 0.0
    assert plot.read_bytes().startswith(PNG)
    prompts = [body["prompt"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts) == 2 * (2 + 4)


@pytest.mark.parametrize("extra", [["--send-ids"], ["--api", "chat"]])
def test_ids_and_chat_are_counted_exactly_too(extra: list[str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    custom = ["-w", "custom", "-n", "3", "-c", "2", "--prompt-tokens", "60", "--output-tokens", "3"]
    with serving(FakeServer()) as server:
        assert (
            run(["bench", "serve", "--url", server.url, *custom, "--tokenizer", UNIT_MODEL, "-o", str(out), *extra])
            == 0
        )
    (only,) = session.read(out).rounds
    assert [record.prompt_tokens for record in only.records] == [60, 60, 60]


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 30, "output_length": 2, "hash_ids": [1]}\n'
        '{"timestamp": 4000, "input_length": 900, "output_length": 3, "hash_ids": [2, 3]}\n'
    )
    out = tmp_path / "result.json"
    with serving(FakeServer()) as server:
        arguments = ["--trace", str(trace), "--speedup", "20", "--max-context", "600", "--tokenizer", UNIT_MODEL]
        assert run(["bench", "serve", "--url", server.url, *arguments, "-o", str(out)]) == 0
    (only,) = session.read(out).rounds
    assert [(r.scheduled_seconds, r.prompt_tokens, r.output_tokens) for r in only.records] == [
        (0.0, 30, 2),
        (0.2, 597, 3),
    ]
    assert session.read(out).workload["trace"] == "trace.jsonl"


def test_a_server_that_fails_every_request_gives_a_nonzero_exit(capsys: Capture) -> None:
    with serving(FakeServer(faults=dict.fromkeys(range(99), "refuse"))) as server:
        arguments = ["-w", "W1", "--scale", "0.05", "--warmup", "0", "--tokenizer", UNIT_MODEL]
        assert run(["bench", "serve", "--url", server.url, *arguments]) == 2
    assert "429" in capsys.readouterr().err


def test_servers_are_compared_in_turns(tmp_path: Path, capsys: Capture) -> None:
    with serving(FakeServer()) as fast, serving(FakeServer(pause_seconds=0.01)) as slow:
        arguments = ["-w", "W1", "--scale", "0.1", "--rounds", "3", "--tokenizer", UNIT_MODEL, "--warmup", "1"]
        urls = ["--url", f"slow={slow.url}", "--url", f"fast={fast.url}"]
        files = ["-o", str(tmp_path), "--markdown", str(tmp_path / "t.md"), "--plot", str(tmp_path / "t.png")]
        assert run(["bench", "compare", *urls, *arguments, *files]) == 0
    assert [body["prompt"] for body in fast.bodies] == [body["prompt"] for body in slow.bodies]
    rows = (tmp_path / "t.md").read_text().splitlines()
    assert len(rows) == 4
    assert rows[2].endswith("| 1 (base) |")
    results = sorted(str(path) for path in tmp_path.glob("*.json"))
    assert len(results) == 2
    assert run(["bench", "compare", *results]) == 0
    assert "slow" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "lengths"), [("128", Lengths(128, 128)), ("32-512", Lengths(32, 512))])
def test_lengths_are_a_number_or_a_range(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "1-2-3", "many"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="token count"):
        parse_lengths(text)


def test_without_the_extra_the_command_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None; from etserve.cli.main import run; sys.exit(run(['bench', 'serve']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "etserve: aiohttp is not installed: pip install 'etserve[bench]'\n")


def test_the_load_generator_never_loads_torch() -> None:
    program = "import sys, etserve.bench.actions; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_peer_that_is_not_there_is_said() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "run_peers.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETSERVE_PEER")}
    environment["PYTHONPATH"] = str(script.parents[1])
    done = subprocess.run(
        [sys.executable, str(script), "--servers", "llama.cpp,vLLM"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 2
    assert "llama.cpp: not measured in bf16, ETSERVE_PEER_LLAMA_SERVER is not set" in done.stdout
    assert "vLLM: not measured in bf16, ETSERVE_PEER_VLLM_PYTHON is not set" in done.stdout
    assert "vLLM: not measured in q8_0, it does not run q8_0 weights" in done.stdout
