"""Outputs on their way to one reader. A slow reader gets fewer, larger outputs; memory is bounded by its request."""

import asyncio
from collections import deque

import msgspec

from etserve.outputs import SequenceOutput

MAX_QUEUED_OUTPUTS = 64  # beyond this, what waits is merged, one output a choice


def merge(outputs: list[SequenceOutput]) -> SequenceOutput:
    """Several outputs of one choice, in order, as if one step had made them."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    scored = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return msgspec.structs.replace(
        last,
        token_ids=[token for output in outputs for token in output.token_ids],
        text="".join(output.text for output in outputs),
        logprobs=[entry for output in outputs for entry in output.logprobs],
        entropies=[entry for output in outputs for entry in output.entropies],
        prompt_logprobs=scored[0] if scored else None,
    )


class OutputStream:
    """A queue between the event loop's dispatcher and one reader on the same loop."""

    def __init__(self, max_queued: int = MAX_QUEUED_OUTPUTS) -> None:
        self._queue: deque[SequenceOutput] = deque()
        self._max_queued = max_queued
        self._merge_at = max_queued
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, output: SequenceOutput) -> None:
        """Never blocks."""
        self._queue.append(output)
        if len(self._queue) > self._merge_at:
            self._compact()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> SequenceOutput:
        """Wait for the next output. One reader at a time."""
        while not self._queue:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._queue.popleft()

    def _compact(self) -> None:
        by_choice: dict[int, list[SequenceOutput]] = {}
        for output in self._queue:
            by_choice.setdefault(output.choice, []).append(output)
        self._queue = deque(merge(outputs) for outputs in by_choice.values())
        self._merge_at = len(self._queue) + self._max_queued
