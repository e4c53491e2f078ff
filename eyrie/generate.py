"""Responses: the target answers one prompt shard up to its token budget.

Rows stand in prompt order and the shard holds the shortest prefix of answered prompts whose completion tokens reach the
budget, so its bytes depend neither on timing nor on concurrency. Every answer goes to the journal first and is never
bought twice: what finishes beyond the prefix serves the next raise of the budget.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from eyrie.config import Sampling
from eyrie.conversation import Reject
from eyrie.engines.base import Answer, Engine, Request
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl, write_jsonl
from eyrie.formats.manifest import RowCounts, verified_manifest
from eyrie.formats.publish import Draft, publish
from eyrie.journal import Journal
from eyrie.progress import Progress
from eyrie.recipes import canonical_json
from eyrie.stopwatch import Stopwatch
from eyrie.targets.card import TargetCard, read_card, resolve

log = logging.getLogger(__name__)

# Before any answer is seen, one stop in this share of max_tokens is taken for granted: answers cut at max_tokens then
# have a mean of half of it.
PRIOR_SHARE = 0.63


class PromptRenderer(Protocol):
    """The part of :class:`eyrie.render.Renderer` that is used here."""

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def generate(
    recipe: dict[str, Any],
    *,
    prompts: Path,
    target: Path,
    model: str,
    out: Path,
    journal: Path,
    afresh: bool = False,
    batch_size: int = 64,
    device: str = "auto",
    threads: int = 1,
    engine: Callable[[], Engine] | None = None,
    renderer: PromptRenderer | None = None,
) -> None:
    """Answer ``prompts`` and publish the response shard ``out`` with its manifest.

    Args:
        recipe: the stage's recipe (:func:`eyrie.recipes.recipe`): sampling and token budget.
        prompts: prompt shard, with its manifest beside it.
        target: ``target.json`` of the run.
        model: local Hugging Face folder or hub id of the target.
        journal: file that keeps every answer; rows in it are reused when prompt, sampling and target are the same.
        afresh: set the journal aside and buy new answers.
        engine: makes the engine; called only when a prompt must be answered. Default: in this process.
        renderer: chat template and tokenizer. Default: the target's own.

    Raises:
        EyrieError: a prompt shard that is damaged or no list of questions, a journal in use, a full disk.
    """
    watch = Stopwatch()
    card = read_card(target)
    source = verified_manifest(prompts, stage="ingest")
    shard = f"{prompts.parent.name}/{prompts.name}"
    rows = list(read_jsonl(prompts))
    if renderer is None or engine is None:
        from eyrie.render import Renderer

        folder = resolve(model, recipe.get("target", {}).get("revision"))
        renderer = renderer or Renderer(folder, card.stop_ids, card.rendering)
        engine = engine or _in_process(recipe, card, folder, batch_size, device, threads)
    with Journal(journal, afresh=afresh) as book:
        shift = Shift(recipe, card, rows, renderer, book, prompts)
        shift.work(engine, label=f"generate {shard.removesuffix('.jsonl.zst')}")
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


def journal_key(recipe: dict[str, Any], identity: dict[str, str]) -> str:
    """What an answer depends on besides its prompt: sampling, engine, dtype and target, but no budget and no path."""
    content = {
        "identity": identity,
        "engine": recipe.get("engine", {}),
        "sampling": recipe.get("sampling", {}),
        "dtype": recipe.get("target", {}).get("dtype", "auto"),
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:16]


class Budget:
    """Decides which rows must be answered, and where the shard ends.

    Rows are taken in order. The next one is needed exactly when the rows before it are thought to hold fewer tokens
    than the budget; a row in flight counts with its expected length. Once nothing is in flight nothing is guessed, so
    admission can pause but never stall. The guess moves work in time and never changes what the shard holds.

    The guess: answers end at a constant rate per token, which is the number of stops over all tokens seen, those of
    rows in flight included. Leaving these out would favour short answers, which finish first (simulated with 64 rows
    at once and a budget of 25,000 tokens: 13% to 17% bought in vain, against under 1%). How many tokens a row in flight
    has follows from a clock that counts tokens per row: engines give each row a token per step, or nearly so.

    Attributes:
        answered: tokens of all answered rows that were reached, the surplus included.
        filled: tokens of the prefix.
        end: length of the prefix: rows before it are answered or passed over.
    """

    def __init__(self, tokens: int, max_tokens: int) -> None:
        self.tokens, self.max_tokens = tokens, max_tokens
        self.answered, self.filled, self.end = 0, 0, 0
        self._known: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._clock = self._stops = 0

    @property
    def full(self) -> bool:
        return self.filled >= self.tokens

    @property
    def needs_next(self) -> bool:
        return self.answered + self._expected() < self.tokens

    def start(self, position: int) -> None:
        """Row ``position``, the next one, is in flight."""
        self._started[position] = self._clock

    def book(self, position: int, tokens: int) -> None:
        """Row ``position`` holds ``tokens``: 0 when it is passed over, else the length of its answer."""
        started = self._started.pop(position, None)
        if started is not None:
            self._clock = max(self._clock, started + tokens)
        self.answered += tokens
        self._stops += 0 < tokens < self.max_tokens
        self._known[position] = tokens
        while not self.full and self.end in self._known:
            self.filled += self._known[self.end]
            self.end += 1

    def _expected(self) -> float:
        """Tokens that the rows in flight will hold once they have ended."""
        shown = [min(self._clock - started, self.max_tokens - 1) for started in self._started.values()]
        rate = (self._stops + 1) / (self.answered + sum(shown) + PRIOR_SHARE * self.max_tokens)
        return sum(tokens + (1 - math.exp(-rate * (self.max_tokens - tokens))) / rate for tokens in shown)


@dataclass
class Counts:
    reused: int = 0
    answered: int = 0
    answered_tokens: int = 0


class Shift:
    """One sitting over one shard: reuse what is journaled, ask for the rest, write the prefix.

    Args:
        rows: the prompt shard's rows.
        where: the prompt shard, for messages.
    """

    def __init__(
        self,
        recipe: dict[str, Any],
        card: TargetCard,
        rows: list[dict[str, Any]],
        renderer: PromptRenderer,
        journal: Journal,
        where: Path,
    ) -> None:
        self.rows, self.renderer, self.journal, self.where = rows, renderer, journal, where
        self.sampling = Sampling.model_validate(recipe.get("sampling", {}))
        self.longest_prompt = card.max_position_embeddings - self.sampling.max_tokens
        self.key = journal_key(recipe, card.identity())
        self.seed = self.sampling.seed + (journal.generation if self.sampling.temperature > 0 else 0)
        self.earlier = {record["id"]: record for record in journal.records if record["key"] == self.key}
        self.budget = Budget(recipe["token_budget"], self.sampling.max_tokens)
        self.answers: dict[int, dict[str, Any]] = {}
        self.rejects: dict[int, str] = {}
        self.counts = Counts()

    def work(self, engine: Callable[[], Engine], label: str) -> None:
        """Fill the budget. The engine is made only if a prompt is left to answer."""
        requests = self._requests()
        first = next(requests, None)
        if first is None:
            return
        with Progress(label, self.budget.tokens, "tokens", done=self.budget.answered) as progress:
            cut = 0

            def finished(request: Request, answer: Answer) -> None:
                nonlocal cut
                self._keep(request, answer)
                cut += answer.finish_reason == "length"
                progress.advance(self.budget.answered - progress.done, answers=self.counts.answered, truncated=cut)

            engine().answer(chain([first], requests), finished)

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
                self.answers[position] = earlier
                self.budget.book(position, len(earlier["output_ids"]))
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
        return Request(position, prompt_ids, self.sampling, self.seed)

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
        tokens = len(answer.output_ids)
        if not 0 < tokens <= self.sampling.max_tokens:
            raise ValueError(f"the engine gave {tokens} tokens, max_tokens is {self.sampling.max_tokens}")
        if answer.finish_reason not in ("stop", "length"):
            raise ValueError(f"the engine gave finish_reason {answer.finish_reason!r}, expected stop or length")
        record = {
            "key": self.key,
            "id": self.rows[request.position]["id"],
            "prompt_ids": request.prompt_ids,
            "output_ids": answer.output_ids,
            "finish_reason": answer.finish_reason,
            "seed": request.seed,
        }
        self.journal.append(record)
        self.answers[request.position] = record
        self.counts.answered += 1
        self.counts.answered_tokens += tokens
        self.budget.book(request.position, tokens)

    def write(self, draft: Draft) -> None:
        """Write the prefix and say where every prompt of the shard went."""
        kept = [position for position in range(self.budget.end) if position in self.answers]
        write_jsonl(draft.path, map(self._response, kept))
        chosen = [self.answers[position] for position in kept]
        dropped = Counter(reason for position, reason in self.rejects.items() if position < self.budget.end)
        dropped["beyond_budget"] = len(self.rows) - self.budget.end
        draft.rows = RowCounts(read=len(self.rows), kept=len(kept), dropped=dict(+dropped))
        draft.tokens = {
            "prompt": sum(len(record["prompt_ids"]) for record in chosen),
            "completion": sum(len(record["output_ids"]) for record in chosen),
        }
        truncated = sum(record["finish_reason"] == "length" for record in chosen)
        draft.facts = {
            "truncated": truncated,
            "stopped": len(chosen) - truncated,
            "token_budget": self.budget.tokens,
            "budget_filled": self.budget.full,
        }

    def _response(self, position: int) -> dict[str, Any]:
        record = self.answers[position]
        ids, reason = record["output_ids"], record["finish_reason"]
        return {
            **self.rows[position],
            "prompt_ids": record["prompt_ids"],
            "output_ids": ids,
            "text": self.renderer.decode(ids[:-1] if reason == "stop" else ids),
            "finish_reason": reason,
            "temperature": self.sampling.temperature,
            "seed": record["seed"],
        }

    def figures(self, cpu_seconds: float) -> dict[str, float]:
        """What this sitting did, for the stats file: it may differ between equal shards."""
        tokens = self.counts.answered_tokens
        return {
            "reused_rows": self.counts.reused,
            "answered_rows": self.counts.answered,
            "answered_tokens": tokens,
            "surplus_rows": sum(position >= self.budget.end for position in self.answers),
            "tokens_per_cpu_second": round(tokens / cpu_seconds, 2) if cpu_seconds > 0 else 0.0,
        }


def _in_process(
    recipe: dict[str, Any], card: TargetCard, folder: Path, batch_size: int, device: str, threads: int
) -> Callable[[], Engine]:
    def make() -> Engine:
        from eyrie.engines.transformers import TransformersEngine
        from eyrie.machine import choose_device, choose_dtype, use_threads

        use_threads(threads)
        chosen = choose_device(device)
        dtype = choose_dtype(recipe.get("target", {}).get("dtype", "auto"), chosen)
        return TransformersEngine(folder, frozenset(card.stop_ids), dtype, batch_size, chosen)

    return make
