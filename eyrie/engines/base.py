"""What every engine offers: requests in, answers out, as many at once as the engine likes.

The caller owns the budget and so the iterator of requests; the engine owns concurrency. Both run in one thread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from eyrie.config import Sampling

# Finish reasons of an answer that can be used, and of one that cannot: the latter are keys of REASONS.
USABLE = ("stop", "length")
UNUSABLE = ("refused", "drifted", "unparsed")


@dataclass(frozen=True)
class Request:
    """One prompt to answer.

    Attributes:
        position: the caller's own number for it, handed back untouched.
        prompt_ids: token ids, the chat template and generation prompt included.
        sampling: how to answer; ``sampling.max_tokens`` bounds the answer.
        seed: what a random answer may depend on, besides the prompt (``sampling.seed``, moved on when asked afresh).
        messages, tools: the same prompt before rendering, for servers that render it themselves.
    """

    position: int
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Answer:
    """One finished answer, or that there is none.

    Attributes:
        output_ids: token ids as generated; the stop token is the last one when ``finish_reason`` is ``stop``. Empty
            when there is no usable answer.
        finish_reason: ``stop`` (a stop token came), ``length`` (``max_tokens`` were generated), or why the answer
            cannot be used: ``refused``, ``drifted``, ``unparsed`` (:data:`eyrie.conversation.REASONS`).
        prompt_ids: the prompt as the server rendered it, where that is known and differs from the request's.
        facts: what is worth keeping of this one answer and is no part of the shard: ``cost`` in dollars, ``usage``,
            ``server``, ``provider``, ``cached_tokens``, ``faults`` (kind -> how often, before it came), ``why``.
    """

    output_ids: list[int]
    finish_reason: str
    prompt_ids: list[int] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


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


def answer_seed(seed: int, prompt_ids: list[int]) -> int:
    """A seed of the request alone, so that sampled answers do not depend on order or company either."""
    digest = hashlib.sha256(json.dumps([seed, prompt_ids]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def with_stop(ids: list[int], kind: str, matched: object) -> list[int]:
    """``ids`` up to and with the token that ended the answer, which a server may name beside them."""
    if kind == "stop" and isinstance(matched, int) and ids[-1:] != [matched]:
        return [*ids, matched]
    return ids
