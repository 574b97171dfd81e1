"""What one HTTP request came to: written by its generation, read by the access log and the tracer when it has ended."""

from dataclasses import dataclass, field

from etserve.outputs import SequenceOutput
from etserve.sampling_params import SamplingParams


@dataclass(slots=True)
class GenerationRecord:
    """Counts of a completion request, over its prompts and choices. Never text."""

    operation: str  # "chat" or "text_completion", as OpenTelemetry's GenAI conventions name them
    model_name: str
    reply_id: str
    params: SamplingParams
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0  # computed on a guess
    num_accepted_tokens: int = 0  # of them
    first_token_seconds: float | None = None  # since the request's arrival
    finish_reasons: list[str] = field(default_factory=list)  # of the choices that ended; "abort" where a client left

    def add(self, output: SequenceOutput) -> None:
        """Count one output of one choice."""
        self.num_output_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self.finish_reasons.append(output.finish_reason)
            self.num_drafted_tokens += output.num_drafted_tokens
            self.num_accepted_tokens += output.num_accepted_tokens
            if output.choice == 0:
                self.num_cached_tokens += output.num_cached_tokens
