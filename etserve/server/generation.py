"""One HTTP request's generations, from admission to the last output. Whatever happens, none stays behind."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from etserve.engine.client import AsyncEngine
from etserve.metrics.recorder import Metrics
from etserve.outputs import GenerateRequest, SequenceOutput
from etserve.server.record import GenerationRecord

QUEUE_OUTPUTS = 16  # per prompt, between the engine's iterators and a slow client


class Generation:
    """The engine requests of one HTTP request: one per prompt, each of `n` choices.

    Raises at construction what AsyncEngine.generate_all raises, with nothing left in the queue.
    `close` must be called in the end, however that comes about.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        requests: Sequence[GenerateRequest],
        metrics: Metrics,
        arrival_seconds: float,
        record: GenerationRecord,
    ) -> None:
        self._engine = engine
        self._record = record
        self._metrics = metrics
        self._arrival = arrival_seconds
        self._open = {(i, choice) for i, request in enumerate(requests) for choice in range(request.params.n)}
        self._last_token: dict[tuple[int, int], float] = {}
        self._num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._request_ids = [request.request_id for request in requests]
        self._is_closed = False
        self._iterators = engine.generate_all(requests)

    async def outputs(self) -> AsyncIterator[tuple[int, SequenceOutput]]:
        """Yield (prompt index, output) in the order in which they come."""
        async with contextlib.aclosing(_merge(self._iterators)) as merged:
            async for index, output in merged:
                self._observe(index, output)
                yield index, output

    async def close(self) -> None:
        """Abort what is still open. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._open:
            self._metrics.choices_aborted(len(self._open))
            self._record.finish_reasons += ["abort"] * len(self._open)
            self._open.clear()
        self._metrics.request_finished(time.monotonic() - self._arrival, self._num_prompt_tokens)
        self._abort_all()
        for iterator in self._iterators:
            aclose = getattr(iterator, "aclose", None)  # generators have it, and so have the engine's own iterators
            if aclose is not None:
                await aclose()

    def _abort_all(self) -> None:
        # An iterator that was never started has nothing to run on closing, so the engine is told by name as well.
        for request_id in self._request_ids:
            self._engine.abort(request_id)

    def _observe(self, index: int, output: SequenceOutput) -> None:
        key = (index, output.choice)
        self._record.add(output)
        if output.token_ids:
            now = time.monotonic()
            last = self._last_token.get(key)
            if last is not None:
                self._metrics.next_tokens(now - last, len(output.token_ids))
            elif not self._last_token:
                self._record.first_token_seconds = now - self._arrival
                self._metrics.first_token(now - self._arrival)
            self._last_token[key] = now
        if output.finish_reason is not None and key in self._open:
            self._open.discard(key)
            self._metrics.choice_finished(output)


async def _merge(
    iterators: Sequence[AsyncIterator[SequenceOutput]],
) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
    if len(iterators) == 1:
        async for output in iterators[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, SequenceOutput] | BaseException | None] = asyncio.Queue(
        QUEUE_OUTPUTS * len(iterators)
    )
    tasks = [asyncio.create_task(_pump(i, iterator, queue)) for i, iterator in enumerate(iterators)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    iterator: AsyncIterator[SequenceOutput],
    queue: "asyncio.Queue[tuple[int, SequenceOutput] | BaseException | None]",
) -> None:
    try:
        async for output in iterator:
            await queue.put((index, output))
    except Exception as error:  # handed over to whoever reads the queue
        await queue.put(error)
    else:
        await queue.put(None)
