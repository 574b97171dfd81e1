"""A profile of a step counts what the engine counts, and says so in a table and a picture."""

from pathlib import Path

import msgspec
import pytest
import torch

from etserve.bench import ceilings, step_report
from etserve.bench.ablate.lab import Lab
from etserve.bench.ceilings import Ceilings
from etserve.bench.contexts import TextContexts
from etserve.bench.errors import BenchError
from etserve.bench.prompts import shipped_corpus
from etserve.bench.step import StepReport, profile_steps
from etserve.cli import main as cli
from etserve.cli.bench_step import counts
from etserve.config import BLOCK_SIZE, ControlConfig, EngineConfig
from etserve.outputs import GenerateRequest
from etserve.sampling_params import SamplingParams
from tests.unit.bench_helpers import UNIT_MODEL

CONFIG = EngineConfig(model=str(UNIT_MODEL), dtype="float32", threads=1)
SKIPPING = msgspec.structs.replace(
    CONFIG, pruning_sketch_bits=2, control=ControlConfig(pruning="on", epsilon=0.3, jump_nats=50.0)
)


@pytest.fixture(scope="module")
def report() -> StepReport:
    return profile_steps(Lab(CONFIG), [1, 3], [33, 129], 4)


@pytest.fixture(scope="module")
def skipping() -> StepReport:
    return profile_steps(Lab(SKIPPING), [1, 3], [700, 1001], 5)


def test_every_batch_is_profiled_at_every_context(report: StepReport) -> None:
    shapes = [(each.num_sequences, each.context_tokens) for each in report.profiles]
    assert shapes == [(1, 33), (3, 33), (1, 129), (3, 129)]
    for each in report.profiles:
        assert set(each.phases) == {"setup", "elementwise", "matrices", "kv_write", "attention", "head"}
        assert all(seconds > 0.0 for seconds in each.phases.values())
        assert each.ceiling_seconds > 0.0


def test_bytes_are_the_weights_once_and_the_cache_of_every_sequence(report: StepReport) -> None:
    spec = Lab(CONFIG).loaded().spec
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    for each in report.profiles:
        of_cache = each.bytes_read - each.weight_bytes
        context = of_cache / each.num_sequences / token_bytes
        assert each.context_tokens <= context <= each.context_tokens + 8 + BLOCK_SIZE


def test_the_ceiling_is_the_slower_bound_of_the_matrices_and_the_cache() -> None:
    limits = Ceilings(gb_per_second=10.0, gflop_per_second=100.0)
    assert limits.seconds(weight_bytes=2e9, kv_bytes=1e9, flops=1e9) == pytest.approx(0.3)
    assert limits.seconds(weight_bytes=2e9, kv_bytes=1e9, flops=1e11) == pytest.approx(1.1)
    assert limits._replace(gflop_per_second=None).seconds(2e9, 1e9, 1e11) == pytest.approx(0.3)
    measured = ceilings.measure(torch.float32, passes=1)
    assert measured.gb_per_second > 0.0
    assert measured.gflop_per_second is not None
    assert measured.gflop_per_second > 0.0


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [({"dtype": "bfloat16"}, True), ({"dtype": "float16"}, False), ({"quantize": "q8_0"}, False)],
)
def test_products_have_a_ceiling_where_one_is_measured_in_their_format(
    settings: dict[str, str], is_known: bool
) -> None:
    found = profile_steps(Lab(msgspec.structs.replace(CONFIG, **settings)), [1], [33], 3)
    row = dict(zip(step_report.HEADER, step_report.table(found)[0], strict=True))
    assert (found.gflop_per_second is not None) is is_known
    assert ("%" in row["GFLOP/s (of the ceiling)"]) is is_known
    assert ("bytes alone" in step_report.facts(found)) is not is_known
    assert "%" in row["GB/s (of the ceiling)"]


def test_table_and_picture_hold_every_row(report: StepReport, tmp_path: Path) -> None:
    text = step_report.as_markdown(report)
    assert len(text.splitlines()) == 4 + len(report.profiles)
    assert "GB/s read" in text
    step_report.draw(report, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 10_000
    with pytest.raises(BenchError, match="missing"):
        step_report.draw(report, tmp_path / "missing" / "step.png")


def test_what_is_left_over_is_pythons_and_never_negative(report: StepReport) -> None:
    slow = msgspec.structs.replace(report.profiles[0], step_seconds=10.0, schedule_seconds=1.0, row_seconds=2.0)
    assert slow.python_seconds == pytest.approx(7.0 - sum(slow.phases.values()))
    assert msgspec.structs.replace(slow, step_seconds=0.1).python_seconds == 0.0


def test_what_cannot_be_profiled_is_said() -> None:
    with pytest.raises(BenchError, match="leave 9 of"):
        profile_steps(Lab(CONFIG), [1], [100_000], 9)
    with pytest.raises(BenchError, match="native"):
        profile_steps(Lab(msgspec.structs.replace(CONFIG, backend="torch")), [1], [32], 3)
    for text in ("", "0,1", "a"):
        with pytest.raises(BenchError, match="positive"):
            counts(text, "contexts")
    assert counts("8, 1,8", "sequences") == [1, 8]


def test_the_command_prints_the_table_and_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.json")]
    sizes = ["--sequences", "2", "--contexts", "48", "--steps", "3"]
    options = ["--dtype", "float32", "--threads", "1"]
    assert cli.run(["bench", "step", str(UNIT_MODEL), *options, *sizes, *files]) == 0
    assert "| 2 | 48 |" in capsys.readouterr().out
    assert msgspec.json.decode((tmp_path / "a.json").read_bytes(), type=StepReport).profiles[0].num_sequences == 2


def test_where_blocks_are_skipped_only_what_is_kept_counts(skipping: StepReport) -> None:
    decoder, spec = Lab(SKIPPING).loaded(2).decoder, Lab(SKIPPING).loaded(2).spec
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * 4
    sketch_bytes = decoder.kv_bytes_per_block() / spec.num_layers / BLOCK_SIZE - token_bytes
    assert sketch_bytes > 0
    for each in skipping.profiles:
        assert 0.0 < each.kept_share < 0.9
        assert each.num_steps == 5  # all of them: the faster ones would be those that skip most
        context = each.context_tokens + 5.0  # in the middle of the steps
        read = spec.num_layers * (token_bytes * (each.kept_share * context + 1) + sketch_bytes * context)
        assert each.bytes_read - each.weight_bytes == pytest.approx(each.num_sequences * read, rel=0.02)


def test_a_longer_context_is_skipped_in_a_larger_part(skipping: StepReport) -> None:
    shares = {(each.num_sequences, each.context_tokens): each.kept_share for each in skipping.profiles}
    assert shares[3, 1001] < shares[3, 700]


def test_dense_steps_keep_everything(report: StepReport) -> None:
    assert {each.kept_share for each in report.profiles} == {1.0}
    assert "Settings" not in step_report.facts(report)


def test_what_is_skipped_in_is_text_and_no_two_sequences_share_a_block() -> None:
    lab = Lab(SKIPPING)
    prompts = TextContexts(lab, 2).prompts(4, 700)
    assert [len(prompt) for prompt in prompts] == [700] * 4
    assert len({tuple(prompt[:BLOCK_SIZE]) for prompt in prompts}) == 4
    assert lab.tokenizer.decode(prompts[0][-300:-20]).strip() in shipped_corpus()
    assert prompts == TextContexts(lab, 2).prompts(4, 700)


def test_the_text_is_read_once_for_all_batch_sizes() -> None:
    lab = Lab(SKIPPING)
    contexts = TextContexts(lab, 2)
    memory = contexts.memory(2, 720)
    prompts = contexts.prompts(2, 700)
    contexts.prepare(memory, prompts)
    engine = lab.engine(ControlConfig(), 2, num_kv_blocks=memory.cache.num_blocks - 1, memory=memory)
    params = SamplingParams(max_tokens=1)
    engine.add_request(GenerateRequest(request_id="a", prompt_token_ids=prompts[1], params=params))
    outputs, _ = engine.step()
    assert outputs[0].num_cached_tokens == 700 // BLOCK_SIZE * BLOCK_SIZE
    assert memory.manager.num_cached_blocks >= 2 * (700 // BLOCK_SIZE)


@pytest.mark.parametrize(
    "control",
    [
        ControlConfig(speculation="ngram"),
        ControlConfig(pruning="on", verify="bounded"),
        ControlConfig(eviction="pressure"),
    ],
)
def test_steps_of_another_make_up_are_refused(control: ControlConfig) -> None:
    with pytest.raises(BenchError, match="not profiled"):
        profile_steps(Lab(msgspec.structs.replace(SKIPPING, control=control)), [1], [48], 3)


def test_the_command_honours_the_control_settings(capsys: pytest.CaptureFixture[str]) -> None:
    arms = str(Path(__file__).parents[2] / "configs" / "entropic.toml")
    sizes = ["--sequences", "2", "--contexts", "900", "--steps", "4"]
    options = ["--dtype", "float32", "--threads", "1", "--config", arms, "--epsilon", "0.4"]
    assert cli.run(["bench", "step", str(UNIT_MODEL), *options, *sizes]) == 0
    shown = capsys.readouterr().out
    for setting in ("pruning on", "epsilon 0.4", "temperature_mode cool", "pruning_sketch_bits 2"):
        assert setting in shown
    row = next(line for line in shown.splitlines() if line.startswith("| 2 | 900 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert 0 < int(cells[step_report.HEADER.index("blocks read")].rstrip("%")) < 90


@pytest.mark.parametrize("option", ["--no-prefix-caching", "--max-num-seqs=4", "--num-kv-blocks=99"])
def test_an_option_that_changes_no_profile_is_not_offered(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sequences", "1", "--contexts", "48", "--steps", "3"]
    assert cli.run(["bench", "step", str(UNIT_MODEL), *sizes, option]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err
