"""What every fake engine and fake server answers: a function of the prompt alone. Imports nothing of Eyrie."""

from __future__ import annotations

import hashlib
import json
import random

STOP = 2


def answer_ids(prompt_ids: list[int], max_tokens: int, seed: int = 0) -> tuple[list[int], str]:
    """Token ids and finish reason, ``stop`` or ``length``."""
    draw = random.Random(hashlib.sha256(json.dumps([prompt_ids, seed]).encode()).digest())
    length = draw.randint(1, max_tokens + 6)
    ids = [draw.randint(3, 500) for _ in range(length - 1)] + [STOP]
    return (ids[:max_tokens], "length") if length > max_tokens else (ids, "stop")


def scored_ids(ids: list[int], count: int, drift: float = 0.0) -> list[tuple[float, int, None]]:
    """Greedy tokens with log-probabilities, each a function of all tokens before it; none of them ends the answer.

    Args:
        drift: share of the tokens behind the first (that of the prefill) which come out as others do.
    """
    said: list[tuple[float, int, None]] = []
    for place in range(count):
        context = [*ids, *(id for _, id, _ in said)]
        draw = random.Random(hashlib.sha256(json.dumps(context).encode()).digest())
        id, logprob = draw.choice([STOP, *range(3, 40)]), -draw.random()
        strays = place > 0 and random.Random(json.dumps(["stray", context])).random() < drift
        said.append((logprob, 501 if strays else id, None))
    return said
