"""What one request went through, and what a round of them was measured under. Plain data, kept in the result file."""

from typing import Any

import msgspec


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, in seconds since its round began.

    `chunk_seconds[i]` is when the i-th piece of text arrived and `chunk_tokens[i]` how many tokens it carried.
    """

    index: int
    scheduled_seconds: float  # when it was due; latencies count from here, so a late client hides nothing
    sent_seconds: float
    end_seconds: float
    prompt_tokens_asked: int
    output_tokens_asked: int
    prompt_tokens: int = 0  # these three as the server counted them
    output_tokens: int = 0
    cached_tokens: int = 0
    chunk_seconds: list[float] = []
    chunk_tokens: list[int] = []
    finish_reason: str | None = None
    error: str | None = None  # closed set, see client.ERROR_KINDS; None: complete
    detail: str = ""

    @property
    def time_to_first_token(self) -> float:
        """Seconds; only of a record without error."""
        return self.chunk_seconds[0] - self.scheduled_seconds

    @property
    def end_to_end(self) -> float:
        return self.end_seconds - self.scheduled_seconds

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first chunk; None when everything came at once."""
        later = sum(self.chunk_tokens[1:])
        return (self.chunk_seconds[-1] - self.chunk_seconds[0]) / later if later else None

    def inter_token_latencies(self) -> list[float]:
        """One value per token after the first chunk: a chunk of k tokens after a gap g gives k values g / k."""
        gaps: list[float] = []
        for before, at, count in zip(self.chunk_seconds, self.chunk_seconds[1:], self.chunk_tokens[1:], strict=False):
            gaps.extend([(at - before) / count] * count if count else [])
        return gaps


class CpuShares(msgspec.Struct, frozen=True, kw_only=True):
    """Where the machine's CPU time went during a round, as shares of all cores (0 to 1)."""

    server: float | None  # None: the server's processes are not known
    client: float
    foreign: float | None  # neither the server's nor ours; includes steal. None with the server unknown
    steal: float  # taken by the hypervisor
    cores: int


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over a workload's requests."""

    seed: int
    started_at: str  # ISO 8601, UTC
    records: list[RequestRecord]
    cpu: CpuShares | None = None
    server_peak_bytes: int | None = None  # sum of the peak resident sizes of the server's processes


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result file."""

    schema_version: int = 1
    name: str  # of the server, as tables show it
    url: str
    model: str
    workload: dict[str, Any]  # the plan's own settings
    api: str
    seed: int
    machine: dict[str, Any]
    rounds: list[RoundResult]
    summaries: list[dict[str, Any]] = []  # one per round, written for readers of the file; recomputed when read here
