"""Engines for the arms: weights are loaded once, each run gets a fresh pool, scheduler and cost model."""

import dataclasses
from pathlib import Path

import msgspec

from etserve.config import BLOCK_SIZE, ControlConfig, EngineConfig
from etserve.engine.building import Memory, assemble, set_threads, warm_up
from etserve.engine.llm_engine import LLMEngine
from etserve.models.files import resolve_model
from etserve.models.loader import LoadedModel, load_model
from etserve.tokenizer.loading import load_tokenizer
from etserve.tokenizer.tokenizer import Tokenizer


class Lab:
    """A model, held once without and once with key sketches: only the arms that select by them keep any."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: model, dtypes, backend and threads; what the arms are about is replaced. Raises ModelError."""
        self.config = config
        self._files = resolve_model(config.model)
        self._loaded: dict[int, LoadedModel] = {}
        set_threads(config.threads)
        self.tokenizer: Tokenizer = load_tokenizer(self._files)

    @property
    def model_name(self) -> str:
        return self._files.name if self._files.gguf is not None else Path(self._files.path).name

    def loaded(self, sketch_bits: int = 0) -> LoadedModel:
        if sketch_bits not in self._loaded:
            wanted = self._settings(ControlConfig(), sketch_bits)
            self._loaded[sketch_bits] = load_model(wanted, self._files)
        return self._loaded[sketch_bits]

    def engine(
        self,
        control: ControlConfig,
        sketch_bits: int,
        *,
        num_kv_blocks: int,
        max_num_seqs: int = 64,
        max_step_tokens: int = 512,
        memory: Memory | None = None,
    ) -> LLMEngine:
        """A warm engine with so many blocks for live sequences. Equal beginnings are read once.

        `memory`: of as many blocks and made for the same bits of sketch, instead of one of its own.
        """
        loaded = self.loaded(sketch_bits)
        config = _replace(
            self._settings(control, sketch_bits),
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
        )
        loaded = dataclasses.replace(loaded, max_model_len=min(loaded.max_model_len, num_kv_blocks * BLOCK_SIZE))
        engine = LLMEngine(assemble(config, loaded, self.tokenizer, self.model_name, {}, memory=memory))
        warm_up(engine)
        return engine

    def memory(self, sketch_bits: int, num_kv_blocks: int) -> Memory:
        return Memory.of(self.loaded(sketch_bits).decoder, num_kv_blocks)

    def _settings(self, control: ControlConfig, sketch_bits: int) -> EngineConfig:
        return _replace(
            self.config,
            control=control,
            pruning_sketch_bits=sketch_bits,
            kv_memory_bytes=None,
            prefix_caching=True,
        )


def _replace(config: EngineConfig, **changes: object) -> EngineConfig:
    return msgspec.structs.replace(config, **changes)
