"""Spells PromQL over the chosen servers. Knows no panel."""

SERVERS = 'instance=~"$instance"'
WINDOW = "$__rate_interval"


def series(name: str, labels: str = "") -> str:
    """The series `name` of the chosen servers, narrowed by further label matchers."""
    return f"{name}{{{SERVERS}{', ' + labels if labels else ''}}}"


def total(expr: str, by: str = "") -> str:
    """Sum over the servers, apart by the labels `by` (comma separated)."""
    return f"sum by ({by}) ({expr})" if by else f"sum({expr})"


def rate(name: str, labels: str = "", by: str = "") -> str:
    """Increase a second of a counter."""
    return total(f"rate({series(name, labels)}[{WINDOW}])", by)


def increase(name: str, labels: str = "", by: str = "") -> str:
    """Increase of a counter over the panel's step."""
    return total(f"increase({series(name, labels)}[{WINDOW}])", by)


def ratio(numerator: str, denominator: str, factor: str = "") -> str:
    """A quotient that is absent, not NaN, where nothing happened."""
    return f"{factor + ' * ' if factor else ''}{numerator} / ({denominator} > 0)"


def mean(histogram: str, labels: str = "", by: str = "") -> str:
    """Mean of what a histogram took in."""
    return ratio(rate(f"{histogram}_sum", labels, by), rate(f"{histogram}_count", labels, by))


def quantile(level: float, histogram: str, labels: str = "", by: str = "") -> str:
    """Estimated quantile of what a histogram took in."""
    inner = rate(f"{histogram}_bucket", labels, f"le, {by}" if by else "le")
    return f"histogram_quantile({level}, {inner})"


def quantiles(histogram: str, *levels: float) -> list[tuple[str, str]]:
    """One (expression, legend) per level."""
    return [(quantile(level, histogram), f"p{100 * level:g}") for level in levels]


def arm(expr: str, keep: str = "") -> str:
    """The sums of `expr` apart by arm: one server under the name it serves its model by."""
    labels = f"model_name, instance, {keep}" if keep else "model_name, instance"
    names = f"max by (instance, model_name) ({series('etserve_build_info')})"
    return f"sum by ({labels}) ({expr} * on (instance) group_left (model_name) {names})"


def arm_rate(name: str, keep: str = "") -> str:
    """Increase a second of a counter, apart by arm."""
    return arm(f"rate({series(name)}[{WINDOW}])", keep)
