"""What a template makes of the beginnings of a conversation, from one run over the whole of it.

Every turn needs its context rendered, so a conversation of a hundred turns would be rendered a hundred times. A
template is a program that reads messages and writes text. What it wrote before it first asked for message n, or for how
many there are, it writes for the first n messages too; only what it writes once there are no more must be found out. So
the messages are handed over one by one, and how much was written is noted each time.

Nothing is taken from the whole when a template looks ahead (the last answer keeps its reasoning, the others lose it),
or when what it writes at the end changes with the words of the messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eyrie.render.controls import mapped

Messages = list[dict[str, Any]]
Pieces = Callable[[Sequence[dict[str, Any]]], Iterator[str]]


class Watched(Sequence[dict[str, Any]]):
    """Messages, and how much text had been written when each was first asked for.

    Attributes:
        asked: characters written before message n was asked for; ``asked[len]`` when the end was.
        ahead: whether a message, or their number, was asked for before its turn, so that ``asked`` tells nothing.
        written: characters written so far; whoever runs the template keeps it.
    """

    def __init__(self, messages: Messages) -> None:
        self.asked: list[int] = []
        self.ahead = False
        self.written = 0
        self._messages = messages

    def __len__(self) -> int:
        self._look(len(self._messages))
        return len(self._messages)

    def __bool__(self) -> bool:
        return True  # no beginning of a conversation is empty

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.walk(0)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            plain = key.stop is None and key.step in {None, 1} and (key.start or 0) >= 0
            return _Rest(self, key.start or 0) if plain else self._messages[: len(self)][key]
        self._look(key if key >= 0 else len(self._messages))
        return self._messages[key]

    def walk(self, place: int) -> Iterator[dict[str, Any]]:
        """The messages from ``place`` on, each noted as it is asked for."""
        while True:
            caller = inspect.currentframe()
            # jinja's `loop.last` and `loop.nextitem` fetch the next message before this one is done with
            if caller and caller.f_back and caller.f_back.f_code.co_name == "_peek_next":
                self._look(place)
            if place == len(self.asked):
                self.asked.append(self.written)
            self._look(place)
            if place >= len(self._messages):
                return
            yield self._messages[place]
            place += 1

    def _look(self, place: int) -> None:
        """A message out of turn; the first one stands in every beginning."""
        self.ahead |= len(self.asked) <= min(place, len(self._messages)) > 0


class _Rest(Sequence[dict[str, Any]]):
    """``messages[first:]``, watched: templates set the system message apart."""

    def __init__(self, whole: Watched, first: int) -> None:
        self._whole, self._first = whole, first

    def __len__(self) -> int:
        return max(0, len(self._whole) - self._first)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._whole.asked += [self._whole.written] * (self._first - len(self._whole.asked))
        return self._whole.walk(self._first)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) or key < 0:
            return self._whole[: len(self._whole)][self._first :][key]
        return self._whole[self._first + key]


class Prefixes:
    """Renders the first messages of one conversation, for any number of them.

    Args:
        messages: the conversation.
        pieces: runs the template over messages, piece by piece.
        render: the same as one text, by the ordinary way.
    """

    def __init__(self, messages: Messages, pieces: Pieces, render: Callable[[Messages], str]) -> None:
        self._messages, self._pieces, self._render = messages, pieces, render
        self._text, self._asked = self._run(messages)
        self._ends: dict[Any, str | None] = {}
        self.usable = bool(self._asked) and self._text == render(messages)

    def first(self, count: int) -> str | None:
        """The text of the first ``count`` messages; None when it cannot be told without rendering them."""
        if not self.usable:
            return None
        if count == len(self._messages):
            return self._text
        kind = tuple(_kind(message) for message in self._messages[max(0, count - 2) : count])
        if kind not in self._ends:
            self._ends[kind] = self._end(count)
        end = self._ends[kind]
        if end is None:
            self.usable = False
            return None
        return self._text[: self._asked[count]] + end

    def _end(self, count: int) -> str | None:
        """What is written once there are no more messages; None when other words in the last two change it."""
        messages = self._messages[:count]
        text = self._render(messages)
        shared = self._asked[count]
        others = [*messages[:-2], *(_reworded(message) for message in messages[-2:])]
        other, asked = self._run(others)
        same = asked and text[:shared] == self._text[:shared] and text[shared:] == other[asked[-1] :]
        return text[shared:] if same else None

    def _run(self, messages: Messages) -> tuple[str, list[int]]:
        """The text, and :attr:`Watched.asked`: empty when the template looked ahead, or did not look at all."""
        watched = Watched(messages)
        parts = []
        for piece in self._pieces(watched):
            parts.append(piece)
            watched.written += len(piece)
        told = not watched.ahead and len(watched.asked) > len(messages)
        return "".join(parts), watched.asked if told else []


def _kind(message: dict[str, Any]) -> tuple[Any, ...]:
    """What the end of a conversation may depend on: who spoke, and which fields are filled."""
    return message["role"], tuple(sorted(key for key, value in message.items() if value))


def _reworded(message: dict[str, Any]) -> dict[str, Any]:
    """The message with other words in every field but its role and the types of its calls."""
    kept = {"role", "type", "id", "tool_call_id"}

    def changed(value: Any, key: str = "") -> Any:
        if key in kept:
            return value
        if isinstance(value, dict):
            return {name: changed(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [changed(inner) for inner in value]
        return mapped(value, lambda text: f"{text} and so on" if text else text)

    return {key: changed(value, key) for key, value in message.items()}
