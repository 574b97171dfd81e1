"""Requests and tokens a minute of each client. A minute begins with the client's first request after the last one.

The limits library counts, in this process's memory and by the wall clock. Imported only where a limit is set.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from etserve.config import ServerConfig
from etserve.outputs import GenerateRequest
from etserve.server.faults import Fault, HttpError, retry_after
from etserve.server.record import GenerationRecord

Unit = Literal["requests", "tokens"]
REASONS: dict[Unit, str] = {"requests": "request_rate", "tokens": "token_rate"}  # labels of the refusals' counter
KEYLESS = "keyless"  # where no key is needed, all clients share one allowance


class Allowance:
    """So many units a minute for each client."""

    def __init__(self, unit: Unit, per_minute: int, storage: MemoryStorage) -> None:
        self.unit, self.per_minute = unit, per_minute
        self._storage = storage
        self._limiter = FixedWindowRateLimiter(storage)
        self._item = RateLimitItemPerMinute(per_minute, namespace=unit)  # equal limits must not share their counters

    def refusal(self, client: str, cost: int) -> Fault | None:
        """None if `cost` units are left, else what the client is told."""
        if self._limiter.test(self._item, client, cost=cost):
            return None
        if cost > self.per_minute:
            message = f"The request may take {cost} {self.unit}, the limit is {self.per_minute} per minute."
            headers = {"x-should-retry": "false"}  # what OpenAI's clients obey
        else:
            message = f"The limit of {self.per_minute} {self.unit} per minute is reached. Try again later."
            headers = retry_after(self._seconds_left(client))
        return Fault(429, message, None, "rate_limit_exceeded", REASONS[self.unit], headers)

    def take(self, client: str, cost: int) -> float:
        """Count `cost` units, which were left. Returns when the minute ends, which names it."""
        self._limiter.hit(self._item, client, cost=cost)
        return self._minute_end(client)

    def correct(self, client: str, minute_end: float, change: int) -> None:
        """Count `change` units more, or fewer if it is negative, unless the minute they belong to is over."""
        is_over = minute_end <= time.time() or self._minute_end(client) != minute_end
        if is_over:
            return
        if change > 0:
            self._limiter.hit(self._item, client, cost=change)
        else:
            self._storage.decr(self._item.key_for(client), -change)

    def remaining(self, client: str) -> int:
        """Units that the client has left in this minute."""
        return self._limiter.get_window_stats(self._item, client).remaining

    def headers(self, client: str) -> dict[str, str]:
        """The headers by which OpenAI's clients know how they stand."""
        return {
            f"x-ratelimit-limit-{self.unit}": str(self.per_minute),
            f"x-ratelimit-remaining-{self.unit}": str(self.remaining(client)),
            f"x-ratelimit-reset-{self.unit}": spell_duration(self._seconds_left(client)),
        }

    def _minute_end(self, client: str) -> float:
        """By time.time(); now, where none has begun."""
        return self._limiter.get_window_stats(self._item, client).reset_time

    def _seconds_left(self, client: str) -> float:
        return max(0.0, self._minute_end(client) - time.time())


class Charge:
    """What one request was charged. `settle` must be called when it has ended."""

    def __init__(self, client: str, costs: Sequence[tuple[Allowance, int]]) -> None:
        self._client = client
        self._costs = [(allowance, cost, allowance.take(client, cost)) for allowance, cost in costs]
        self._is_settled = False

    def settle(self, record: GenerationRecord | None) -> None:
        """Correct the tokens to those that there were; None: it was not admitted and costs nothing. Idempotent."""
        if self._is_settled:
            return
        self._is_settled = True
        num_tokens = 0 if record is None else record.num_prompt_tokens + record.num_output_tokens
        used: dict[Unit, int] = {"requests": 0 if record is None else 1, "tokens": num_tokens}
        for allowance, cost, minute_end in self._costs:
            if used[allowance.unit] != cost:
                allowance.correct(self._client, minute_end, used[allowance.unit] - cost)

    def headers(self) -> dict[str, str]:
        """How the client stands now."""
        return standing([allowance for allowance, *_ in self._costs], self._client)


class RateLimits:
    """The limits that are set. All methods run on one event loop and never wait, so that check and charge are one."""

    def __init__(self, config: ServerConfig) -> None:
        storage = MemoryStorage()
        limits: dict[Unit, int | None] = {"requests": config.requests_per_minute, "tokens": config.tokens_per_minute}
        self._allowances = [Allowance(unit, limit, storage) for unit, limit in limits.items() if limit is not None]

    def charge(self, key_digest: bytes | None, requests: Sequence[GenerateRequest], max_model_len: int) -> Charge:
        """Charge a request, and the tokens that its prompts and choices may take, or refuse it and charge nothing.

        Raises HttpError (429).
        """
        client = KEYLESS if key_digest is None else key_digest.hex()
        costs = [(allowance, _cost(allowance, client, requests, max_model_len)) for allowance in self._allowances]
        for allowance, cost in costs:
            fault = allowance.refusal(client, cost)
            if fault is not None:
                raise HttpError(replace(fault, headers={**fault.headers, **standing(self._allowances, client)}))
        return Charge(client, costs)


def standing(allowances: Sequence[Allowance], client: str) -> dict[str, str]:
    """The headers of all limits that are set."""
    return {name: value for allowance in allowances for name, value in allowance.headers(client).items()}


def _cost(allowance: Allowance, client: str, requests: Sequence[GenerateRequest], max_model_len: int) -> int:
    if allowance.unit == "requests":
        return 1
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    if all(request.params.max_tokens is not None for request in requests):
        return num_prompt + sum(request.params.n * (request.params.max_tokens or 0) for request in requests)
    # Without max_tokens only the context bounds a choice, and that may be wider than the limit: what is left is
    # reserved, so that others wait for the end, and a choice that takes more than that owes it.
    rooms = sum(request.params.n * (max_model_len - len(request.prompt_token_ids)) for request in requests)
    least = num_prompt + sum(request.params.n for request in requests)
    return max(least, min(num_prompt + rooms, allowance.remaining(client)))


def spell_duration(seconds: float) -> str:
    """As OpenAI's headers spell it, which is Go's way: "0s", "120ms", "8.64s", "1m0s"; rounded up to milliseconds."""
    milliseconds = math.ceil(round(seconds * 1000, 3))
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text
