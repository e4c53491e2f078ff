"""The token budget of a shard: which prompts must be answered, and where the shard ends."""

from __future__ import annotations

import numpy as np

# Before any answer is seen, one stop in this share of max_tokens is taken for granted: answers cut at max_tokens then
# have a mean of half of it.
PRIOR_SHARE = 0.63


class Budget:
    """Decides which rows must be answered, and where the shard ends.

    Rows are taken in order. The next one is needed exactly when the rows before it are thought to hold fewer tokens
    than the budget; a row in flight counts with its expected length. Once nothing is in flight nothing is guessed, so
    admission can pause but never stall. The guess moves work in time and never changes what the shard holds.

    The guess: answers end at a constant rate per token, which is the number of stops over all tokens seen, those of
    rows in flight included. Leaving these out would favour short answers, which finish first (simulated with 64 rows
    at once and a budget of 25,000 tokens: 13% to 17% bought in vain, against under 1%). How many tokens a row in flight
    has follows from a clock that counts tokens per row: engines give each row a token per step, or nearly so.

    Attributes:
        answered: tokens of all answered rows that were reached, the surplus included.
        filled: tokens of the prefix.
        end: length of the prefix: rows before it are answered or passed over.
    """

    def __init__(self, tokens: int, max_tokens: int) -> None:
        self.tokens, self.max_tokens = tokens, max_tokens
        self.answered, self.filled, self.end = 0, 0, 0
        self._known: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._clock = self._stops = 0

    @property
    def full(self) -> bool:
        return self.filled >= self.tokens

    @property
    def needs_next(self) -> bool:
        if self.answered + len(self._started) * self.max_tokens < self.tokens:  # whatever the rows in flight hold
            return True
        return self.answered + self._expected() < self.tokens

    def start(self, position: int) -> None:
        """Row ``position``, the next one, is in flight."""
        self._started[position] = self._clock

    def book(self, position: int, tokens: int) -> None:
        """Row ``position`` holds ``tokens``: 0 when it is passed over, else the length of its answer."""
        started = self._started.pop(position, None)
        if started is not None:
            self._clock = max(self._clock, started + tokens)
        self.answered += tokens
        self._stops += 0 < tokens < self.max_tokens
        self._known[position] = tokens
        while not self.full and self.end in self._known:
            self.filled += self._known[self.end]
            self.end += 1

    def _expected(self) -> float:
        """Tokens that the rows in flight will hold once they have ended."""
        if not self._started:
            return 0.0
        shown = np.fromiter(self._started.values(), np.float64, len(self._started))
        shown = np.minimum(self._clock - shown, self.max_tokens - 1)
        rate = (self._stops + 1) / (self.answered + float(shown.sum()) + PRIOR_SHARE * self.max_tokens)
        return float((shown - np.expm1(-rate * (self.max_tokens - shown)) / rate).sum())
