"""How long a shard will yet take: a range, learnt from the answers that have ended.

Two things take time. The tokens that are missing come at the speed of one answer times the answers in flight. And the
last answers must end, however few they are: with 16,000-token answers that is most of a short shard's time, with
700-token ones it is nothing. So lengths count, and not only a rate of tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WINDOW = 512  # answers that the range is learnt from: servers become slower or faster
KNOWN_AFTER = 20  # answers after which the longest one seen stands for the longest to come
WIDEST = 0.75  # of the estimate, up and down


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer that has ended: its completion tokens, and the seconds from its request to its end."""

    tokens: int
    seconds: float


def speed_of(ended: Sequence[Ended]) -> float:
    """Tokens a second of one answer; 0 before anything is known."""
    seconds = sum(one.seconds for one in ended)
    return sum(one.tokens for one in ended) / seconds if seconds > 0 else 0.0


def made(ended: Sequence[Ended], in_flight: Sequence[float], max_tokens: int) -> float:
    """Tokens that the answers in flight have by now, at the speed of those that have ended."""
    speed = speed_of(ended)
    return sum(min(speed * waited, max_tokens) for waited in in_flight)


def remaining(
    missing: float,
    ended: Sequence[Ended],
    in_flight: Sequence[float],
    max_tokens: int,
    turns: int = 1,
    slots: int = 1,
) -> tuple[float, float] | None:
    """Seconds until the shard is full, at the least and at the most; None before anything is known.

    Args:
        missing: completion tokens that neither the answers that have ended nor those in flight hold.
        ended: the latest answers.
        in_flight: seconds for which each answer in flight has been awaited.
        max_tokens: of one answer.
        turns: answers that a conversation may need, one after the other.
        slots: answers that are in flight at once while there is something to ask, or more.
    """
    speed, count = speed_of(ended), len(ended)
    if speed <= 0 or not (in_flight or missing > 0):
        return None if speed <= 0 else (0.0, 0.0)
    mean = sum(one.tokens for one in ended) / count
    spread = (sum((one.tokens - mean) ** 2 for one in ended) / count) ** 0.5 / mean
    margin = min(WIDEST, 2 * max(spread, 0.25) / count**0.5)  # two standard errors of the mean length
    slots = max(len(in_flight), slots)
    longest = max(max(one.tokens for one in ended), speed * max(in_flight, default=0.0))
    longest = min(longest, max_tokens) if count >= KNOWN_AFTER else max_tokens
    soonest, latest = speed * (1 + margin), speed * (1 - margin)
    waited = min(in_flight, default=0.0)  # the youngest answer in flight has the most before it
    if missing > 0:
        waited = 0.0  # and others are yet to be asked for
    tail = max(longest / latest - waited, 0.0) + (turns - 1) * longest / latest
    missing = max(missing, 0.0)
    return missing / (slots * soonest), missing / (slots * latest) + tail


class Pace:
    """Watches answers start and end, for :func:`remaining`.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked, self._slots = clock, dict[int, float](), 1
        self._ended: deque[Ended] = deque(maxlen=WINDOW)

    @property
    def in_flight(self) -> int:
        return len(self._asked)

    def asked(self, position: int) -> None:
        self._asked[position] = self._clock()
        self._slots = len(self._asked)

    def ended(self, position: int, tokens: int) -> None:
        self._ended.append(Ended(tokens, self._clock() - self._asked.pop(position)))

    def made(self, max_tokens: int) -> int:
        """See :func:`made`."""
        return round(made(list(self._ended), self._waiting(), max_tokens))

    def remaining(self, missing: float, max_tokens: int, turns: int = 1) -> tuple[float, float] | None:
        """See :func:`remaining`."""
        return remaining(missing, list(self._ended), self._waiting(), max_tokens, turns, self._slots)

    def _waiting(self) -> list[float]:
        now = self._clock()
        return [now - since for since in list(self._asked.values())]
