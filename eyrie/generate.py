"""Responses: the target answers one prompt shard up to its token budget.

Rows stand in prompt order and the shard holds the shortest prefix of answered prompts whose completion tokens reach the
budget, so its bytes depend neither on timing nor on concurrency. Every answer goes to the journal first and is never
bought twice: what finishes beyond the prefix serves the next raise of the budget.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from eyrie.budget import Budget
from eyrie.config import Engine as Options
from eyrie.config import Gates, Sampling, Server
from eyrie.conversation import Reject
from eyrie.engines.base import UNUSABLE, USABLE, Answer, Engine, Request
from eyrie.engines.hire import hire
from eyrie.engines.money import Outlook
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl, write_jsonl
from eyrie.formats.manifest import RowCounts, verified_manifest
from eyrie.formats.publish import Draft, publish
from eyrie.journal import Journal
from eyrie.progress import Progress
from eyrie.recipes import canonical_json
from eyrie.render import TurnRow
from eyrie.stopwatch import Stopwatch
from eyrie.targets.card import TargetCard, read_card, resolve

log = logging.getLogger(__name__)

GATE_ROWS = 32  # a gate looks at no fewer rows, so that a bad start stops a run and a single bad row does not


class PromptRenderer(Protocol):
    """The part of :class:`eyrie.render.Renderer` that is used here."""

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def last_turn(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> TurnRow | Reject: ...


def generate(
    recipe: dict[str, Any],
    *,
    prompts: Path,
    target: Path,
    model: str,
    out: Path,
    journal: Path,
    afresh: bool = False,
    options: Options | None = None,
    server: Server | None = None,
    servers: Path = Path("logs/servers"),
    threads: int = 1,
    engine: Callable[[], Engine] | None = None,
    renderer: PromptRenderer | None = None,
    checkup: Callable[[], None] | None = None,
) -> None:
    """Answer ``prompts`` and publish the response shard ``out`` with its manifest.

    Args:
        recipe: the stage's recipe (:func:`eyrie.recipes.recipe`): sampling, token budget, kind of engine.
        prompts: prompt shard, with its manifest beside it.
        target: ``target.json`` of the run.
        model: local Hugging Face folder or hub id of the target.
        journal: file that keeps every answer; rows in it are reused when prompt, sampling and target are the same.
        afresh: set the journal aside and buy new answers.
        options: where and how fast the engine works; what it computes is the recipe's.
        server: the same of a server that Eyrie starts.
        servers: folder for the files of such servers; jobs that share it share the server.
        threads: CPU threads of an engine in this process.
        engine: makes the engine; called only when a prompt must be answered. Default: what the recipe says.
        renderer: chat template and tokenizer. Default: the target's own.
        checkup: raises when the machine is not fit; called before the engine is made.

    Raises:
        EyrieError: a prompt shard that is damaged or no list of questions, a journal in use, a full disk, an engine
            that cannot answer, a gate that was passed.
    """
    watch = Stopwatch()
    card = read_card(target)
    source = verified_manifest(prompts, stage="ingest")
    shard = f"{prompts.parent.name}/{prompts.name}"
    rows = list(read_jsonl(prompts))
    if renderer is None:
        from eyrie.render import Renderer

        renderer = Renderer(resolve(model, card.revision), card.stop_ids, card.rendering)
    label = shard.removesuffix(".jsonl.zst")
    options = (options or Options()).with_recipe(recipe.get("engine", {}))
    with Journal(journal, afresh=afresh) as book:
        shift = Shift(recipe, card, rows, renderer, book, prompts, options.gates)
        if engine is None:
            engine = hire(
                recipe, options, card, model, threads=threads, last_turn=renderer.last_turn, outlook=shift.outlook,
                ledger=journal.parents[1] / "dollars.json", owner=label, server=server or Server(), servers=servers,
            )  # fmt: skip
        shift.work(_after(checkup, engine), label=f"generate {label}")
        shift.check_gates()
        with publish(
            out, stage="generate", recipe=recipe, inputs={shard: source.sha256}, identity=card.identity()
        ) as draft:
            shift.write(draft)
            draft.stats = {**watch.figures(), **shift.figures(watch.cpu_seconds)}
    if not shift.budget.full:
        log.warning(
            "%s: its %d prompts hold %d completion tokens, the budget is %d; raise prompts_per_shard or lower it",
            *(shard, len(rows), shift.budget.filled, shift.budget.tokens),
        )


def _after(checkup: Callable[[], None] | None, engine: Callable[[], Engine]) -> Callable[[], Engine]:
    """``engine`` with a check of the machine before it; what is all answered already needs neither."""

    def make() -> Engine:
        if checkup is not None:
            checkup()
        return engine()

    return make


def journal_key(recipe: dict[str, Any], identity: dict[str, str]) -> str:
    """What an answer depends on besides its prompt: sampling, engine, dtype and target, but no budget and no path."""
    content = {
        "identity": identity,
        "engine": recipe.get("engine", {}),
        "sampling": recipe.get("sampling", {}),
        "dtype": recipe.get("target", {}).get("dtype", "auto"),
        **({"server": recipe["server"]} if "server" in recipe else {}),
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]


@dataclass
class Counts:
    """What a sitting did."""

    reused: int = 0
    answered: int = 0
    answered_tokens: int = 0
    dollars: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)


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


class Shift:
    """One sitting over one shard: reuse what is journaled, ask for the rest, write the prefix.

    Args:
        rows: the prompt shard's rows.
        where: the prompt shard, for messages.
        gates: shares of bad answers above which the stage stops.
    """

    def __init__(
        self,
        recipe: dict[str, Any],
        card: TargetCard,
        rows: list[dict[str, Any]],
        renderer: PromptRenderer,
        journal: Journal,
        where: Path,
        gates: Gates | None = None,
    ) -> None:
        self.rows, self.renderer, self.journal, self.where = rows, renderer, journal, where
        self.gates = gates or Gates()
        self.sampling = Sampling.model_validate(recipe.get("sampling", {}))
        self.longest_prompt = card.max_position_embeddings - self.sampling.max_tokens
        self.key = journal_key(recipe, card.identity())
        self.seed = self.sampling.seed + (journal.generation if self.sampling.temperature > 0 else 0)
        self.earlier = _earlier(journal, self.key)
        self.budget = Budget(recipe["token_budget"], self.sampling.max_tokens)
        self.answers: dict[int, Kept] = {}
        self.rejects: dict[int, str] = {}
        self.counts = Counts()

    def work(self, engine: Callable[[], Engine], label: str) -> None:
        """Fill the budget. The engine is made only if a prompt is left to answer."""
        requests = self._requests()
        first = next(requests, None)
        if first is None:
            return
        with Progress(label, self.budget.tokens, "tokens", done=self.budget.answered) as progress:

            def finished(request: Request, answer: Answer) -> None:
                self._keep(request, answer)
                progress.advance(self.budget.answered - progress.done, **self._progress_facts())

            engine().answer(chain([first], requests), finished)

    def _progress_facts(self) -> dict[str, int | float | str]:
        counts = self.counts
        facts: dict[str, int | float | str] = {"answers": counts.answered, "truncated": counts.outcomes["length"]}
        facts |= {reason: counts.outcomes[reason] for reason in UNUSABLE if counts.outcomes[reason]}
        if counts.faults:
            facts["faults"] = counts.faults.total()
        if counts.dollars:
            facts["dollars"] = counts.dollars
        return facts

    def outlook(self) -> Outlook:
        """What is left to buy, for an estimate of its price."""
        seen = [len(kept.prompt_ids) for kept in self.answers.values()]
        if not seen:  # no prompt was rendered yet: four characters a token
            seen = [sum(len(message["content"]) for message in row["messages"]) // 4 for row in self.rows[:256]]
        prompts = max(len(self.rows) - len(self.answers) - len(self.rejects), 0)
        left = max(self.budget.tokens - self.budget.answered, 0)
        return Outlook(left, prompts, sum(seen) / max(len(seen), 1))

    def _requests(self) -> Iterator[Request | None]:
        """Prompts to answer, in order; None while the answers in flight may fill the budget."""
        for position, row in enumerate(self.rows):
            while not self.budget.full and not self.budget.needs_next:
                yield None
            if self.budget.full:
                return
            earlier = self.earlier.get(self._id(position))
            if earlier is not None:
                self.counts.reused += 1
                self._settle(position, earlier)
                continue
            try:
                request = self._request(position, row)
            except Reject as reject:
                self.rejects[position] = reject.reason
                self.budget.book(position, 0)
                continue
            self.budget.start(position)
            yield request

    def _request(self, position: int, row: dict[str, Any]) -> Request:
        """Raises :class:`Reject` when the template refuses the prompt or the answer may not fit the model."""
        prompt_ids = self.renderer.prompt_ids(row["messages"], row.get("tools"))
        if len(prompt_ids) > self.longest_prompt:
            raise Reject("prompt_too_long", f"{len(prompt_ids)} tokens, {self.longest_prompt} leave room for an answer")
        return Request(position, prompt_ids, self.sampling, self.seed, row["messages"], row.get("tools"))

    def _id(self, position: int) -> str:
        """The row's id, once it is clear that the row is a question."""
        row = self.rows[position]
        messages = row.get("messages")
        if "id" not in row or not messages:
            raise EyrieError(f"{self.where}:{position + 1}: has no id or no messages; ingest the dataset again")
        if messages[-1]["role"] == "assistant":
            raise EyrieError(
                f"{self.where}:{position + 1}: ends with an assistant turn, so there is nothing to answer; "
                "set the dataset's kind to native"
            )
        return str(row["id"])

    def _keep(self, request: Request, answer: Answer) -> None:
        """Journal an answer, count it, and stop the stage when a gate is passed."""
        tokens, reason = len(answer.output_ids), answer.finish_reason
        if reason not in (*USABLE, *UNUSABLE):
            raise ValueError(f"the engine gave finish_reason {reason!r}, expected one of {(*USABLE, *UNUSABLE)}")
        if not (0 < tokens <= self.sampling.max_tokens if reason in USABLE else tokens == 0):
            raise ValueError(f"the engine gave {tokens} tokens ({reason}), max_tokens is {self.sampling.max_tokens}")
        record = {
            "key": self.key,
            "id": self.rows[request.position]["id"],
            "prompt_ids": answer.prompt_ids or request.prompt_ids,
            "output_ids": answer.output_ids,
            "finish_reason": reason,
            "seed": request.seed,
            **({"facts": answer.facts} if answer.facts else {}),
        }
        self.journal.append(record)
        counts, facts = self.counts, answer.facts
        counts.answered += 1
        counts.answered_tokens += tokens
        counts.dollars += facts.get("cost", 0.0)
        counts.faults.update(facts.get("faults", {}))
        counts.served[str(facts.get("provider") or facts.get("url") or "")] += 1
        self._settle(request.position, Kept.of(record))
        if reason in UNUSABLE:
            self.check_gates(at_once=True)

    def _settle(self, position: int, kept: Kept) -> None:
        """Row ``position`` is answered, or it is known that it cannot be."""
        self.counts.outcomes[kept.finish_reason] += 1
        if kept.finish_reason in USABLE:
            self.answers[position] = kept
        else:
            self.rejects[position] = kept.finish_reason
        self.budget.book(position, len(kept.output_ids))

    def check_gates(self, *, at_once: bool = False) -> None:
        """Raise :class:`EyrieError` when the share of bad answers is above a gate.

        Bad outcomes that passed a gate are asked for again by the next run: whatever caused them is to be mended first.
        Truncated answers are not, they are what the target says within ``max_tokens``.

        Args:
            at_once: leave out truncation, which says nothing while short answers finish first.
        """
        total = max(self.counts.outcomes.total(), GATE_ROWS)
        for reason in UNUSABLE if at_once else (*UNUSABLE, "length"):
            count = self.counts.outcomes[reason]
            name = "truncated" if reason == "length" else reason
            if count <= (gate := getattr(self.gates, name)) * total:
                continue
            if reason != "length":
                self.journal.append({"key": self.key, "void": reason})
            raise EyrieError(
                f"{self.where}: {count} of {self.counts.outcomes.total()} answers are {name}, engine.gates.{name} "
                f"allows a share of {gate:g}; {self.journal.path} says why; mend that or raise the gate, and run again"
            )

    def write(self, draft: Draft) -> None:
        """Write the prefix and say where every prompt of the shard went."""
        kept = [position for position in range(self.budget.end) if position in self.answers]
        write_jsonl(draft.path, map(self._response, kept))
        chosen = [self.answers[position] for position in kept]
        dropped = Counter(reason for position, reason in self.rejects.items() if position < self.budget.end)
        dropped["beyond_budget"] = len(self.rows) - self.budget.end
        draft.rows = RowCounts(read=len(self.rows), kept=len(kept), dropped=dict(+dropped))
        draft.tokens = {
            "prompt": sum(len(kept.prompt_ids) for kept in chosen),
            "completion": sum(len(kept.output_ids) for kept in chosen),
        }
        truncated = sum(kept.finish_reason == "length" for kept in chosen)
        draft.facts = {
            "truncated": truncated,
            "stopped": len(chosen) - truncated,
            "token_budget": self.budget.tokens,
            "budget_filled": self.budget.full,
        }

    def _response(self, position: int) -> dict[str, Any]:
        kept = self.answers[position]
        ids, reason = kept.output_ids.tolist(), kept.finish_reason
        return {
            **self.rows[position],
            "prompt_ids": kept.prompt_ids.tolist(),
            "output_ids": ids,
            "text": self.renderer.decode(ids[:-1] if reason == "stop" else ids),
            "finish_reason": reason,
            "temperature": self.sampling.temperature,
            "seed": kept.seed,
        }

    def figures(self, cpu_seconds: float) -> dict[str, Any]:
        """What this sitting did, for the stats file: it may differ between equal shards."""
        counts, tokens = self.counts, self.counts.answered_tokens
        found: dict[str, Any] = {
            "reused_rows": counts.reused,
            "answered_rows": counts.answered,
            "answered_tokens": tokens,
            "surplus_rows": sum(position >= self.budget.end for position in self.answers),
            "tokens_per_cpu_second": round(tokens / cpu_seconds, 2) if cpu_seconds > 0 else 0.0,
        }
        if dollars := sum(kept.dollars for kept in self.answers.values()):
            found |= {"dollars": round(counts.dollars, 6), "dollars_of_kept_answers": round(dollars, 6)}
        if counts.faults:
            found["faults"] = dict(sorted(counts.faults.items()))
        if served := {name: count for name, count in sorted(counts.served.items()) if name}:
            found["served_by"] = served
        return found


def _earlier(journal: Journal, key: str) -> dict[str, Kept]:
    """Row id -> its answer, taken out of the journal; bad outcomes that were declared void are left out."""
    found: dict[str, Kept] = {}
    for record in journal.records:
        if record["key"] != key:
            continue
        if "void" in record:
            found = {id: kept for id, kept in found.items() if kept.finish_reason != record["void"]}
        else:
            found[record["id"]] = Kept.of(record)
    journal.records.clear()
    return found
