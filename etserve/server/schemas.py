"""What clients may send, field by field. Bounds that need the model (vocabulary, context) are checked in params.py."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_TOKENS = 1 << 20

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Label = Annotated[str, Field(max_length=512)]
Salt = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}\z")]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

# Options of OpenAI's and vLLM's protocols that are known and not offered. `null` means "not asked for" and is taken.
# fmt: off
NOT_OFFERED = frozenset({
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "allowed_tokens", "audio", "bad_words",
    "best_of", "chat_template", "chat_template_kwargs", "continue_final_message", "documents", "echo",
    "function_call", "functions", "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json",
    "guided_regex", "images", "kv_transfer_params", "length_penalty", "logits_processors", "mm_processor_kwargs",
    "moderation", "parallel_tool_calls", "prediction", "prompt_embeds", "prompt_logprobs", "reasoning_effort",
    "request_id", "return_tokens_as_token_ids", "spaces_between_special_tokens", "structured_outputs", "suffix",
    "tool_choice", "tools", "truncate_prompt_tokens", "typical_p", "use_beam_search", "verbosity",
    "web_search_options",
})
# fmt: on
ENTROPIC_NOT_OFFERED: frozenset[str] = frozenset()


class Strict(BaseModel):
    """No unknown field, no coercion: true is not 1, "1" is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def _one_or_list(value: Any) -> str:
    """Which branch of "one or a list" a value belongs to: without it a refusal would speak of the other one."""
    return "list" if isinstance(value, list) else "one"


Stops = Annotated[
    Annotated[StopText, Tag("one")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True), Tag("list")],
    Discriminator(_one_or_list),
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: taken, it changes no content


class JsonSchemaFormat(Strict):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class EntropicOptions(Strict):
    """What a request wants of the control loop; null: what the server is set to."""

    target_entropy_nats: Annotated[Number, Field(ge=0.0, le=20.0)] | None = None
    temperature_mode: Literal["off", "cool", "two_sided", "edt", "mirostat"] | None = None
    pruning: Literal["off", "on"] | None = None
    epsilon: Annotated[Number, Field(ge=0.0, le=0.5)] | None = None
    kv_protect: bool | None = None
    eviction: Literal["off", "pressure", "budget"] | None = None
    block_budget: Annotated[int, Field(ge=32, le=1 << 24)] | None = None
    verify: Literal["off", "bounded", "lossless"] | None = None
    speculation: Literal["off", "on"] | None = None
    trace: Literal["none", "summary", "tokens"] = "none"


class SamplingFields(Strict):
    """What both completion routes share."""

    model: Label | None = None
    temperature: Annotated[Number, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[Number, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[Number, Field(ge=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Count | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}\z")], Annotated[Number, Field(ge=-100.0, le=100.0)]],
            Field(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    entropic: EntropicOptions | None = None
    cache_salt: Salt | None = None
    # Taken from OpenAI's clients; they cannot change what is generated.
    user: Label | None = None
    metadata: Annotated[dict[Label, Label], Field(max_length=16)] | None = None
    store: bool | None = None  # only false
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None


class CompletionRequest(SamplingFields):
    prompt: Any  # see prompts.py: text, texts, ids or lists of ids
    max_tokens: Count | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None


OTHER_PARTS = frozenset({"file", "image_url", "input_audio", "input_image", "refusal", "video_url"})


class TextPart(Strict):
    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _is_offered(cls, value: Any) -> Any:
        if isinstance(value, str) and value in OTHER_PARTS:
            raise PydanticCustomError("not_offered", "parts of type {kind} are not offered, only text", {"kind": value})
        return value


Content = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True), Tag("list")],
    Discriminator(_one_or_list),
]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[str, Field(max_length=256)] | None = None
    # What an assistant's reply holds when a client sends it back whole: nothing of it may say anything.
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatCompletionRequest(SamplingFields):
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    # Without tools these three say nothing; with tools the request is refused anyway.
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None


class TokenizeRequest(Strict):
    model: Label | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True  # of a prompt; a chat template brings its own
    add_generation_prompt: bool = True  # of messages


class DetokenizeRequest(Strict):
    model: Label | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
