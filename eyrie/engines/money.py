"""A hard cap in dollars, shared by every job of a run and kept across kills.

Before a request is sent, the most that it can cost is reserved; when it ends, what it did cost is booked instead. What
a killed job had reserved counts as spent, because nobody can know what its last requests cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.errors import EyrieError
from eyrie.locks import locked


@dataclass(frozen=True)
class Outlook:
    """What is left to buy: completion tokens, and for how many prompts of how many tokens on average."""

    completion: int
    prompts: int
    prompt_tokens: float


class Purse:
    """The money of one job, out of the run's.

    Args:
        ledger: JSON file of the run: dollars ``spent``, and dollars ``reserved`` by each job.
        owner: name of the job; its journal's lock keeps a second one of the name away.
        cap: dollars that the run may spend in all.
    """

    def __init__(self, ledger: Path, owner: str, cap: float) -> None:
        self.ledger, self.owner, self.cap = ledger, owner, cap
        self.spent = 0.0  # by this sitting
        self._reserved = 0.0
        ledger.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as book:
            book["spent"] += book["reserved"].pop(owner, 0.0)
            self.spent_before = book["spent"]

    @property
    def idle(self) -> bool:
        """Nothing of this job is reserved, so nothing of it will be given back."""
        return self._reserved <= 1e-12

    def reserve(self, dollars: float) -> bool:
        """Set ``dollars`` aside; False, and nothing happens, when the cap could be passed."""
        with self._open() as book:
            if book["spent"] + sum(book["reserved"].values()) + dollars > self.cap:
                return False
            self._reserved += dollars
            book["reserved"][self.owner] = self._reserved
        return True

    def settle(self, reserved: float, cost: float | None) -> None:
        """Book the end of a request: its cost, or all that was reserved when the cost is not known."""
        cost = reserved if cost is None else cost
        self.spent += cost
        self._reserved = max(0.0, self._reserved - reserved)
        with self._open() as book:
            book["spent"] += cost
            book["reserved"][self.owner] = self._reserved
            if self.idle:
                del book["reserved"][self.owner]

    @contextmanager
    def _open(self) -> Iterator[dict[str, Any]]:
        with locked(self.ledger.with_name(f".{self.ledger.name}.lock")):
            book = self._read()
            before = json.dumps(book)
            yield book
            if (text := json.dumps(book)) != before:
                # by rename, so that a kill leaves one or the other; not synced, because it happens twice for every row
                part = self.ledger.with_name(f".{self.ledger.name}.part")
                part.write_text(text + "\n")
                part.replace(self.ledger)

    def _read(self) -> dict[str, Any]:
        try:
            book = json.loads(self.ledger.read_text())
            return {"spent": float(book["spent"]), "reserved": {str(k): float(v) for k, v in book["reserved"].items()}}
        except FileNotFoundError:
            return {"spent": 0.0, "reserved": {}}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EyrieError(
                f"{self.ledger}: is no ledger ({error}); the journals beside it hold the cost of every answer: "
                'write {"spent": <their sum>, "reserved": {}} there'
            ) from None
