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
