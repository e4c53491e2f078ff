"""Where a shard of answers stands while it is made: a line for a person, a file for whoever else looks.

The file is one JSON object, replaced as a whole every few seconds, so a reader never sees half of it (docs/generate.md
lists its keys). It is no output: nothing depends on it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyrie.engines.base import UNUSABLE
from eyrie.formats.publish import write_json
from eyrie.generate.answers import Counts
from eyrie.generate.budget import Budget
from eyrie.generate.forecast import Pace
from eyrie.progress import Fact, Progress, rate, span

FORMAT = 1
EVERY = 2.0  # seconds between two looks, also while no answer ends
STALE = 60.0  # seconds after which a file that says "running" is not believed


class Board:
    """Shows one shard.

    Args:
        label: the shard, such as ``code/s0000``.
        path: the file; None for none.
        every: seconds between two looks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        label: str,
        path: Path | None = None,
        *,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dataset, _, self.shard = label.rpartition("/")
        self.label, self.path, self.every, self._clock = label, path, every, clock
        self._lock = threading.Lock()
        self._wrote = float("-inf")

    @contextmanager
    def showing(self, budget: Budget, counts: Counts, pace: Pace, turns: int) -> Iterator[None]:
        """Show these until the block ends.

        Args:
            turns: answers of the longest conversation.
        """
        self.budget, self.counts, self.pace, self.turns = budget, counts, pace, turns
        self._start, self._first = self._clock(), budget.answered
        self._progress = Progress(
            f"generate {self.label}", budget.tokens, "tokens", done=budget.answered, pace=self._pace_text
        )
        over = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(over,), daemon=True)
        state = "stopped"
        with self._progress:
            ticker.start()
            try:
                yield
                state = "done"
            finally:
                over.set()
                ticker.join()
                self._show(state)

    def moved(self) -> None:
        """Something has changed: look again if the last look is not a moment ago."""
        if self._clock() - self._wrote >= self.every:
            self._show("running")

    def state(self, state: str) -> dict[str, Any]:
        """What the file says."""
        budget, counts, most = self.budget, self.counts, self.budget.max_tokens
        seconds = self._clock() - self._start
        made = self.pace.made(most)
        left = self.pace.remaining(budget.tokens - budget.answered - made, most, self.turns)
        bad = {reason: counts.outcomes[reason] for reason in UNUSABLE if counts.outcomes[reason]}
        return {
            "format": FORMAT,
            "stage": "generate",
            "dataset": self.dataset,
            "shard": self.shard,
            "state": state,
            "pid": os.getpid(),
            "updated": round(time.time(), 1),
            "seconds": round(seconds, 1),
            "token_budget": budget.tokens,
            "tokens": budget.answered,
            "tokens_in_flight": made,
            "tokens_per_second": round((budget.answered + made - self._first) / seconds, 2) if seconds > 0 else 0.0,
            "in_flight": self.pace.in_flight,
            "answers": counts.outcomes["stop"] + counts.outcomes["length"],
            "reused": counts.reused,
            "truncated": counts.outcomes["length"],
            "unusable": bad,
            "faults": dict(sorted(dict(counts.faults).items())),
            "dollars": round(counts.dollars, 6),
            "remaining_seconds": None if left is None else [round(end, 1) for end in left],
        }

    def _tick(self, over: threading.Event) -> None:
        while not over.wait(self.every):
            self._show("running")

    def _show(self, state: str) -> None:
        with self._lock:
            self._wrote = self._clock()
            said = self.state(state)
            self._progress.advance(said["tokens"] - self._progress.done, **_facts(said))
            if self.path is not None:
                with suppress(OSError):  # a full disk ends the stage where it loses something, not here
                    write_json(self.path, said)

    def _pace_text(self, over: bool) -> str:
        said = self.state("done" if over else "running")
        parts = [rate(said["tokens_per_second"], "tokens")]
        if said["remaining_seconds"] and not over:
            parts.append(f"{span(*said['remaining_seconds'])} left")
        return ", ".join(parts)


def _facts(said: dict[str, Any]) -> dict[str, Fact]:
    """What a line shows beside tokens, rate and time."""
    facts: dict[str, Fact] = {"answers": said["answers"], "truncated": said["truncated"], **said["unusable"]}
    running = said["state"] == "running"
    facts["in flight"] = f"{said['in_flight']} with {said['tokens_in_flight']:,} tokens" if running else 0
    facts |= {f"error {kind}": count for kind, count in said["faults"].items()}
    return facts | ({"dollars": said["dollars"]} if said["dollars"] else {})


def boards(folder: Path) -> list[dict[str, Any]]:
    """What the files below ``folder`` (``results/<run>/logs/generate``) say, by dataset and shard.

    A shard that says that it is running, and has not said so for :data:`STALE` seconds, was killed: its ``state`` is
    ``lost``. Files that are none of ours are passed over.
    """
    found = []
    for path in sorted(folder.glob("*/*.json")):
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            continue
        if said["state"] == "running" and time.time() - said["updated"] > STALE:
            said |= {"state": "lost", "in_flight": 0, "tokens_in_flight": 0, "remaining_seconds": None}
        found.append(said)
    return found


def of_dataset(name: str, token_budget: int, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """One dataset out of the files of its shards.

    Args:
        token_budget: of the whole dataset; what no shard has begun is taken to come at the speed of those that run,
            give or take a quarter.
        shards: as :func:`boards` gives them.
    """
    ours = [said for said in shards if said["dataset"] == name]
    running = [said for said in ours if said["state"] == "running"]
    speed = sum(said["tokens_per_second"] for said in running)
    waiting = max(token_budget - sum(said["token_budget"] for said in ours if said["state"] in ("running", "done")), 0)
    ranges = [said["remaining_seconds"] for said in running]
    left = None
    if running and speed > 0 and all(ranges):
        low, high = (max(ends) for ends in zip(*ranges, strict=True))
        left = [round(low + 0.75 * waiting / speed, 1), round(high + 1.25 * waiting / speed, 1)]
    faults: Counter[str] = Counter()
    for said in ours:
        faults.update({**said["unusable"], **{f"error {kind}": count for kind, count in said["faults"].items()}})
    total = {
        key: sum(said[key] for said in ours)
        for key in ("tokens", "tokens_in_flight", "in_flight", "answers", "truncated")
    }
    return {
        "dataset": name,
        "token_budget": token_budget,
        **total,
        "tokens_per_second": round(speed, 2),
        "errors": dict(sorted(faults.items())),
        "dollars": round(sum(said["dollars"] for said in ours), 6),
        "running": len(running),
        "remaining_seconds": left,
    }


def table(datasets: dict[str, int], shards: list[dict[str, Any]]) -> str:
    """Lines for a person: each dataset (name -> token budget), and below it the shards that are not done."""
    lines = []
    for name, budget in datasets.items():
        whole = of_dataset(name, budget, shards)
        done = sum(said["state"] == "done" and said["dataset"] == name for said in shards)
        lines.append(f"{name}: {_line(whole, whole['errors'])}, {done} {'shard' if done == 1 else 'shards'} done")
        for said in shards:
            if said["dataset"] == name and said["state"] != "done":
                errors = {**said["unusable"], **{f"error {kind}": n for kind, n in said["faults"].items()}}
                lines.append(f"  {said['shard']} ({said['state']}): {_line(said, errors)}")
    return "\n".join(lines)


def _line(said: dict[str, Any], errors: dict[str, int]) -> str:
    percent = 100 * min(said["tokens"], said["token_budget"]) // said["token_budget"]
    parts = [
        f"{said['tokens']:,} of {said['token_budget']:,} tokens ({percent}%)",
        rate(said["tokens_per_second"], "tokens"),
        f"{said['in_flight']} in flight with {said['tokens_in_flight']:,} tokens",
        f"{said['answers']:,} answers, {said['truncated']:,} truncated",
        *(f"{kind} {count:,}" for kind, count in errors.items()),
    ]
    if said["dollars"]:
        parts.append(f"${said['dollars']:.4f}")
    if said["remaining_seconds"]:
        parts.append(f"{span(*said['remaining_seconds'])} left")
    return ", ".join(parts)
