"""A conversation between the data and the target: what is asked, in which order, and when it must end.

The data's own turns are a script. Each :class:`Step` is what the target is told before one of its answers: user turns,
or the results of tools that the data's assistant had called there. The data's answers are no part of it: the context of
an answer holds the target's own earlier ones.

A result can be replayed only to a target that asked for it. So the conversation goes on behind tool results when the
target called the same tools, by name and in the same order (arguments may differ: the data cannot run a tool), and
behind a user turn when it called none. Elsewhere it ends; the answers so far stay.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from eyrie.conversation import CANONICAL

Message = dict[str, Any]
CALL_ID = "functions.{name}:{index}"  # index counts over the whole conversation


@dataclass(frozen=True)
class Step:
    """What stands between two answers of the target.

    Attributes:
        given: the data's messages: system, user, tool.
        calls: names of the tools whose results come first in ``given``, in the order in which they were called; each
            with the id that the data gave the call, if any. Empty: ``given`` follows an answer without calls.
    """

    given: tuple[Message, ...]
    calls: tuple[tuple[str, str | None], ...] = ()


def script(messages: list[Message]) -> list[Step]:
    """The steps of a conversation of the data (``messages`` of a prompt row), in order."""
    steps: list[Step] = []
    given: list[Message] = []
    called: list[Message] = []

    def close() -> None:
        results = given[0]["role"] == "tool"
        calls = [(call["function"]["name"], call.get("id")) for call in called] if results else []
        steps.append(Step(tuple(given), tuple(calls)))

    for message in messages:
        if message["role"] != "assistant":
            given.append(message)
        elif given:
            close()
            given, called = [], message.get("tool_calls") or []
    if given:
        close()
    return steps


class Talk:
    """One row on its way through its script.

    Args:
        steps: of the row.
        tools: declared to the target.

    Attributes:
        messages: context of the next answer: what the data gave and what the target said.
        turn: answers so far.
        said: places of the target's answers in ``messages``.
        ended: why steps stay unanswered (a key of :data:`eyrie.conversation.REASONS`); None while there is no reason.
    """

    def __init__(self, steps: list[Step], tools: list[dict[str, Any]] | None = None) -> None:
        self.steps, self.tools = steps, tools
        self.messages: list[Message] = list(steps[0].given)
        self.turn = 0
        self.said: list[int] = []
        self.ended: str | None = None
        self._calls = 0

    @property
    def left(self) -> int:
        """Answers that may follow the next one."""
        return len(self.steps) - self.turn - 1

    @property
    def several(self) -> bool:
        return len(self.steps) > 1

    def context(self) -> str:
        """16 hex digits of what the next answer depends on besides sampling and target."""
        content = {"messages": self.messages, "tools": self.tools}
        return hashlib.sha256(CANONICAL.encode(content).encode()).hexdigest()[:16]

    def context_of(self, turn: int) -> list[Message]:
        """The messages before the target's answer number ``turn``, which may be one that is still to come."""
        return self.messages[: self.said[turn]] if turn < len(self.said) else self.messages

    def hear(self, answer: Message) -> bool:
        """Take the target's answer and go on to the next step; False when the conversation ends here.

        Args:
            answer: ``content`` and, where there are any, ``reasoning`` and ``tool_calls``.
        """
        step = self.steps[self.turn + 1]
        calls = answer.get("tool_calls") or []
        names = [call["function"]["name"] for call in calls]
        if names != [name for name, _ in step.calls]:
            self.ended = "no_call" if not names else "other_call" if step.calls else "unexpected_call"
            return False
        ids = [CALL_ID.format(name=name, index=self._calls + place) for place, name in enumerate(names)]
        self._calls += len(ids)
        said = {"role": "assistant", **answer}
        if calls:
            said["tool_calls"] = [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]
        self.said.append(len(self.messages))
        self.messages += [said, *_answering(step, ids)]
        self.turn += 1
        return True


def _answering(step: Step, ids: list[str]) -> list[Message]:
    """The step's messages; its tool results name the target's calls in place of the data's.

    A result belongs to the call whose id it names, else to the first call that has no result yet.
    """
    waiting = [(old, new) for (_, old), new in zip(step.calls, ids, strict=True)]
    told = []
    for message in step.given:
        if message["role"] == "tool" and waiting:
            named = message.get("tool_call_id")
            place = next((i for i, (old, _) in enumerate(waiting) if named is not None and old == named), 0)
            message = {**message, "tool_call_id": waiting.pop(place)[1]}
        told.append(message)
    return told
