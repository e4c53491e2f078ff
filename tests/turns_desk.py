"""Conversations of several turns, and a renderer whose prompts depend on all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from eyrie.conversation import Reject
from tests.generate_desk import Desk, FakeRenderer

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "add")]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(*names: str) -> dict[str, Any]:
    made = [
        {"id": f"d{n}", "type": "function", "function": {"name": name, "arguments": {}}} for n, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(text: str, id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": id} if id else {})}


SAID = {"role": "assistant", "content": "the data's answer"}


class TalkRenderer(FakeRenderer):
    """Ids depend on every message of the context."""

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        if messages[-1]["content"] == "refuse me":
            raise Reject("template_refused")
        return list(hashlib.sha256(json.dumps(messages).encode()).hexdigest()[: 16 + len(messages)].encode())


def conversation(number: int) -> dict[str, Any]:
    """One to four turns; a third of the conversations has tools."""
    messages = [user(f"hello {number}")]
    for turn in range(number % 4):
        if number % 3 == 0 and (number + turn) % 2:
            messages += [calls("search" if turn % 2 else "add"), result(f"result {turn}", "d0")]
        messages += [SAID, user("refuse me" if (number, turn) == (5, 0) else f"and then {turn}")]
    row = {"id": hashlib.sha256(str(number).encode()).hexdigest()[:16], "index": number, "messages": messages}
    return row | ({"tools": TOOLS} if number % 3 == 0 else {})


def desk_of(root: Path, count: int, **more: Any) -> Desk:
    rows = [conversation(number) for number in range(count)]
    return Desk(root, [], rows=rows, turns=9, renderer=TalkRenderer(), **more)
