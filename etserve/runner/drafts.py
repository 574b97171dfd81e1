"""Drawing where drafted tokens were computed along: position by position, as the plain engine would. Drafts nothing.

A drafted token is accepted when it is the very token that is drawn at its position, with that position's own random
number, penalties, grammar and temperature. So what comes out is the plain engine's, token by token, greedy or not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from etserve.plan import Sampled
from etserve.runner.batch_builder import Draw
from etserve.runner.sampler import DrawnRows, Sampler
from etserve.sequence import Sequence


def split_draws(draws: list[Draw], max_rows: int) -> Iterator[list[Draw]]:
    """Runs of neighbours that have at most `max_rows` rows together, and one draw at least."""
    part: list[Draw] = []
    num_rows = 0
    for draw in draws:
        if part and num_rows + len(draw.rows) > max_rows:
            yield part
            part, num_rows = [], 0
        part.append(draw)
        num_rows += len(draw.rows)
    if part:
        yield part


def draw_in_order(
    sampler: Sampler, draws: list[Draw], logits: torch.Tensor
) -> tuple[DrawnRows, dict[int, list[Sampled]]]:
    """Draw the next token of each sequence, and one more for each drafted token that was drawn so.

    `logits`: f32 [R, vocab], the rows of all draws in order; overwritten. Returns the first tokens, and by seq_id those
    after them. A sequence that fails at a later position just stops before it: the next step will find the same.
    """
    starts: list[int] = []
    num_rows = 0
    for draw in draws:
        starts.append(num_rows)
        num_rows += len(draw.rows)
    if num_rows == len(draws):
        return sampler.draw([draw.seq for draw in draws], logits), {}
    drawn = sampler.draw([draw.seq for draw in draws], logits[starts])
    followers: dict[int, list[Sampled]] = {}
    pursuits = [_Pursuit(draw, start) for draw, start in zip(draws, starts, strict=True) if draw.draft]
    latest = drawn.sampled
    while pursuits := [one for one in pursuits if one.advance(sampler, latest)]:
        latest = sampler.draw([one.ahead for one in pursuits], logits[[one.row for one in pursuits]]).sampled
        for seq_id, sampled in latest.items():
            followers.setdefault(seq_id, []).append(sampled)
    return drawn, followers


@dataclass(slots=True)
class _Pursuit:
    """One sequence on its way along its draft, as it will be once its tokens are taken in; the real one stays."""

    ahead: Sequence  # the real one until a drafted token is accepted: most drafts are not worth a copy of all tokens
    draft: tuple[int, ...]
    row: int  # of the logits, whose token was drawn last
    num_accepted: int = 0

    def __init__(self, draw: Draw, row: int) -> None:
        self.ahead = draw.seq
        self.draft = draw.draft
        self.row = row
        self.num_accepted = 0

    def advance(self, sampler: Sampler, latest: dict[int, Sampled]) -> bool:
        """Go to the next row if the drafted token was drawn and something may follow it."""
        sampled = latest.get(self.ahead.seq_id)
        is_accepted = (
            sampled is not None
            and self.num_accepted < len(self.draft)
            and sampled.token_id == self.draft[self.num_accepted]
        )
        if sampled is None or not is_accepted:
            return False
        if self.num_accepted == 0:
            self.ahead = replace(self.ahead, token_ids=self.ahead.token_ids.copy())
        self.ahead.token_ids.append(sampled.token_id)
        self.ahead.control = self.ahead.control.observe(sampled.entropy_nats, sampled.measured)
        self.num_accepted += 1
        self.row += 1
        return not sampler.is_complete(self.ahead)
