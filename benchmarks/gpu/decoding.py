"""Decode steps of whole models, random weights, one engine in this process: tokens a second against the weights' bytes.

python -m benchmarks.gpu.decoding --out DIR --shapes 1b,8b
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.models import SHAPES, write_model
from benchmarks.gpu.tables import Row, write_table
from etserve.llm import LLM
from etserve.sampling_params import SamplingParams


def measure(llm: LLM, name: str, batch: int, prompt: int, tokens: int, weight_bytes: int) -> Row:
    """Seconds of one greedy batch, less those of its prompts with one token each."""
    prompts = [[(7 * i + j) % 250 for j in range(prompt)] for i in range(batch)]

    def taken(count: int) -> float:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - begin

    taken(2)
    steps = max(taken(tokens) - taken(1), 1e-9) / (tokens - 1)
    return {
        "model": name,
        "batch": batch,
        "prompt": prompt,
        "ms a step": steps * 1e3,
        "tokens/s": batch / steps,
        "GB/s of weights": weight_bytes / steps / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    batches, prompt, tokens = ((1, 8, 32, 128), 512, 64) if options.device == "cuda" else ((1, 2), 20, 4)
    rows = []
    for name in options.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            weight_bytes = write_model(Path(folder), SHAPES[name], device=options.device)
            limits = {"max_num_seqs": max(batches), "max_model_len": 2048, "prefix_caching": False}
            llm = LLM(folder, device=options.device, max_step_tokens=2048, **limits)
            rows += [measure(llm, name, batch, prompt, tokens, weight_bytes) for batch in batches]
    print(write_table(options.out, "decoding", rows).read_text())


if __name__ == "__main__":
    main()
