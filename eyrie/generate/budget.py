"""The token budget of a shard: which prompts must be answered, and where the shard ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Before any answer is seen, one stop in this share of max_tokens is taken for granted: answers cut at max_tokens then
# have a mean of half of it.
PRIOR_SHARE = 0.63

# Rows are needed until the budget is filled even if those in flight bring so many standard deviations less than
# expected, but never for more than so large a share of the budget: a guess that proves too high is paid for in slots
# that stand empty, and then in answers awaited one after the other.
CAUTION, SPARE = 2.0, 0.01


@dataclass(slots=True)
class _Flight:
    """A row in flight: the clock when an answer was asked for, the answers it has, and those behind the awaited one."""

    since: int
    seen: int
    left: int


class Budget:
    """Decides which rows must be answered, and where the shard ends.

    Rows are taken in order. The next one is needed exactly when the rows before it may well hold fewer tokens than the
    budget; a row in flight counts with its expected length. Once nothing is in flight nothing is guessed, so admission
    can pause but never stall. The guess moves work in time and never changes what the shard holds.

    The guess: answers end at a constant rate per token, which is the number of stops over all tokens seen, those of
    rows in flight included. Leaving these out would favour short answers, which finish first (simulated with 64 rows
    at once and a budget of 25,000 tokens: 13% to 17% bought in vain, against under 1%). How many tokens a row in flight
    has follows from a clock that counts tokens per row: engines give each row a token per step, or nearly so. A row of
    several turns counts with a mean answer for each turn that is still to come.

    Attributes:
        answered: tokens of all answers that were reached, the surplus and rows in flight included.
        filled: tokens of the prefix.
        end: length of the prefix: rows before it are answered or passed over.
    """

    def __init__(self, tokens: int, max_tokens: int) -> None:
        self.tokens, self.max_tokens = tokens, max_tokens
        self.answered, self.filled, self.end = 0, 0, 0
        self._known: dict[int, int] = {}
        self._started: dict[int, _Flight] = {}
        self._clock = self._stops = self._awaited = 0

    @property
    def full(self) -> bool:
        return self.filled >= self.tokens

    @property
    def needs_next(self) -> bool:
        if self.answered + self._awaited * self.max_tokens < self.tokens:  # whatever the rows in flight hold
            return True
        expected = self._expected()
        # what a row will yet bring is spread about as widely as it is large
        spread = expected / max(len(self._started), 1) ** 0.5
        return self.answered + expected - min(CAUTION * spread, SPARE * self.tokens) < self.tokens

    def start(self, position: int, answers: Sequence[int] = (), left: int = 0) -> None:
        """Row ``position``, the next one, is in flight.

        Args:
            answers: tokens of the answers that it has already.
            left: answers that may follow the one that is awaited.
        """
        self._started[position] = _Flight(self._clock, len(answers), left)
        self._awaited += 1 + left
        self._learn(answers)

    def turn(self, position: int, answers: Sequence[int]) -> None:
        """Row ``position`` has these answers by now, and its next one is asked for."""
        flight = self._started[position]
        new = answers[flight.seen :]
        self._learn(new)
        self._clock = max(self._clock, flight.since + new[0])
        self._awaited -= len(new)
        flight.since, flight.seen, flight.left = self._clock, len(answers), flight.left - len(new)

    def book(self, position: int, *answers: int) -> None:
        """Row ``position`` ends with answers of so many tokens; none, or 0, when it is passed over."""
        flight = self._started.pop(position, None)
        new = answers
        if flight is not None:
            new = answers[flight.seen :]
            self._awaited -= 1 + flight.left
            self._clock = max(self._clock, flight.since + (new[0] if new else 0))
        self._learn(new)
        self._known[position] = sum(answers)
        while not self.full and self.end in self._known:
            self.filled += self._known[self.end]
            self.end += 1

    def _learn(self, answers: Sequence[int]) -> None:
        self.answered += sum(answers)
        self._stops += sum(0 < tokens < self.max_tokens for tokens in answers)

    def _expected(self) -> float:
        """Tokens that the rows in flight will yet bring."""
        if not self._started:
            return 0.0
        shown = np.fromiter((flight.since for flight in self._started.values()), np.float64, len(self._started))
        shown = np.minimum(self._clock - shown, self.max_tokens - 1)
        rate = (self._stops + 1) / (self.answered + float(shown.sum()) + PRIOR_SHARE * self.max_tokens)
        later = self._awaited - len(self._started)
        mean = -np.expm1(-rate * self.max_tokens) / rate
        return float((shown - np.expm1(-rate * (self.max_tokens - shown)) / rate).sum() + later * mean)
