"""OpenVINO GenAI's continuous batching behind POST /v1/completions, as far as the load generator asks of it.

Runs in the peer's own environment (openvino-genai, openvino-tokenizers, aiohttp), not in etserve's.
    python openvino_server.py --model demo.gguf --port 8000 --threads 2
Greedy only, text prompts only. Token texts come from the vocabulary, so that streaming costs the peer next to nothing.
"""

import argparse
import asyncio
import codecs
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import openvino_genai as genai
from aiohttp import web

Sink = Callable[[list[int], bool], None]  # new token ids, and whether they are the last


class Engine(threading.Thread):
    """Steps the pipeline while there is work; the pipeline is used by this thread only."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(daemon=True)
        self._pipeline = pipeline
        self._arrivals: queue.SimpleQueue[tuple[Any, Any, Sink]] = queue.SimpleQueue()
        self._open: dict[int, tuple[Any, Sink]] = {}
        self._ids = itertools.count()

    def ask(self, input_ids: Any, config: Any, sink: Sink) -> None:
        """`sink` is called from the engine's thread."""
        self._arrivals.put((input_ids, config, sink))

    def run(self) -> None:
        try:
            while True:
                self._admit()
                self._pipeline.step()
                self._deliver()
        except BaseException as error:  # without its engine the server is of no use: the client must see it end
            print(f"engine: {error}", flush=True)
            os._exit(1)

    def _admit(self) -> None:
        must_wait = not self._open
        while must_wait or not self._arrivals.empty():
            input_ids, config, sink = self._arrivals.get()
            must_wait = False
            number = next(self._ids)
            self._open[number] = (self._pipeline.add_request(number, input_ids, config), sink)

    def _deliver(self) -> None:
        for number, (handle, sink) in list(self._open.items()):
            if not handle.can_read():
                continue
            output = handle.read()[0]
            is_last = output.finish_reason != genai.GenerationFinishReason.NONE
            sink(list(output.generated_ids), is_last)
            if is_last:
                del self._open[number]


class Server:
    """The two routes."""

    def __init__(self, pipeline: Any) -> None:
        self._tokenizer = pipeline.get_tokenizer()
        self._texts = {number: text for text, number in self._tokenizer.get_vocab().items()}
        self._engine = Engine(pipeline)
        self._engine.start()

    async def health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ready"})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        refused = [name for name in ("temperature", "n") if body.get(name) not in (None, 0, 1)]
        if refused or not body.get("stream") or not isinstance(body.get("prompt"), str) or body.get("temperature") == 1:
            return web.json_response({"error": "greedy streams of one text prompt only"}, status=400)
        config = genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        input_ids = self._tokenizer.encode(body["prompt"]).input_ids
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(response, input_ids, config)
        return response

    async def _stream(self, response: web.StreamResponse, input_ids: Any, config: Any) -> None:
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[list[int], bool]]()
        self._engine.ask(
            input_ids, config, lambda ids, last: loop.call_soon_threadsafe(pieces.put_nowait, (ids, last)) and None
        )
        decoder, num_tokens, is_last = codecs.getincrementaldecoder("utf-8")("replace"), 0, False
        while not is_last:
            ids, is_last = await pieces.get()
            num_tokens += len(ids)
            text = decoder.decode(b"".join(self._texts[number] for number in ids), is_last)
            choice = {"index": 0, "text": text, "finish_reason": "length" if is_last else None}
            await response.write(_event({"choices": [choice]}))
        num_prompt = int(input_ids.shape[1])
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def load(model: str, threads: int, cache_gib: int, precision: str) -> Any:
    """The pipeline, with the scheduler's limits that the other servers are given."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache_gib
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": precision}
    properties["INFERENCE_PRECISION_HINT"] = precision
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument(
        "--precision", default="bf16", help="of arithmetic and KV cache where weights are not quantised"
    )
    options = parser.parse_args()
    server = Server(load(options.model, options.threads, options.cache_gib, options.precision))
    app = web.Application(client_max_size=4 << 20)
    app.add_routes([web.get("/health", server.health), web.post("/v1/completions", server.completions)])
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
