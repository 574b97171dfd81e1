"""GET /metrics."""

import asyncio
import random
import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.server.helpers import call, client_of, make_app

# Every name of the API page that can be measured before the control issues land.
# fmt: off
NAMES = {
    "etserve_requests_running", "etserve_requests_waiting", "etserve_kv_cache_usage_ratio", "etserve_kv_blocks",
    "etserve_engine_up", "etserve_build_info", "etserve_prompt_tokens_total", "etserve_prompt_tokens_cached_total",
    "etserve_generation_tokens_total", "etserve_requests_finished_total", "etserve_requests_rejected_total",
    "etserve_preemptions_total", "etserve_engine_restarts_total", "etserve_model_flops_total",
    "etserve_model_bytes_total", "etserve_time_to_first_token_seconds", "etserve_inter_token_latency_seconds",
    "etserve_request_duration_seconds", "etserve_request_queue_seconds", "etserve_request_prefill_seconds",
    "etserve_request_decode_seconds", "etserve_request_prompt_tokens", "etserve_request_generation_tokens",
    "etserve_step_seconds", "etserve_step_tokens", "etserve_startup_seconds", "etserve_tau_nats_total",
    "etserve_tau_up_nats_total", "etserve_nats_resolved_total", "etserve_entropy_nats", "etserve_varentropy",
    "etserve_temperature", "etserve_request_tau_nats", "etserve_nonfinite_rows_total",
}
# fmt: on


def page_after_work(**config: Any) -> str:
    async def go() -> str:
        async with client_of(make_app(FakeEngine(), **config)) as client:
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "n": 2})
            await client.post("/v1/completions", json={"prompt": "a", "n": 99})
            return (await client.get("/metrics")).text

    return asyncio.run(go())


def families(page: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))


def test_every_documented_name_is_exported_in_the_text_format() -> None:
    assert call("GET", "/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    page = page_after_work()
    assert families(page) >= NAMES
    assert "_created" not in page
    assert "vllm:" not in page
    assert 'etserve_inter_token_latency_seconds_bucket{le="0.001"}' in page


def test_the_page_counts_what_happened() -> None:
    page = page_after_work()
    for line in (
        'etserve_requests_finished_total{finish_reason="length"} 2.0',
        'etserve_requests_rejected_total{reason="invalid"} 1.0',
        "etserve_generation_tokens_total 10.0",
        "etserve_tau_nats_total 1.25",
        "etserve_nats_resolved_total 5.0",
        "etserve_entropy_nats_count 10.0",
        "etserve_inter_token_latency_seconds_count 8.0",
        "etserve_time_to_first_token_seconds_count 1.0",
        "etserve_request_tau_nats_count 2.0",
        'etserve_http_requests_total{method="POST",route="/v1/completions",status_class="4xx"} 1.0',
        'etserve_startup_seconds{phase="load"} 0.25',
        "etserve_engine_up 1.0",
    ):
        assert line in page, line


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_promtool_has_nothing_to_say_about_the_page() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page_after_work(), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_names_that_autoscalers_look_for_come_on_request() -> None:
    page = page_after_work(compat_metrics=True)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert f"\n{name} 0.0\n" in page


def test_no_client_can_make_new_series() -> None:
    rng = random.Random(7)

    def word() -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8))

    async def go() -> tuple[set[str], set[str]]:
        async with client_of(make_app()) as client:

            async def series() -> set[str]:
                text = (await client.get("/metrics")).text
                return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}

            async def round_of_noise() -> None:
                for _ in range(150):
                    await client.request(word().upper(), f"/{word()}", headers={"x-request-id": word()})
                    await client.get(f"/v1/models/{word()}")
                    await client.post("/v1/completions", json={"prompt": "a", "model": word(), "user": word()})

            await round_of_noise()
            await series()  # the page counts itself from now on
            first = await series()
            await round_of_noise()
            return first, await series()

    first, second = asyncio.run(go())
    assert first == second
