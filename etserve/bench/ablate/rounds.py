"""One round of one workload: what all arms share of it, and how an arm is put through it."""

import gc

import msgspec

from etserve.bench import host
from etserve.bench.ablate.arms import SKETCH_BITS, Arm
from etserve.bench.ablate.drive import Driver
from etserve.bench.ablate.lab import Lab
from etserve.bench.ablate.quality import settings_of
from etserve.bench.ablate.reading import Reader
from etserve.bench.ablate.records import PromptRun, RoundRun
from etserve.bench.ablate.workloads import AblationWorkload, Arrival, blocks_of, pool_blocks
from etserve.bench.phases import measured
from etserve.config import ControlConfig
from etserve.engine.building import Memory
from etserve.engine.llm_engine import LLMEngine


class RoundBench:
    """One round's requests, and the memory that they are read again in."""

    def __init__(self, lab: Lab, workload: AblationWorkload, asked: list[Arrival]) -> None:
        self._lab, self._workload, self._asked = lab, workload, asked
        self._bits = SKETCH_BITS if workload.has_read_prompts else 0
        self._num_blocks = blocks_of(asked) * 5 // 4 + 1  # the texts that are read again do not push the prompts out
        self._memory = lab.memory(self._bits, self._num_blocks)
        self._reader = Reader(lab.loaded(self._bits).decoder, self._memory)
        self._prompts = self._prime()

    def _prime(self) -> PromptRun | None:
        """Read the prompts once, for the replays and, where the workload says so, for the arms."""
        if not self._workload.has_read_prompts:
            self._reader.prime(self._asked)
            return None
        engine = self._engine(ControlConfig(), self._bits)
        asked = [Arrival(a.index, a.prompt_token_ids, 1, 0.0, a.seed) for a in self._asked]
        runs, steps = Driver(engine, asked, None, self._workload.temperature).run()
        return PromptRun(
            seconds=max(run.end_seconds for run in runs), flops=sum(steps.flops), bytes_read=sum(steps.bytes_read)
        )

    def _bits_of(self, wanted: int) -> int:
        """Who shares the memory has its sketches too."""
        return self._bits if self._workload.has_read_prompts else wanted

    def _engine(self, control: ControlConfig, bits: int) -> LLMEngine:
        shared: Memory | None = self._memory if self._workload.has_read_prompts else None
        return self._lab.engine(
            control,
            self._bits_of(bits),
            num_kv_blocks=pool_blocks(self._workload, self._asked) if shared is None else self._num_blocks,
            max_num_seqs=self._workload.max_num_seqs,
            max_step_tokens=self._workload.max_step_tokens,
            memory=shared,
        )

    def run(self, arm: Arm, number: int, seed: int, control: ControlConfig) -> RoundRun:
        """Serve the requests under the arm's law, then read again what it wrote."""
        gc.collect()  # the pool of the arm before
        engine = self._engine(control, arm.sketch_bits)
        before = host.snapshot([])
        driver = Driver(engine, self._asked, self._workload.load.concurrency, self._workload.temperature)
        with measured(self._lab.loaded(self._bits_of(arm.sketch_bits)).decoder) as phases:
            requests, steps = driver.run()
        foreign = host.foreign_share(before, host.snapshot([]))
        info = engine.info
        del engine, driver
        replays = self._reader.replay(self._asked, requests)
        return RoundRun(
            arm=arm.name,
            workload=self._workload.name,
            round=number,
            seed=seed,
            settings=settings_of(control),
            num_kv_blocks=info.num_kv_blocks,
            weight_bytes=info.weight_bytes,
            cpu_foreign=foreign,
            prompts=self._prompts,
            phases=phases,
            requests=[msgspec.structs.replace(request, replay=replays.get(request.index)) for request in requests],
            steps=steps,
        )
