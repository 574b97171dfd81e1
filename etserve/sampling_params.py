"""What a client asks of one generation. Parsed and bounded at the edge, frozen afterwards."""

from typing import Literal

import msgspec

from etserve.control import thermostat

Trace = Literal["none", "summary", "tokens"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must parse as: any JSON object, or JSON that satisfies a schema."""

    kind: Literal["json_object", "json_schema"]
    schema: str = ""  # JSON text of the schema; empty for json_object


class EntropicParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants of the control loop. None: what the server is set to."""

    temperature_mode: thermostat.Mode | None = None
    target_entropy_nats: float | None = None  # H*
    pruning: Literal["off", "on"] | None = None
    epsilon: float | None = None  # attention mass that a head may miss, before entropy moves it
    kv_protect: bool | None = None  # the protected spans are always read
    eviction: Literal["off", "pressure", "budget"] | None = None  # when blocks give their memory back for good
    block_budget: int | None = None  # blocks to hold at most, of eviction "budget"
    verify: Literal["off", "bounded", "lossless"] | None = None  # what was drawn with blocks skipped
    speculation: Literal["off", "on"] | None = None  # guess tokens and verify them: changes their speed alone
    protected_spans: tuple[tuple[int, int], ...] = ()  # [start, end) of prompt tokens, from the chat's roles


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when drawing stops. Values are within bounds when this exists."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    n: int = 1
    max_tokens: int | None = None  # None: to the end of the context; 0: score the prompt only
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None  # None: the engine draws one when the request arrives
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: none; 0: of the drawn token; k: also of the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: Grammar | None = None
    trace: Trace = "none"  # how much of the entropy record goes into the reply
    entropic: EntropicParams = EntropicParams()
    skip_special_tokens: bool = True

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1
