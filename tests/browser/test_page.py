"""The live page as its users meet it: type, watch, point, tap, compare, stop, fail, with keys and on a phone."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.server.helpers import Live, live_server, wait_until

Open = Callable[..., Any]
KEY = "key-of-anna-1234"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(FakeEngine(step_seconds=0.001)) as server:
        yield server


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect as expected

    return expected(locator, "on the page")


def ready(page: Any) -> Any:
    expect(page.locator("#state")).to_have_text("ready", timeout=30_000)
    expect(page.locator("#model")).to_contain_text("unit", timeout=30_000)
    return page


def ask(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Any) -> None:
    page.wait_for_selector("#stop:disabled")


def setting(page: Any, name: str, value: str, run: int = 0) -> None:
    details = page.locator("details.settings").nth(run)
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    details.get_by_label(name).fill(value)


def words_of(page: Any, run: int = 0) -> str:
    return str(page.locator(".run").nth(run).locator(".tokens").last.text_content())


def test_an_answer_streams_in_and_a_token_tells_its_entropy(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url))
    setting(page, "Max tokens", "60")
    ask(page, "hello")
    answered(page)
    request = live.engine.seen[-1]
    assert request.params.logprobs == 5
    assert request.params.trace == "tokens"
    assert request.params.max_tokens == 60
    tokens = page.locator(".token[data-index]")
    assert tokens.count() == 60
    assert "fox" in words_of(page) * 2
    assert "60 tokens" in page.locator(".facts").text_content()
    tokens.nth(3).hover()
    card = page.locator("#inspector")
    expect(card).to_be_visible()
    for fact in ("H, nats", "varentropy", "τ, nats0.38", "temperature0.70", "kept share100 %", "← drawn", "61 %"):
        assert fact in card.text_content(), fact
    assert card.locator("li").count() == 5
    expect(page.locator("#kv-free")).to_have_text("255")


def test_each_sequence_shows_its_blocks_read_skipped_and_evicted(open_page: Open) -> None:
    with live_server(FakeEngine(step_seconds=0.02)) as live:
        page = ready(open_page(live.url))
        wait_until(lambda: live.engine.is_watched)
        setting(page, "Max tokens", "200")
        ask(page, "hello")
        strip = page.locator("#clocks .own .strip")
        expect(strip).to_have_attribute("aria-label", "28 blocks read, 28 skipped, 8 evicted", timeout=30_000)
        for state, count in (("active", 28), ("skipped", 28), ("evicted", 8)):
            expect(strip.locator(f".cell.{state}")).to_have_count(count)
        page.goto("about:blank")
        wait_until(lambda: not live.engine.is_watched)


def test_tokens_are_coloured_and_underlined_by_entropy(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url))
    ask(page, "hello")
    answered(page)
    looks = page.locator(".token[data-index]").evaluate_all(
        """nodes => nodes.map(node => {
            const style = getComputedStyle(node);
            return [Number(node.style.getPropertyValue("--x")), style.backgroundColor, style.boxShadow];
        })"""
    )
    by_entropy = sorted(looks)
    assert by_entropy[0][0] < by_entropy[-1][0]
    assert by_entropy[0][1] != by_entropy[-1][1]
    assert by_entropy[0][2] != by_entropy[-1][2]


def test_the_keyboard_reaches_every_token(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url))
    setting(page, "Max tokens", "8")
    ask(page, "hello")
    answered(page)
    page.locator(".turns").focus()
    page.keyboard.press("Tab")
    focused = page.locator(".token:focus")
    assert focused.get_attribute("data-index") == "0"
    for key, index in (("ArrowRight", "1"), ("End", "7"), ("ArrowRight", "7"), ("ArrowLeft", "6"), ("Home", "0")):
        page.keyboard.press(key)
        assert focused.get_attribute("data-index") == index
    expect(page.locator("#inspector")).to_be_visible()
    assert re.search(r"entropy \d\.\d\d nats, probability 61 %", focused.get_attribute("aria-label"))
    page.keyboard.press("Escape")
    expect(page.locator("#inspector")).to_be_hidden()
    assert page.locator(".token[tabindex='0']").count() == 1


def test_stop_ends_the_request_at_the_engine(open_page: Open) -> None:
    with live_server(FakeEngine(step_seconds=0.02)) as slow:
        page = ready(open_page(slow.url))
        setting(page, "Max tokens", "1500")
        ask(page, "hello")
        page.wait_for_selector(".token[data-index]")
        expect(page.locator(".clocks .own")).to_contain_text("Run A")
        expect(page.locator("#running")).to_have_text("1")
        page.get_by_role("button", name="Stop").click()
        answered(page)
        wait_until(lambda: not slow.engine.running)
        assert "stopped" in page.locator(".facts").text_content()
        expect(page.locator("#running")).to_have_text("0")
        expect(page.locator(".error")).to_be_hidden()


def test_two_runs_side_by_side_draw_alike_from_their_own_settings(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url))
    page.get_by_label("Compare two runs").check()
    setting(page, "Temperature", "0.3", run=0)
    setting(page, "Temperature", "1.2", run=1)
    num_seen = len(live.engine.seen)
    ask(page, "hello")
    answered(page)
    first, second = live.engine.seen[num_seen:]
    assert {first.params.temperature, second.params.temperature} == {0.3, 1.2}
    assert first.params.seed == second.params.seed is not None
    assert words_of(page, 0) == words_of(page, 1)
    page.get_by_label("Compare two runs").uncheck()
    assert page.locator(".run").count() == 1


def test_a_conversation_goes_on_and_begins_anew(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url))
    setting(page, "Max tokens", "6")
    ask(page, "one")
    answered(page)
    answer = words_of(page)
    ask(page, "two")
    answered(page)
    prompt = bytes(live.engine.seen[-1].prompt_token_ids).decode()
    assert f"user: one\nassistant: {answer}\nuser: two" in prompt
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0
    ask(page, "three")
    answered(page)
    assert "one" not in bytes(live.engine.seen[-1].prompt_token_ids).decode()


def test_a_completion_is_asked_for_as_written(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url))
    page.get_by_label("Completion").check()
    ask(page, "Once upon")
    answered(page)
    assert bytes(live.engine.seen[-1].prompt_token_ids) == b"Once upon"
    assert page.locator(".token[data-index]").count() == 128
    page.locator(".token[data-index]").first.hover()
    assert page.locator("#inspector li").count() == 5


def test_characters_of_many_bytes_come_out_whole(open_page: Open) -> None:
    with live_server(FakeEngine(text="é \U0001f600 中 \u2713")) as server:
        page = ready(open_page(server.url))
        for mode in ("Chat", "Completion"):
            page.get_by_label(mode).check()
            ask(page, "hello")
            answered(page)
            spelled = page.locator(".turn").last.locator(".token[data-index]:not(.partial)").all_text_contents()
            assert [part.strip() for part in spelled if part.strip()] == ["é", "\U0001f600", "中", "✓"]


def test_what_the_server_does_not_offer_is_shown_disabled_with_the_reason(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url))
    offered = page.evaluate("fetch('/v1/entropic').then(reply => reply.json()).then(told => told.options)")
    page.locator("details.settings summary").click()
    for label, option in (("Micro", "temperature_mode"), ("Meso", "pruning"), ("Target", "target_entropy_nats")):
        control = page.get_by_label(label)
        assert control.is_disabled() is not offered[option]["offered"]
        if control.is_disabled():
            reason = control.get_attribute("aria-describedby")
            assert page.locator(f"#{reason}").text_content() == offered[option]["reason"]
    assert page.get_by_label("Meso").is_disabled()
    assert page.get_by_label("Macro").is_disabled()


def test_what_the_server_offers_is_sent_when_chosen(open_page: Open, live: Live) -> None:
    told = {"version": "0", "model": None, "options": {
        "temperature_mode": {"offered": True, "enum": ["off", "cool"]}, "pruning": {"offered": True},
        "target_entropy_nats": {"offered": True, "minimum": 0, "maximum": 5}}}  # fmt: skip
    page = open_page("about:blank")
    page.route("**/v1/entropic", lambda route: route.fulfill(json={**told, "model": MODEL}))
    page.goto(live.url)
    ready(page)
    page.locator("details.settings summary").click()
    page.get_by_label("Micro").select_option("cool")
    page.get_by_label("Meso").select_option("off")
    page.get_by_label("Target").fill("1.5")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "hello")
    expected = {"trace": "tokens", "temperature_mode": "cool", "pruning": "off", "target_entropy_nats": 1.5}
    assert sent.value.post_data_json["entropic"] == expected


MODEL = {"id": "unit", "num_parameters": 800_000, "backend": "fake", "num_kv_blocks": 256}


def test_errors_are_told_and_the_prompt_is_kept(open_page: Open) -> None:
    for engine, message in (
        (FakeEngine(fail_after=3), "not finite"),
        (FakeEngine(overloaded=True), "overloaded"),
        (FakeEngine(raise_after=2), "had an error"),
    ):
        with live_server(engine) as server:
            page = ready(open_page(server.url))
            ask(page, "hello there")
            answered(page)
            expect(page.get_by_role("alert")).to_contain_text(message)
            assert page.get_by_label("Your message").input_value() == "hello there"


def test_a_bad_setting_is_told_in_words(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url))
    setting(page, "Temperature", "7")
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("Temperature: a number from 0 to 2")


def test_with_keys_the_page_opens_and_asks_for_one(open_page: Open) -> None:
    with live_server(FakeEngine(), api_keys=(KEY,)) as server:
        page = open_page(server.url)
        expect(page.locator("#state")).to_have_text("key needed")
        field = page.get_by_label("Key of this server")
        field.fill("wrong-key-0000")
        field.press("Enter")
        expect(page.locator("#state")).to_have_text("key needed")
        expect(page.locator("#key-box")).to_have_attribute("open", "")
        field.fill(KEY)
        field.press("Enter")
        ready(page)
        ask(page, "hello")
        answered(page)
        assert page.locator(".token[data-index]").count() == 128


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("options", [{}, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing(open_page: Open, live: Live, scheme: str, options: dict[str, Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    page = ready(open_page(live.url, color_scheme=scheme, **options))
    page.get_by_label("Compare two runs").check()
    page.locator("details.settings summary").first.click()
    ask(page, "hello")
    answered(page)
    page.locator(".token[data-index]").nth(4).focus()
    expect(page.locator("#inspector")).to_be_visible()
    results = axe.run(page)
    assert results.violations_count == 0, results.generate_report()


def test_it_fits_a_phone_and_answers_a_tap(open_page: Open, live: Live) -> None:
    page = ready(open_page(live.url, **PHONE))
    page.get_by_label("Compare two runs").check()
    ask(page, "hello")
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".token[data-index]").nth(2).tap()
    card = page.locator("#inspector")
    expect(card).to_be_visible()
    box = card.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
