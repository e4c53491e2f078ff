"""What every engine offers: requests in, answers out, as many at once as the engine likes.

The caller owns the budget and so the iterator of requests; the engine owns concurrency. Both run in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from eyrie.config import Sampling


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Attributes:
        position: the caller's own number for it, handed back untouched.
        prompt_ids: token ids, the chat template and generation prompt included.
        sampling: how to answer; ``sampling.max_tokens`` bounds the answer.
        seed: what a random answer may depend on, besides the prompt (``sampling.seed``, moved on when asked afresh).
    """

    position: int
    prompt_ids: list[int]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Answer:
    """One finished answer.

    Attributes:
        output_ids: token ids as generated; the stop token is the last one when ``finish_reason`` is ``stop``.
        finish_reason: ``stop`` (a stop token came) or ``length`` (``max_tokens`` were generated).
    """

    output_ids: list[int]
    finish_reason: str


class Engine(Protocol):
    """Who answers.

    An answer may depend on its request alone: not on order, company or batch size.
    """

    def answer(self, requests: Iterator[Request | None], finished: Callable[[Request, Answer], None]) -> None:
        """Answer ``requests``, calling ``finished`` once for each, in whatever order they end.

        The engine pulls the next request whenever it has room, never earlier. ``None`` means "nothing for now, ask
        again after the next ``finished``"; it comes only while a request is in flight. When the iterator ends, the
        engine finishes what is in flight and returns.
        """
        ...
