"""Responses: the target answers one prompt shard up to its token budget.

Rows stand in prompt order and the shard holds the shortest prefix of answered prompts whose completion tokens reach the
budget, so its bytes depend neither on timing nor on concurrency. Every answer goes to the journal first and is never
bought twice: what finishes beyond the prefix serves the next raise of the budget.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from eyrie.config import Engine as Options
from eyrie.config import Gates, Sampling, Server
from eyrie.conversation import Reject, prompt_key
from eyrie.engines.base import UNUSABLE, USABLE, Answer, Engine, Request
from eyrie.engines.hire import hire
from eyrie.engines.money import Outlook
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl, write_jsonl
from eyrie.formats.manifest import RowCounts, verified_manifest
from eyrie.formats.publish import Draft, publish
from eyrie.generate.answers import Counts, Earlier, Kept
from eyrie.generate.board import Board
from eyrie.generate.budget import Budget
from eyrie.generate.forecast import Pace
from eyrie.generate.journal import Journal
from eyrie.generate.turns import Step, Talk, script
from eyrie.recipes import canonical_json
from eyrie.render.renderer import TurnRow
from eyrie.stopwatch import Stopwatch
from eyrie.targets.card import TargetCard, read_card, resolve

log = logging.getLogger(__name__)


class PromptRenderer(Protocol):
    """The part of :class:`eyrie.render.renderer.Renderer` that is used here."""

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def said(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], *, tools: Sequence[dict[str, Any]] | None
    ) -> dict[str, Any]: ...

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
    gates: Gates | None = None,
    progress: Path | None = None,
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
        gates: the dataset's own; default: those of ``options``.
        progress: file that says how far the shard is (:mod:`eyrie.generate.board`); default: none.
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
        from eyrie.render.renderer import Renderer

        renderer = Renderer(resolve(model, card.revision), card.stop_ids, card.rendering)
    label = shard.removesuffix(".jsonl.zst")
    options = (options or Options()).with_recipe(recipe.get("engine", {}))
    with Journal(journal, afresh=afresh) as book:
        shift = Shift(recipe, card, rows, renderer, book, prompts, gates or options.gates)
        if engine is None:
            engine = hire(
                recipe, options, card, model, threads=threads, last_turn=renderer.last_turn, outlook=shift.outlook,
                ledger=journal.parents[1] / "dollars.json", owner=label, server=server or Server(), servers=servers,
            )  # fmt: skip
        shift.work(_after(checkup, engine), Board(label, progress))
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
        self.turn_by_turn = "turns" in recipe
        self.longest_prompt = card.max_position_embeddings - self.sampling.max_tokens
        self.key = journal_key(recipe, card.identity())
        self.seed = self.sampling.seed + (journal.generation if self.sampling.temperature > 0 else 0)
        self.earlier = Earlier(journal, self.key)
        self.budget = Budget(recipe["token_budget"], self.sampling.max_tokens)
        self.pace = Pace()
        self.answers: dict[int, list[Kept]] = {}
        self.unanswered: dict[int, tuple[str, int]] = {}  # position -> why, and how many turns
        self.talks: dict[int, Talk] = {}  # rows in flight; of rows with several turns all that were begun
        self.open: set[int] = set()  # rows in flight
        self.next_turns: deque[Request] = deque()
        self.counts = Counts()

    def work(self, engine: Callable[[], Engine], board: Board) -> None:
        """Fill the budget. The engine is made only if a prompt is left to answer."""
        requests = self._requests()
        first = next(requests, None)
        with board.showing(self.budget, self.counts, self.pace, self.most_turns):
            if first is None:
                return

            def finished(request: Request, answer: Answer) -> None:
                self._keep(request, answer)
                board.moved()

            engine().answer(chain([first], requests), finished)

    @cached_property
    def most_turns(self) -> int:
        """Answers of the longest conversation."""
        return max((len(self._steps(row)) for row in self.rows), default=1) if self.turn_by_turn else 1

    def outlook(self) -> Outlook:
        """What is left to buy, for an estimate of its price."""
        seen = [len(kept.prompt_ids) for answers in self.answers.values() for kept in answers]
        asked = sum(len(self._steps(row)) for row in self.rows)
        prompts = max(asked - len(seen) - sum(count for _, count in self.unanswered.values()), 0)
        if not seen:  # no prompt was rendered yet: four characters a token
            seen = [sum(len(message["content"]) for message in row["messages"]) // 4 for row in self.rows[:256]]
        left = max(self.budget.tokens - self.budget.answered, 0)
        return Outlook(left, prompts, sum(seen) / max(len(seen), 1))

    def _steps(self, row: dict[str, Any]) -> list[Step]:
        """What the row asks, answer by answer."""
        messages = row.get("messages") or []
        return script(messages) if self.turn_by_turn else [Step(tuple(messages))]

    def _requests(self) -> Iterator[Request | None]:
        """Prompts to answer, in order, next turns first; None while the answers in flight may fill the budget."""
        for position in range(len(self.rows)):
            while not self.budget.full and (self.next_turns or not self.budget.needs_next):
                yield self._asked(self.next_turns.popleft()) if self.next_turns else None
            if self.budget.full:
                return
            request = self._begin(position)
            if request is not None:
                yield self._asked(request)
        while not self.budget.full and (self.next_turns or any(self.talks[at].left for at in self.open)):
            yield self._asked(self.next_turns.popleft()) if self.next_turns else None

    def _asked(self, request: Request) -> Request:
        self.pace.asked(request.position)
        return request

    def _begin(self, position: int) -> Request | None:
        """Take the row's answers out of the journal; the request for the first one that is missing."""
        self._check(position)
        row = self.rows[position]
        talk = self.talks[position] = Talk(self._steps(row), row.get("tools"))
        request = self._next(position, talk)
        if request is not None:
            self.open.add(position)
            self.budget.start(position, self._lengths(position), talk.left)
        return request

    def _next(self, position: int, talk: Talk) -> Request | None:
        """The request for the row's next answer that the journal does not hold; None when the row has ended."""
        while True:
            id, context = self.rows[position]["id"], talk.context() if talk.several else ""
            earlier = self.earlier.get(id, context)
            if earlier is None:
                try:
                    return self._request(position, talk)
                except Reject as reject:
                    self._end(position, talk, reject.reason)
                    return None
            self.counts.reused += 1
            if not self._hear(position, talk, earlier):
                return None

    def _request(self, position: int, talk: Talk) -> Request:
        """Raises :class:`Reject` when the template refuses the prompt or the answer may not fit the model."""
        prompt_ids = self.renderer.prompt_ids(talk.messages, talk.tools)
        if len(prompt_ids) > self.longest_prompt:
            raise Reject("prompt_too_long", f"{len(prompt_ids)} tokens, {self.longest_prompt} leave room for an answer")
        return Request(position, prompt_ids, self.sampling, self.seed, list(talk.messages), talk.tools)

    def _check(self, position: int) -> None:
        """Make sure that the row is a question."""
        row = self.rows[position]
        messages = row.get("messages")
        if "id" not in row or not messages:
            raise EyrieError(f"{self.where}:{position + 1}: has no id or no messages; ingest the dataset again")
        if messages[-1]["role"] == "assistant":
            raise EyrieError(
                f"{self.where}:{position + 1}: ends with an assistant turn, so there is nothing to answer; "
                "set the dataset's kind to native"
            )

    def _keep(self, request: Request, answer: Answer) -> None:
        """Journal an answer, go on to the row's next turn, and stop the stage when a gate is passed."""
        tokens, reason, position = len(answer.output_ids), answer.finish_reason, request.position
        if reason not in (*USABLE, *UNUSABLE):
            raise ValueError(f"the engine gave finish_reason {reason!r}, expected one of {(*USABLE, *UNUSABLE)}")
        if not (0 < tokens <= self.sampling.max_tokens if reason in USABLE else tokens == 0):
            raise ValueError(f"the engine gave {tokens} tokens ({reason}), max_tokens is {self.sampling.max_tokens}")
        talk = self.talks[position]
        record = {
            "key": self.key,
            "id": self.rows[position]["id"],
            **({"turn": talk.turn, "context": talk.context()} if talk.several else {}),
            "prompt_ids": answer.prompt_ids or request.prompt_ids,
            "output_ids": answer.output_ids,
            "finish_reason": reason,
            "seed": request.seed,
            **({"facts": answer.facts} if answer.facts else {}),
        }
        self.journal.append(record)
        self.counts.book(tokens, answer.facts)
        self.pace.ended(position, tokens)
        if self._hear(position, talk, Kept.of(record)):
            following = self._next(position, talk)
            if following is not None:
                self.budget.turn(position, self._lengths(position))
                self.next_turns.append(following)
        if reason in UNUSABLE or self.counts.unread:
            self.check_gates(at_once=True)

    def _hear(self, position: int, talk: Talk, kept: Kept) -> bool:
        """Take an answer to the row's turn; False when the row has ended with it."""
        self.counts.outcomes[kept.finish_reason] += 1
        if kept.finish_reason not in USABLE:
            self._end(position, talk, kept.finish_reason)
            return False
        self.answers.setdefault(position, []).append(kept)
        if talk.left == 0:
            self._end(position, talk, None)
            return False
        ended: str | None = "truncated"  # half an answer is no context
        if kept.finish_reason != "length":
            try:
                said = self.renderer.said(kept.prompt_ids, kept.output_ids, tools=talk.tools)
                ended = None if talk.hear(said) else talk.ended
            except Reject as reject:
                ended = reject.reason
                self.counts.unread += reject.reason == "unparsed"
        if ended is not None:
            self._end(position, talk, ended)
        return ended is None

    def _end(self, position: int, talk: Talk, reason: str | None) -> None:
        """The row has all answers that it will have; ``reason``: why it has no more, where it could."""
        lengths = self._lengths(position)
        if len(lengths) < len(talk.steps):
            assert reason is not None
            self.unanswered[position] = reason, len(talk.steps) - len(lengths)
        self.open.discard(position)
        if not talk.several:
            del self.talks[position]
        self.budget.book(position, *lengths)

    def _lengths(self, position: int) -> list[int]:
        return [len(kept.output_ids) for kept in self.answers.get(position, [])]

    def check_gates(self, *, at_once: bool = False) -> None:
        """Raise :class:`EyrieError` when the share of bad answers is above a gate.

        Bad outcomes that passed a gate are asked for again by the next run: whatever caused them is to be mended first.
        Truncated answers are not, they are what the target says within ``max_tokens``.

        Args:
            at_once: leave out truncation, which says nothing while short answers finish first.
        """
        passed = self.counts.passed(self.gates, at_once=at_once)
        if passed is None:
            return
        name, count, gate = passed
        if self.counts.outcomes[name]:
            self.journal.append({"key": self.key, "void": name})
        raise EyrieError(
            f"{self.where}: {count} of {self.counts.outcomes.total()} answers are {name}, engine.gates.{name} "
            f"allows a share of {gate:g}; {self.journal.path} says why; mend that or raise the gate (for this dataset "
            f"alone: datasets.{self.where.parent.name}.gates.{name}), and run again"
        )

    def write(self, draft: Draft) -> None:
        """Write the prefix and say where every prompt of the shard went, turn by turn."""
        prefix = range(self.budget.end)
        write_jsonl(draft.path, (row for position in prefix for row in self._responses(position)))
        chosen = [kept for position in prefix for kept in self.answers.get(position, [])]
        dropped: Counter[str] = Counter()
        for position, (reason, count) in self.unanswered.items():
            if position < self.budget.end:
                dropped[reason] += count
        dropped["beyond_budget"] = sum(len(self._steps(row)) for row in self.rows[self.budget.end :])
        read = len(chosen) + dropped.total()
        draft.rows = RowCounts(read=read, kept=len(chosen), dropped=dict(+dropped))
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
            **({"conversations": sum(position in self.answers for position in prefix)} if self.turn_by_turn else {}),
        }

    def _responses(self, position: int) -> Iterator[dict[str, Any]]:
        """A row for each answer; in a conversation of several turns with the context that the target had."""
        row, talk = self.rows[position], self.talks.get(position)
        for turn, kept in enumerate(self.answers.get(position, [])):
            ids, reason = kept.output_ids.tolist(), kept.finish_reason
            shown = row
            if talk is not None:
                key = {"prompt_key": prompt_key(row["messages"])}  # all turns share the key of the whole
                shown = {**row, "messages": talk.context_of(turn), "turn": turn, **key}
            yield {
                **shown,
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
        held = [(position, kept) for position, answers in self.answers.items() for kept in answers]
        found: dict[str, Any] = {
            "reused_rows": counts.reused,
            "answered_rows": counts.answered,
            "answered_tokens": tokens,
            "surplus_rows": sum(position >= self.budget.end for position, _ in held),
            "tokens_per_cpu_second": round(tokens / cpu_seconds, 2) if cpu_seconds > 0 else 0.0,
        }
        if dollars := sum(kept.dollars for _, kept in held):
            found |= {"dollars": round(counts.dollars, 6), "dollars_of_kept_answers": round(dollars, 6)}
        if counts.faults:
            found["faults"] = dict(sorted(counts.faults.items()))
        if served := {name: count for name, count in sorted(counts.served.items()) if name}:
            found["served_by"] = served
        return found
