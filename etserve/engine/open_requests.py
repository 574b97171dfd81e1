"""Requests that the front half is waiting for, and the iterators that hand their outputs to readers."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from etserve.engine.streams import OutputStream
from etserve.outputs import FinishReason, GenerateRequest, SequenceOutput


@dataclass(slots=True)
class OpenRequest:
    """A request that has not got all its finish reasons, and what its reader was given so far."""

    request: GenerateRequest
    stream: OutputStream = field(default_factory=OutputStream)
    delivered: list[list[int]] = field(default_factory=list)  # per choice, tokens put into the stream
    finished: set[int] = field(default_factory=set)
    has_prompt_logprobs: bool = False
    num_deaths: int = 0  # of engines that held it
    is_aborted: bool = False  # the engine was told, its last outputs are to come

    def __post_init__(self) -> None:
        self.delivered = [[] for _ in range(self.request.params.n)]

    def put(self, output: SequenceOutput) -> None:
        self.delivered[output.choice] += output.token_ids
        self.has_prompt_logprobs |= output.prompt_logprobs is not None
        if output.finish_reason is not None:
            self.finished.add(output.choice)
        self.stream.put(output)

    @property
    def is_finished(self) -> bool:
        return len(self.finished) == self.request.params.n

    def ending(self, reason: FinishReason, error_code: str | None) -> list[SequenceOutput]:
        """The last outputs of the choices that are still open, for when the engine will not write them."""
        return [
            SequenceOutput(
                request_id=self.request.request_id,
                choice=choice,
                finish_reason=reason,
                error_code=error_code,
                num_prompt_tokens=len(self.request.prompt_token_ids),
                num_output_tokens=len(self.delivered[choice]),
            )
            for choice in range(self.request.params.n)
            if choice not in self.finished
        ]

    def resumed(self) -> GenerateRequest:
        """The request for a new engine, which goes on where the stream stands."""
        params = self.request.params
        if self.has_prompt_logprobs:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.request, params=params, forced_output=self.delivered, finished_choices=sorted(self.finished)
        )


class OutputIterator(AsyncIterator[SequenceOutput]):
    """What `generate` returns. Closing it, or dropping it, before its end aborts the request."""

    def __init__(self, open_request: OpenRequest, abandon: Callable[[OpenRequest], None]) -> None:
        self._open = open_request
        self._abandon = abandon
        self._num_left = open_request.request.params.n

    async def __anext__(self) -> SequenceOutput:
        if self._num_left == 0:
            raise StopAsyncIteration
        output = await self._open.stream.get()
        self._num_left -= output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        """Idempotent."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._num_left:
            self._num_left = 0
            self._abandon(self._open)
