"""Answers as the generate stage holds them in memory, and what was counted of them."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eyrie.config import Gates
from eyrie.engines.base import UNUSABLE
from eyrie.generate.journal import Journal

GATE_ROWS = 32  # a gate looks at no fewer rows, so that a bad start stops a run and a single bad row does not


@dataclass
class Counts:
    """What a sitting did.

    Attributes:
        outcomes: answers by how they ended, the reused ones included.
        unread: answers whose text could not be read back, so that no next turn could stand behind them.
    """

    reused: int = 0
    answered: int = 0
    answered_tokens: int = 0
    dollars: float = 0.0
    unread: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)

    def book(self, tokens: int, facts: dict[str, Any]) -> None:
        """An answer that was bought in this sitting."""
        self.answered += 1
        self.answered_tokens += tokens
        self.dollars += facts.get("cost", 0.0)
        self.faults.update(facts.get("faults", {}))
        self.served[str(facts.get("provider") or facts.get("url") or "")] += 1

    def passed(self, gates: Gates, *, at_once: bool) -> tuple[str, int, float] | None:
        """The first gate that is passed: its name, the count of such answers, and the share that it allows.

        Args:
            at_once: leave out truncation, which says nothing while short answers finish first.
        """
        total = max(self.outcomes.total(), GATE_ROWS)
        for reason in UNUSABLE if at_once else (*UNUSABLE, "length"):
            count = self.outcomes[reason] + (self.unread if reason == "unparsed" else 0)
            name = "truncated" if reason == "length" else reason
            if count > (gate := getattr(gates, name)) * total:
                return name, count, gate
        return None


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer as it is held in memory: four bytes a token."""

    prompt_ids: array[int]
    output_ids: array[int]
    finish_reason: str
    seed: int
    dollars: float

    @classmethod
    def of(cls, record: dict[str, Any]) -> Kept:
        """From a record of the journal."""
        ids = (array("I", record["prompt_ids"]), array("I", record["output_ids"]))
        cost = record.get("facts", {}).get("cost", 0.0)
        return cls(*ids, record["finish_reason"], record["seed"], cost)


class Earlier:
    """The answers that a journal holds for one key, taken out of it; those that were declared void are left out.

    An answer within a conversation of several turns is found by its conversation and context, else by its context
    alone: a conversation that became longer keeps what was paid for.
    """

    def __init__(self, journal: Journal, key: str) -> None:
        found: dict[tuple[str, str], Kept] = {}
        for record in journal.records:
            if record["key"] != key:
                continue
            if "void" in record:
                found = {name: kept for name, kept in found.items() if kept.finish_reason != record["void"]}
            else:
                found[record["id"], record.get("context", "")] = Kept.of(record)
        journal.records.clear()
        self._found = found
        self._by_context = {context: kept for (_, context), kept in reversed(found.items()) if context}

    def get(self, id: str, context: str = "") -> Kept | None:
        """The answer to the row ``id``, in a conversation of several turns to its turn with this context."""
        return self._found.get((id, context)) or (self._by_context.get(context) if context else None)
