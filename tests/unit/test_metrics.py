"""The recorder: step reports and finished choices become series; labels stay within closed sets."""

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from etserve import __version__
from etserve.metrics.recorder import Metrics
from etserve.outputs import EntropySummary, RequestTimings, SequenceOutput, StepStats
from tests.fakes import fake_model_info


def make_stats(**changes: object) -> StepStats:
    facts: dict[str, object] = {
        "step": 1, "step_seconds": 0.25, "schedule_seconds": 0.05, "num_prefill_tokens": 30, "num_decode_tokens": 2,
        "num_cached_tokens": 16, "num_prompt_tokens": 46, "num_preempted": 1, "num_nonfinite_rows": 5, "flops": 1e9,
        "bytes_read": 2e8, "num_running": 3, "num_waiting": 4, "num_waiting_tokens": 50, "kv_blocks_active": 5,
        "kv_blocks_cached": 6, "kv_blocks_free": 7, "entropies": [0.5, 1.5], "varentropies": [0.25, 0.75],
        "temperatures": [1.0, 0.0], "tau_nats": 0.5, "tau_up_nats": 0.25, "nats_resolved": 2.0, **changes,
    }  # fmt: skip
    return StepStats(**facts)  # type: ignore[arg-type]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry, routes=["/version"])


def test_what_runs_is_told_with_how_it_reads_entropies(metrics: Metrics, registry: CollectorRegistry) -> None:
    info = fake_model_info(entropy_estimator="mid")
    metrics.started(info)
    facts = {"model_name": info.model_name, "dtype": info.dtype, "backend": info.backend}
    labels = {"version": __version__, "entropy_estimator": "mid", **facts}
    assert registry.get_sample_value("etserve_build_info", labels) == 1


def test_a_step_report_is_added_up(metrics: Metrics, registry: CollectorRegistry) -> None:
    for _ in range(2):
        metrics.on_step(make_stats(), [SequenceOutput(request_id="a", token_ids=[1, 2, 3])])
    expected = {
        "etserve_prompt_tokens_total": 92,
        "etserve_prompt_tokens_cached_total": 32,
        "etserve_generation_tokens_total": 6,
        "etserve_preemptions_total": 2,
        "etserve_nonfinite_rows_total": 10,
        "etserve_model_flops_total": 2e9,
        "etserve_model_bytes_total": 4e8,
        "etserve_tau_nats_total": 1.0,
        "etserve_tau_up_nats_total": 0.5,
        "etserve_nats_resolved_total": 4.0,
        "etserve_entropy_nats_count": 4,
        "etserve_entropy_nats_sum": 4.0,
        "etserve_varentropy_sum": 2.0,
        "etserve_temperature_count": 4,
        "etserve_step_tokens_sum": 64,
    }
    assert {name: registry.get_sample_value(name) for name in expected} == expected
    for state, count in (("active", 5), ("cached", 6), ("free", 7)):
        assert registry.get_sample_value("etserve_kv_blocks", {"state": state}) == count
    assert registry.get_sample_value("etserve_step_seconds_sum", {"phase": "schedule"}) == pytest.approx(0.1)
    assert registry.get_sample_value("etserve_step_seconds_sum", {"phase": "execute"}) == pytest.approx(0.4)


def test_what_the_control_loop_did_is_added_up(metrics: Metrics, registry: CollectorRegistry) -> None:
    value = registry.get_sample_value
    assert value("etserve_prune_fallback_total", {"reason": "watchdog"}) == 0  # there before anything happens
    facts = {
        "kept_fractions": [0.25, 0.5], "skipped_masses": [0.05], "num_blocks_skipped": 40, "num_saturated_low": 1,
        "num_saturated_high": 2, "prune_fallbacks": {"watchdog": 1, "jump": 3}, "schedule_ages_seconds": [0.5, 1.5],
        "num_forced": 7, "num_drafted_tokens": 8, "num_accepted_tokens": 3, "num_verifications": 1,
        "num_blocks_evicted": 6, "num_sequences_evicted": 2,
        "cost_r_squared": {"prefill": 0.5, "decode": 0.75},
    }  # fmt: skip
    for _ in range(2):
        metrics.on_step(make_stats(**facts), [])
    expected = {
        "etserve_kept_block_ratio_count": 4,
        "etserve_kept_block_ratio_sum": 1.5,
        "etserve_skipped_mass_ratio_sum": 0.1,
        "etserve_blocks_skipped_total": 80,
        "etserve_schedule_age_seconds_sum": 4.0,
        "etserve_draft_tokens_total": 16,
        "etserve_verifications_total": 2,
        "etserve_draft_tokens_accepted_total": 6,
        "etserve_starvation_forced_total": 14,
        "etserve_blocks_evicted_total": 12,
        "etserve_sequences_evicted_total": 4,
    }
    assert {name: value(name) for name in expected} == pytest.approx(expected)
    labelled = {
        ("etserve_prune_fallback_total", "reason", "jump"): 6,
        ("etserve_prune_fallback_total", "reason", "watchdog"): 2,
        ("etserve_temperature_saturated_total", "side", "low"): 2,
        ("etserve_temperature_saturated_total", "side", "high"): 4,
        ("etserve_cost_model_r2", "phase", "prefill"): 0.5,
        ("etserve_cost_model_r2", "phase", "decode"): 0.75,
    }
    assert {key: value(key[0], {key[1]: key[2]}) for key in labelled} == labelled


def test_a_report_without_a_step_moves_the_gauges_only(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.on_step(make_stats(), [])
    nothing = {"num_prefill_tokens": 0, "num_decode_tokens": 0, "entropies": [], "kv_blocks_active": 0}
    metrics.on_step(make_stats(step_seconds=0.0, schedule_seconds=0.0, **nothing), [])
    assert registry.get_sample_value("etserve_step_tokens_count") == 1
    assert registry.get_sample_value("etserve_kv_blocks", {"state": "active"}) == 0


def test_a_finished_choice_leaves_its_record(metrics: Metrics, registry: CollectorRegistry) -> None:
    summary = EntropySummary(
        tau_nats=3.0, tau_up_nats=1.0, nats_resolved=9.0, mean_entropy_nats=1.0, final_entropy_nats=0.5,
        tau_per_gflop=2.0, mean_temperature=1.0, kept_fraction_mean=1.0, blocks_evicted=0,
    )  # fmt: skip
    timings = RequestTimings(queue_seconds=0.5, prefill_seconds=0.25, decode_seconds=2.0)
    metrics.choice_finished(
        SequenceOutput(
            request_id="a", finish_reason="stop", num_output_tokens=9, entropy_summary=summary, timings=timings
        )
    )
    metrics.choices_aborted(2)
    metrics.request_finished(3.5, 30)
    metrics.first_token(0.75)
    value = registry.get_sample_value
    assert value("etserve_requests_finished_total", {"finish_reason": "stop"}) == 1
    assert value("etserve_requests_finished_total", {"finish_reason": "abort"}) == 2
    assert value("etserve_request_tau_nats_sum") == 3.0
    assert value("etserve_request_queue_seconds_sum") == 0.5
    assert value("etserve_request_prefill_seconds_sum") == 0.25
    assert value("etserve_request_decode_seconds_sum") == 2.0
    assert value("etserve_request_generation_tokens_sum") == 9
    assert value("etserve_request_prompt_tokens_sum") == 30
    assert value("etserve_request_duration_seconds_sum") == 3.5
    assert value("etserve_time_to_first_token_seconds_sum") == 0.75


def test_tokens_that_come_together_share_their_time(metrics: Metrics, registry: CollectorRegistry) -> None:
    metrics.next_tokens(0.3, 3)
    assert registry.get_sample_value("etserve_inter_token_latency_seconds_count") == 3
    assert registry.get_sample_value("etserve_inter_token_latency_seconds_sum") == pytest.approx(0.3)


def test_labels_outside_their_sets_become_one(metrics: Metrics, registry: CollectorRegistry) -> None:
    for route, method in (("/a", "BREW"), (None, "X"), ("/version", "GET")):
        metrics.answered(route, method, 404)
    metrics.rejected("whatever a client says")
    value = registry.get_sample_value
    other = {"route": "other", "method": "other", "status_class": "4xx"}
    assert value("etserve_http_requests_total", other) == 2
    assert value("etserve_http_requests_total", {"route": "/version", "method": "GET", "status_class": "4xx"}) == 1
    assert value("etserve_requests_rejected_total", {"reason": "invalid"}) == 1


def test_two_servers_have_two_registries() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    Metrics(first).on_step(make_stats(), [])
    Metrics(second)
    assert second.get_sample_value("etserve_step_tokens_count") == 0


def test_importing_metrics_registers_nothing_and_needs_no_torch() -> None:
    code = (
        "import sys, etserve.metrics.recorder, prometheus_client as p;"
        "names = [m.name for m in p.REGISTRY.collect()];"
        "sys.exit(any(n.startswith('etserve') for n in names) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
