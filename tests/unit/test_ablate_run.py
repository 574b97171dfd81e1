"""The whole comparison on the unit model with tiny loads: every arm runs, the same again, and a report comes out."""

import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from etserve.bench.ablate import workloads as presets
from etserve.bench.ablate.arms import ARMS, select
from etserve.bench.ablate.drive import Driver
from etserve.bench.ablate.lab import Lab
from etserve.bench.ablate.progress import Estimate, Piece
from etserve.bench.ablate.reading import Reader
from etserve.bench.ablate.records import RoundRun
from etserve.bench.ablate.report import write_report
from etserve.bench.ablate.run import Comparison, Results, manifest
from etserve.bench.ablate.session import run_session
from etserve.bench.ablate.settings import plain
from etserve.bench.ablate.store import Store
from etserve.bench.ablate.workloads import SMOKE, STANDARD, Arrival, Preset
from etserve.bench.errors import BenchError
from etserve.bench.prompts import PromptMaker
from etserve.cli import main as cli
from etserve.config import Config, ControlConfig, EngineConfig
from etserve.engine.llm_engine import LLMEngine
from tests.unit.bench_helpers import UNIT_MODEL, unit_tokenizer

CONFIG = EngineConfig(model=str(UNIT_MODEL), dtype="float32", threads=1)
MAKER = PromptMaker(unit_tokenizer(), send_ids=True)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(CONFIG)


@pytest.fixture(scope="module")
def compared(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """The smoke preset, every workload and arm of it, and its report."""
    folder = tmp_path_factory.mktemp("ablation")
    found = comparison(lab, SMOKE, folder).run()
    write_report(found, {"model": "unit"}, folder)
    return found, folder


def comparison(
    lab: Lab, preset: Preset, folder: Path, arms: str | None = None, told: list[Piece] | None = None
) -> Comparison:
    chosen, base = select(arms), ControlConfig()
    store = Store(folder, manifest(lab, preset, chosen, base, 0))
    return Comparison(lab, preset, chosen, store, base, 0, (told if told is not None else []).append)


def all_rounds(found: Results) -> list[RoundRun]:
    return [run for arms in found.rounds.values() for runs in arms.values() for run in runs]


def test_every_arm_of_every_workload_answers_every_request(compared: tuple[Results, Path]) -> None:
    rounds = all_rounds(compared[0])
    assert {run.arm for run in rounds} == set(ARMS)
    for run in rounds:
        workload = next(each for each in SMOKE.workloads if each.name == run.workload)
        asked = presets.arrivals(workload, MAKER, run.seed)
        assert [(r.num_prompt_tokens, len(r.token_ids), r.error) for r in run.requests] == [
            (len(a.prompt_token_ids), a.num_output_tokens, None) for a in asked
        ]
        computed = sum(run.steps.num_decode_tokens) + sum(run.steps.num_prefill_tokens)
        read = 0 if run.prompts is not None else sum(r.num_prompt_tokens for r in run.requests)
        assert computed >= read + sum(len(r.token_ids) - 1 for r in run.requests)
        assert (run.prompts is not None) == workload.has_read_prompts


def test_arms_do_what_their_names_say(compared: tuple[Results, Path]) -> None:
    rounds = compared[0].rounds
    long = {name: runs[0] for name, runs in rounds["long-context"].items()}
    assert sum(long["baseline"].steps.num_blocks_skipped) == 0
    for name in ("meso", "random-blocks", "recent-blocks", "constant-epsilon", "full"):
        assert sum(long[name].steps.num_blocks_skipped) > 0
    assert sum(rounds["memory-bound"]["baseline"][0].steps.num_preempted) > 0
    short = {name: runs[0] for name, runs in rounds["short-chat"].items()}
    assert {t for r in short["baseline"].requests for t in r.temperatures} == {0.8}
    assert min(t for r in short["micro"].requests for t in r.temperatures) < 0.8
    fixed = {t for r in short["fixed-temperature"].requests for t in r.temperatures}
    drawn = [t for r in short["micro"].requests for t in r.temperatures]
    assert list(fixed) == [pytest.approx(sum(drawn) / len(drawn))]


def test_scheduling_changes_no_token(compared: tuple[Results, Path]) -> None:
    for arms in compared[0].rounds.values():
        for name in {"macro", "random-priority", "ngram"} & set(arms):
            for mine, theirs in zip(arms[name], arms["baseline"], strict=True):
                assert [r.token_ids for r in mine.requests] == [r.token_ids for r in theirs.requests]


def test_a_lossless_arm_writes_the_baselines_text(compared: tuple[Results, Path]) -> None:
    arms = compared[0].rounds["long-context"]
    for mine, theirs in zip(arms["lossless"], arms["baseline"], strict=True):
        assert [r.token_ids for r in mine.requests] == [r.token_ids for r in theirs.requests]


def test_a_dense_arms_replay_is_what_it_measured_itself(compared: tuple[Results, Path]) -> None:
    """Whatever preemption and company did meanwhile."""
    for run in all_rounds(compared[0]):
        for request in run.requests:
            assert request.replay is not None
            own = (request.tau_nats[-1], sum(request.entropies))
            if min(request.kept_fractions) == 1.0:
                assert (request.replay.tau_nats, request.replay.nats_resolved) == pytest.approx(own, rel=1e-5)


def test_quality_is_scored_for_the_arms_that_skip(compared: tuple[Results, Path]) -> None:
    quality = compared[0].quality
    skipping = {name for name, arm in ARMS.items() if "pruning" in arm.changes}
    assert set(quality) == {"baseline"} | skipping - {"lossless"}
    for run in quality.values():
        assert [len(each) for each in run.nll_nats] == [SMOKE.quality.scored_tokens] * SMOKE.quality.num_documents
        assert len(run.cloze_hits) == SMOKE.quality.num_cloze
        assert len(run.needle_hits) == SMOKE.quality.num_needles
    assert {share for each in quality["baseline"].kept_fractions for share in each} == {1.0}
    assert min(share for each in quality["meso"].kept_fractions for share in each) < 1.0


def test_the_report_shows_every_arm_and_its_pictures_exist(compared: tuple[Results, Path]) -> None:
    text = (compared[1] / "report.md").read_text()
    for name in (*ARMS, "Verdicts", "f_kv", "too few rounds", "was missed", "Where a step's time goes"):
        assert name in text
    pictures = re.findall(r"\((\S+\.png)\)", text)
    assert len(pictures) == 2 * len(SMOKE.workloads) + 1
    assert all((compared[1] / name).stat().st_size > 1000 for name in pictures)


def test_a_comparison_that_was_stopped_goes_on_and_runs_nothing_twice(
    compared: tuple[Results, Path], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, folder = compared
    lost = folder / "runs" / "short-chat.1.micro.json"
    lost.unlink()
    calls: list[int] = []
    real = Driver.run
    monkeypatch.setattr(Driver, "run", lambda self: (calls.append(1), real(self))[1])
    told: list[Piece] = []
    again = comparison(lab, SMOKE, folder, told=told)
    resumed = again.run()
    assert len(calls) == 1
    assert len(told) == again.num_pieces()
    assert sum(piece.weight for piece in told) == pytest.approx(again.total_weight())
    assert [piece.what for piece in told if piece.is_fresh] == ["short-chat, round 2, micro"]
    assert resumed.quality == found.quality
    before, after = found.rounds["short-chat"]["micro"][1], resumed.rounds["short-chat"]["micro"][1]
    assert [r.token_ids for r in after.requests] == [r.token_ids for r in before.requests]


def test_a_folder_takes_one_comparison_only(compared: tuple[Results, Path], lab: Lab) -> None:
    with pytest.raises(BenchError, match="other settings"):
        comparison(lab, SMOKE, compared[1], arms="micro")


def test_a_damaged_result_is_named_and_not_trusted(tmp_path: Path) -> None:
    store = Store(tmp_path, {"a": 1})
    (tmp_path / "runs" / "w.0.micro.json").write_text("{")
    with pytest.raises(BenchError, match=r"w\.0\.micro\.json"):
        store.round("micro", "w", 0)
    assert store.round("micro", "w", 1) is None


# --- the driver


def test_a_closed_loop_keeps_its_number_open_and_an_open_one_waits_for_the_clock(lab: Lab) -> None:
    asked = [Arrival(i, [65 + i] * 20, 4, 10.0 * i, i) for i in range(3)]
    clock = [0.0]

    def engine() -> LLMEngine:
        return lab.engine(ControlConfig(), 0, num_kv_blocks=64)

    def now() -> float:
        clock[0] += 0.001
        return clock[0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    late, _ = Driver(engine(), asked, None, 0.8, now, sleep).run()
    assert [run.due_seconds for run in late] == [0.0, 10.0, 20.0]
    assert all(run.token_seconds[0] > run.due_seconds for run in late)
    one, steps = Driver(engine(), [due_at_once(a) for a in asked], 1, 0.8).run()
    assert max(steps.num_decode_tokens) == 1
    assert one[1].due_seconds >= one[0].end_seconds
    assert [run.token_ids for run in one] == [run.token_ids for run in late]


def due_at_once(arrival: Arrival) -> Arrival:
    return Arrival(arrival.index, arrival.prompt_token_ids, arrival.num_output_tokens, 0.0, arrival.seed)


def test_replaying_twice_gives_the_same_though_the_memory_knows_the_prompt(lab: Lab) -> None:
    asked = [Arrival(0, list(range(65, 105)), 40, 0.0, 1)]
    runs, _ = Driver(lab.engine(ControlConfig(), 0, num_kv_blocks=64), asked, None, 1.0).run()
    memory = lab.memory(0, 64)
    reader = Reader(lab.loaded().decoder, memory)
    first = reader.replay(asked, runs)
    assert reader.replay(asked, runs) == first
    assert first[0].entropies == pytest.approx(runs[0].entropies, abs=1e-5)
    assert memory.manager.num_active_blocks == 0
    memory.manager.audit()


def test_arms_that_share_a_memory_read_no_prompt_and_write_the_same(lab: Lab) -> None:
    asked = [Arrival(i, [65 + i] * (40 + i), 12, 0.0, i) for i in range(3)]
    memory = lab.memory(2, 64)
    Reader(lab.loaded(2).decoder, memory).prime(asked)
    for _ in range(2):
        engine = lab.engine(ControlConfig(), 2, num_kv_blocks=64, memory=memory)
        shared, steps = Driver(engine, asked, None, 0.8).run()
        assert sum(steps.num_prefill_tokens) < sum(len(a.prompt_token_ids) for a in asked) // 2
        alone, _ = Driver(lab.engine(ControlConfig(), 0, num_kv_blocks=64), asked, None, 0.8).run()
        assert [run.token_ids for run in shared] == [run.token_ids for run in alone]


def test_the_time_left_follows_the_pace_of_what_is_run_now() -> None:
    clock = [0.0]
    estimate = Estimate(10.0, lambda: clock[0])
    assert estimate.add(Piece("old", 4.0, is_fresh=False)) is None
    clock[0] = 6.0
    assert estimate.add(Piece("new", 2.0, is_fresh=True)) == pytest.approx(12.0)
    assert estimate.add(Piece("old", 3.0, is_fresh=False)) == pytest.approx(3.0)


# --- presets and options


@pytest.mark.parametrize("preset", [SMOKE, STANDARD])
def test_presets_name_known_arms_and_placebos_come_with_their_law(preset: Preset) -> None:
    for workload in preset.workloads:
        assert set(workload.arms) <= set(ARMS)
        assert "baseline" in workload.arms
        matched = [ARMS[name] for name in workload.arms if ARMS[name].matches is not None]
        assert all(arm.placebo_of in workload.arms for arm in matched)
    assert {name for workload in preset.workloads for name in workload.arms} == set(ARMS)


def test_standard_has_intervals_and_the_loads_of_the_claim() -> None:
    assert STANDARD.rounds >= 5
    assert STANDARD.few_rounds >= 3
    for workload in STANDARD.workloads:
        claimed = [name for name in workload.arms if STANDARD.rounds_of(workload, name) == STANDARD.rounds]
        assert {"baseline", "full"} <= set(claimed)
    long = next(each for each in STANDARD.workloads if each.name == "long-context")
    assert long.load.num_requests >= 8
    assert long.load.prompt_tokens.low >= 3000
    assert long.load.prompt_tokens.high + long.load.output_tokens.high <= 8192
    memory = next(each for each in STANDARD.workloads if each.name == "memory-bound")
    asked = [Arrival(i, [0] * 1024, 128, 0.0, i) for i in range(memory.load.num_requests)]
    assert presets.pool_blocks(memory, asked) < 0.7 * presets.blocks_of(asked)
    assert presets.pool_blocks(long, asked) > 0.6 * presets.blocks_of(asked)


def test_arms_are_asked_the_same_and_rounds_are_not() -> None:
    workload = SMOKE.workloads[0]
    assert presets.arrivals(workload, MAKER, 3) == presets.arrivals(workload, MAKER, 3)
    assert presets.arrivals(workload, MAKER, 3) != presets.arrivals(workload, MAKER, 1003)


def test_a_workload_longer_than_the_context_is_refused_before_anything_runs(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="long-context asks for"):
        comparison(lab, presets.choose("standard", "long-context"), tmp_path)
    with pytest.raises(BenchError, match="unknown workload"):
        presets.choose("smoke", "w9")


def test_settings_that_switch_something_on_are_taken_back_for_the_baseline() -> None:
    asked = ControlConfig(
        temperature_mode="cool",
        target_entropy_nats=2.0,
        pruning="on",
        priority_mode="paper",
        speculation="ngram",
        eviction="pressure",
    )
    assert plain(asked) == ControlConfig(target_entropy_nats=2.0)


def test_the_command_writes_a_report_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--preset", "smoke", "--workloads", "short-chat", "--rounds", "1", "--arms", "macro"]
    model = [str(UNIT_MODEL), "--dtype", "float32", "--threads", "1"]
    assert cli.run(["ablate", *model, *chosen, "--out", str(tmp_path / "out")]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert "unit_model, 0.8 M parameters, float32" in path.read_text()


def test_an_unknown_arm_is_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="unknown arm"):
        run_session(Config(engine=CONFIG), Console(quiet=True), preset="smoke", out=tmp_path, arms="meta")


@pytest.mark.parametrize(
    "option",
    [
        "--no-prefix-caching",
        "--max-num-seqs=4",
        "--max-step-tokens=64",
        "--num-kv-blocks=99",
        "--kv-memory-bytes=99",
        "--pruning-sketch-bits=1",
        "--pruning=on",
        "--kv-protect",
    ],
)
def test_an_option_that_would_change_nothing_is_not_offered(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["ablate", str(UNIT_MODEL), option, "--preset", "smoke", "--out", str(tmp_path / "out")]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err


def test_settings_that_change_nothing_in_a_comparison_are_no_part_of_it(lab: Lab) -> None:
    def told(of: Lab) -> dict[str, object]:
        return manifest(of, SMOKE, select(None), ControlConfig(), 0)

    sized = Lab(msgspec.structs.replace(CONFIG, max_num_seqs=4, num_kv_blocks=99, prefix_caching=False))
    assert told(sized) == told(lab)
    assert told(Lab(msgspec.structs.replace(CONFIG, dtype="bfloat16"))) != told(lab)
    engine = sized.engine(ControlConfig(), 0, num_kv_blocks=64)
    assert (engine.info.num_kv_blocks, engine.info.max_num_seqs) == (64, 64)
    assert engine._scheduler.kv.prefix_caching
