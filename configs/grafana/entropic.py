"""The dashboard Entropic time: what the engine measures of its own uncertainty, and what control makes of it."""

from collections.abc import Sequence

from grafana_foundation_sdk.models import dashboard as model
from panels import Panel, heat_panel, lines, make_dashboard, scatter, stat_panel
from promql import arm, arm_rate, increase, mean, quantiles, rate, ratio, series

TAU = "etserve_tau_nats_total"
FLOPS = "etserve_model_flops_total"
BYTES = "etserve_model_bytes_total"
TOKENS = "etserve_generation_tokens_total"
SATURATED = "etserve_temperature_saturated_total"
ARM = "{{model_name}} ({{instance}})"
TITLE = "etserve / Entropic time"


def build() -> model.Dashboard:
    """The dashboard, ready to encode."""
    return make_dashboard(
        TITLE,
        "etserve-entropic",
        "The entropic clock, next-token entropy, temperature, skipped context, priority, and arms side by side.",
        [
            ("Now", _now()),
            ("Clock", _clock()),
            ("Uncertainty", _uncertainty()),
            ("Temperature", _temperature()),
            ("Context: skipped and evicted blocks", _context()),
            ("Order", _order()),
            ("Arms side by side", _arms()),
        ],
    )


def _now() -> Sequence[Panel]:
    return [
        stat_panel("Entropic time", "Nats by which the next-token entropy fell, per second of wall time: the sum of "
                   "max(0, H[t-1] - H[t]).",
                   rate(TAU), "nats/s"),
        stat_panel("per GFLOP", "Entropic time per 10⁹ floating-point operations of the model.",
                   ratio(rate(TAU), rate(FLOPS), "1e9"), "nats/GFLOP", decimals=4),
        stat_panel("per GB", "Entropic time per 10⁹ bytes of weights and KV read.",
                   ratio(rate(TAU), rate(BYTES), "1e9"), "nats/GB", decimals=4),
        stat_panel("Mean entropy", "Mean next-token entropy at the tokens drawn; before temperature and truncation.",
                   mean("etserve_entropy_nats"), "nats"),
        stat_panel("Kept share", "Mean share of the KV blocks that attention read. 100 %: nothing is skipped.",
                   mean("etserve_kept_block_ratio"), "percentunit"),
        stat_panel("Mean temperature", "Mean temperature in force at the tokens drawn. 0: greedy.",
                   mean("etserve_temperature"), "short"),
    ]  # fmt: skip


def _clock() -> Sequence[Panel]:
    return [
        lines("Entropic time per second", "Falls (the clock), rises, and the entropy of all drawn tokens. Falls and "
              "rises differ only by first "
              "minus last entropy of each choice.", "nats/s", [
                  (rate(TAU), "falls: τ"),
                  (rate("etserve_tau_up_nats_total"), "rises"),
                  (rate("etserve_nats_resolved_total"), "resolved"),
              ]),
        lines("per GFLOP and per GB", "Entropic time for what it costs: computing on the left, memory traffic on "
              "the right.", "nats/GFLOP", [
            (ratio(rate(TAU), rate(FLOPS), "1e9"), "per GFLOP"),
            (ratio(rate(TAU), rate(BYTES), "1e9"), "per GB"),
        ], right_axis=("per GB", "nats/GB")),
        lines("per joule", "Entropic time for the energy of the processors, and their power; all programs of the "
              "machine together. Empty where the machine does not tell (RAPL).", "nats/J", [
                  (ratio(rate(TAU), rate("etserve_energy_joules_total")), "per joule"),
                  (rate("etserve_energy_joules_total"), "power"),
              ], right_axis=("power", "watt")),
        lines("per token", "Entropic time per token drawn. Noise alone earns about half a nat, so compare it with "
              "like text only.",
              "nats", [(ratio(rate(TAU), rate(TOKENS)), "per token")]),
        heat_panel("Entropic time of a choice, spread", "Finished choices by their entropic time.",
                   increase("etserve_request_tau_nats_bucket", by="le"), "nats"),
        lines("Entropic time of a choice", "Quantiles over finished choices.", "nats",
              quantiles("etserve_request_tau_nats", 0.5, 0.95)),
        lines("Cost model", "R² of predicted step seconds of prefill and decode. Below 0.5 the priority ignores costs.",
              "percentunit", [(series("etserve_cost_model_r2"), "{{phase}} ({{instance}})")], limit=0.5, maximum=1),
    ]  # fmt: skip


def _uncertainty() -> Sequence[Panel]:
    certain = ratio(rate("etserve_entropy_nats_bucket", 'le="0.05"'), rate("etserve_entropy_nats_count"))
    open_share = ratio(rate("etserve_entropy_nats_bucket", 'le="3.0"'), rate("etserve_entropy_nats_count"))
    return [
        heat_panel("Entropy, spread", "Tokens by next-token entropy, over time.",
                   increase("etserve_entropy_nats_bucket", by="le"), "nats"),
        lines("Entropy", "Quantiles over drawn tokens, and their mean.", "nats", [
            *quantiles("etserve_entropy_nats", 0.1, 0.5, 0.9), (mean("etserve_entropy_nats"), "mean"),
        ]),
        lines("Certain and open tokens", "Share of tokens drawn at no more than 0.05 nats and at more than 3. "
              "Over 90 % certain for long is a collapse (alert).", "percentunit",
              [(certain, "certain"), (f"1 - {open_share}", "open")], limit=0.9, maximum=1),
        heat_panel("Varentropy, spread", "Tokens by the variance of the surprisal.",
                   increase("etserve_varentropy_bucket", by="le"), "nats²"),
        lines("Varentropy", "Quantiles over drawn tokens, and their mean. High variance with high entropy is a "
              "choice between few "
              "good ways; the thermostat divides by it.", "nats²", [
                  *quantiles("etserve_varentropy", 0.5, 0.9), (mean("etserve_varentropy"), "mean"),
              ]),
        lines("Entropy and varentropy", "Means over drawn tokens.", "nats", [
            (mean("etserve_entropy_nats"), "entropy"), (mean("etserve_varentropy"), "varentropy"),
        ], right_axis=("varentropy", "nats²")),
    ]  # fmt: skip


def _temperature() -> Sequence[Panel]:
    share = f"{rate(SATURATED, by='side')} / on () group_left () ({rate(TOKENS)} > 0)"
    return [
        heat_panel("Temperature, spread", "Tokens by the temperature in force.",
                   increase("etserve_temperature_bucket", by="le"), "short"),
        lines("Temperature against entropy", "Means over drawn tokens: the thermostat cools where entropy is above "
              "its target.", "short", [
            (mean("etserve_temperature"), "temperature"), (mean("etserve_entropy_nats"), "entropy"),
        ], right_axis=("entropy", "nats")),
        lines("Thermostat at its bounds", "Share of the tokens drawn with the temperature clamped while the error "
              "pushed further out.",
              "percentunit", [(share, "{{side}}")], stacked=True, limit=0.5, maximum=1),
    ]  # fmt: skip


def _context() -> Sequence[Panel]:
    mass = "etserve_skipped_mass_ratio"
    kept, entropy = mean("etserve_kept_block_ratio"), mean("etserve_entropy_nats")
    return [
        lines("Kept share and entropy", "Mean share of KV blocks read, and mean entropy: the law skips less where "
              "entropy is high.",
              "percentunit", [(kept, "kept share"), (entropy, "entropy")], right_axis=("entropy", "nats")),
        scatter("Kept share against entropy", "One point per moment: means over the tokens drawn then.",
                (entropy, "entropy"), (kept, "kept share"), ("nats", "percentunit")),
        heat_panel("Kept share, spread", "Sequence steps by the share of KV blocks read.",
                   increase("etserve_kept_block_ratio_bucket", by="le"), "percentunit"),
        lines("Blocks skipped and evicted", "Skipped: left out of one attention call, per second. Evicted: taken "
              "from a live sequence for good.",
              "ops", [
                  (rate("etserve_blocks_skipped_total"), "skipped"), (rate("etserve_blocks_evicted_total"), "evicted"),
                  (rate("etserve_sequences_evicted_total"), "sequences evicted from"),
              ], right_axis=("evicted", "ops")),
        lines("Attention mass skipped", "Estimated share of attention mass in the skipped blocks; quantiles over "
              "sequence steps.",
              "percentunit", [*quantiles(mass, 0.5, 0.95), (mean(mass), "mean")]),
        lines("Back to dense", "Fallbacks to dense attention per second, by reason. watchdog: skipping moved the "
              "output too far twice.",
              "ops", [(rate("etserve_prune_fallback_total", by="reason"), "{{reason}}")], stacked=True),
    ]  # fmt: skip


def _order() -> Sequence[Panel]:
    age = "etserve_schedule_age_seconds"
    return [
        heat_panel("Age at service, spread", "Sequences by the time since they were last served, when a step served "
                   "them.", increase(f"{age}_bucket", by="le"), "s"),
        lines("Age at service", "Quantiles. Ageing bounds the wait; the highest value shows what the order costs "
              "the last.", "s",
              quantiles(age, 0.5, 0.95, 0.99)),
        lines("Forced inclusions", "Sequences per second that were served only because they waited too long.", "ops",
              [(rate("etserve_starvation_forced_total"), "forced")], limit=0.1),
        lines("Guessed tokens", "Tokens computed on a guess, and those of them that were drawn so, per second: each of "
              "these spared its sequence a step.", "ops",
              [(rate("etserve_draft_tokens_total"), "guessed"),
               (rate("etserve_draft_tokens_accepted_total"), "accepted"),
               (rate("etserve_verifications_total"), "runs computed again densely")], limit=0.1),
    ]  # fmt: skip


def _arms() -> Sequence[Panel]:
    def per(numerator: str, denominator: str, factor: str = "") -> list[tuple[str, str]]:
        return [(ratio(arm_rate(numerator), arm_rate(denominator), factor), ARM)]

    waits = arm_rate("etserve_time_to_first_token_seconds_bucket", "le")
    p95 = f"histogram_quantile(0.95, {waits})"
    about = "An arm is one server; name it with --served-model-name. "
    return [
        lines("τ per second, by arm", about + "Entropic time per second.", "nats/s", [(arm_rate(TAU), ARM)]),
        lines("τ per GFLOP, by arm", about + "Entropic time per 10⁹ operations.", "nats/GFLOP", per(TAU, FLOPS, "1e9")),
        lines("τ per GB, by arm", about + "Entropic time per 10⁹ bytes read.", "nats/GB", per(TAU, BYTES, "1e9")),
        lines("Tokens, by arm", about + "Tokens drawn per second.", "tok/s", [(arm_rate(TOKENS), ARM)]),
        lines("First token p95, by arm", about + "95 % of the requests were faster.", "s", [(p95, ARM)]),
        lines("Mean entropy, by arm", about + "At the tokens drawn.", "nats",
              per("etserve_entropy_nats_sum", "etserve_entropy_nats_count")),
        lines("Kept share, by arm", about + "Mean share of KV blocks read.", "percentunit",
              per("etserve_kept_block_ratio_sum", "etserve_kept_block_ratio_count"), maximum=1),
        lines("Mean temperature, by arm", about + "In force at the tokens drawn.", "short",
              per("etserve_temperature_sum", "etserve_temperature_count")),
        lines("Running, by arm", about + "Sequences that hold KV blocks.", "short",
              [(arm(series("etserve_requests_running")), ARM)]),
    ]  # fmt: skip
