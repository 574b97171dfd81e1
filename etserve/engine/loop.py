"""The loop around LLMEngine: messages in, one report a step out. The same in a process and in a thread."""

from collections.abc import Callable, Sequence

from etserve.engine.frames import AbortRequest, AddRequest, Configure, FrameError, Shutdown, StepDone, ToEngine, Watch
from etserve.engine.llm_engine import LLMEngine
from etserve.errors import RequestError
from etserve.outputs import GenerateRequest

Receive = Callable[[bool], Sequence[ToEngine]]  # waits for a message if the argument is true


def run_engine(engine: LLMEngine, receive: Receive, send: Callable[[StepDone], None]) -> None:
    """Serve until Shutdown comes. What `receive` and `send` raise ends the loop."""
    num_accepted = 0
    while True:
        for message in receive(not engine.has_work):
            match message:
                case AddRequest(request):
                    num_accepted += 1
                    _add(engine, request)
                case AbortRequest(request_id):
                    engine.abort(request_id)
                case Watch(is_on):
                    engine.is_watched = is_on
                case Shutdown():
                    return
                case Configure():
                    raise FrameError("the engine is configured once")
        if engine.has_work:
            outputs, stats = engine.step()
            send(StepDone(outputs, stats, num_accepted))


def _add(engine: LLMEngine, request: GenerateRequest) -> None:
    try:
        engine.add_request(request)
    except RequestError as error:  # the front end checks what it can; the rest is answered in the stream
        engine.refuse(request, error.code or "request_refused")
