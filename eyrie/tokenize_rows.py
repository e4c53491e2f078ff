"""Conversations -> token rows: ids, and the spans whose labels are supervised.

Answers keep the ids that the target produced; nothing is rendered or re-encoded. Native conversations are rendered with
the target's template, one row per assistant turn (:meth:`eyrie.render.renderer.Renderer.turn_rows`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.config import Tokenize
from eyrie.conversation import REASONS, Reject, prompt_key
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl
from eyrie.formats.manifest import RowCounts, verified_manifest
from eyrie.formats.publish import publish
from eyrie.formats.tokens import MIN_LABELS, write_tokens
from eyrie.targets.card import TargetCard, read_card, resolve

if TYPE_CHECKING:
    from eyrie.render.renderer import Renderer, TurnRow

Outcome = dict[str, Any] | Reject


def tokenize(recipe: dict[str, Any], *, source: Path, name: str, target: Path, model: str, out: Path) -> None:
    """Publish the token shard of one response shard, or of one native prompt shard.

    Rows keep their order. A native shard holds the shortest prefix of its rows that fills ``token_budget`` completion
    tokens; what stands behind it is counted as ``over_budget``.

    Args:
        recipe: ``kind``, ``tokenize`` and, for a native dataset, ``token_budget``.
        source: response shard (answered) or prompt shard (native), verified against its manifest.
        name: dataset.
        target: the run's target card.
        model: folder or hub id of the tokenizer; read where something is rendered.
        out: where the token shard goes.

    Raises:
        EyrieError: a source of another stage or target, a broken row, a template whose turns have no stable boundary,
            or a shard without a single usable row.
    """
    started = time.monotonic()
    card = read_card(target)
    options = Tokenize.model_validate(recipe["tokenize"])
    native = recipe["kind"] == "native"
    stage, identity = ("ingest", {}) if native else ("generate", card.identity())
    manifest = verified_manifest(source, stage=stage, identity=identity)
    rendered = Rendered(model, card)
    if native:
        outcomes = native_rows(source, rendered, card, options, recipe["token_budget"])
    else:
        outcomes = response_rows(source, card, options)
    kept: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for outcome in outcomes:
        if isinstance(outcome, Reject):
            dropped[outcome.reason] += 1
        else:
            kept.append(outcome)
    if not kept:
        why = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common()) or "the source is empty"
        raise EyrieError(f"{source}: dataset {name} gives no token row ({why}); {_mend(dropped, options)}")
    inputs = {f"{name}/{source.name}": manifest.sha256}
    with publish(out, stage="tokenize", recipe=recipe, inputs=inputs, identity=card.identity()) as draft:
        write_tokens(draft.path, kept)
        draft.rows = RowCounts(
            read=len(kept) + sum(dropped.values()), kept=len(kept), dropped=dict(sorted(dropped.items()))
        )
        total = sum(row["length"] for row in kept)
        completion = sum(row["completion_tokens"] for row in kept)
        draft.tokens = {"total": total, "completion": completion, "prompt": total - completion}
        draft.facts = {
            "kind": recipe["kind"],
            # a greedy answer can be checked: the target, run over it again, must choose the same tokens
            "greedy": not native and not manifest.recipe.get("sampling", {}).get("temperature", 0.0),
            "conversations": len({row["conversation"] for row in kept}),
            "truncated_kept": sum(row["finish_reason"] == "length" for row in kept),
            "longest": max(row["length"] for row in kept),
            # how text became ids: the template's hash stands in the identity, this one is of the family's rules
            "rules": card.rendering.rules,
            "quoted_control_rows": rendered.quoting,
        }
        draft.stats = {"seconds": round(time.monotonic() - started, 3)}


class Rendered:
    """The renderer, made when something must be rendered, and what was counted on the way.

    Attributes:
        quoting: rows whose messages hold control strings, which were encoded as plain characters.
    """

    def __init__(self, model: str, card: TargetCard) -> None:
        self._model, self._card = model, card
        self.quoting = 0

    @cached_property
    def renderer(self) -> Renderer:
        """Raises :class:`EyrieError` when the self-test found that no turn of the template can be told apart."""
        from eyrie.render.renderer import Renderer

        found = self._card.rendering
        folder = resolve(self._model, self._card.revision)
        if found.boundary != "stable":
            raise EyrieError(
                f"{folder}: its chat template gives no turn a boundary ({found.boundary}: {REASONS[found.boundary]}); "
                "use answered datasets, or mend the template"
            )
        return Renderer(folder, self._card.stop_ids, found)

    def count(self, outcome: Outcome, turn: TurnRow) -> Outcome:
        """Count a row that is kept."""
        if isinstance(outcome, dict):
            self.quoting += turn.quotes
        return outcome


def response_rows(source: Path, card: TargetCard, options: Tokenize) -> Iterator[Outcome]:
    """Rows of a response shard: the served prompt ids followed by the generated ids."""
    talk, told = None, 0  # the conversation of the rows before, and how many of its messages they tell
    for number, row in enumerate(read_jsonl(source), start=1):
        try:
            finish, messages = row["finish_reason"], row["messages"]
            prompt, output = row["prompt_ids"], row["output_ids"]
            if max([*prompt, *output], default=0) >= card.vocab_size:
                raise EyrieError(
                    f"{source}:{number}: holds token ids above the target's vocabulary of {card.vocab_size}; "
                    f"it was made for another target, rebuild it with `snakemake -f {source}`"
                )
            if row["id"] != talk or "turn" not in row:  # the answers of one conversation stand in a row
                talk, told = row["id"], 0
            made = _row(row["id"], messages, len(messages), [*prompt, *output], len(prompt), finish, told)
            made["prompt_key"] = row.get("prompt_key", made["prompt_key"])  # of the whole, for one turn of several
        except (KeyError, TypeError) as error:
            raise EyrieError(
                f"{source}:{number}: is no response row ({type(error).__name__}: {error}); "
                f"rebuild it with `snakemake -f {source}`"
            ) from error
        outcome = _checked(made, options)
        if isinstance(outcome, dict) and finish != "length" and output[-1] not in card.stop_ids:
            outcome = Reject("no_stop_id")
        if isinstance(outcome, dict):
            told = len(messages)
        yield outcome


def native_rows(
    source: Path, rendered: Rendered, card: TargetCard, options: Tokenize, token_budget: int
) -> Iterator[Outcome]:
    """Rows of a native prompt shard, one per assistant turn: the shortest prefix that fills the budget."""
    renderer = rendered.renderer
    completion = 0
    for row in read_jsonl(source):
        messages, told = row["messages"], 0
        if completion >= token_budget:  # counted, but no longer rendered
            yield from (Reject("over_budget") for message in messages if message["role"] == "assistant")
            continue
        for turn in renderer.turn_rows(messages, row.get("tools"), options.max_length):
            if completion >= token_budget:
                yield Reject("over_budget")
            elif isinstance(turn, Reject):
                yield turn
            else:
                made = _row(row["id"], messages, turn.turn, turn.input_ids, turn.start, "native", told)
                outcome = rendered.count(_checked(made, options), turn)
                if isinstance(outcome, dict):
                    completion += outcome["completion_tokens"]
                    told = turn.turn
                yield outcome


def _row(
    conversation: str, messages: list[dict[str, Any]], turn: int, ids: list[int], start: int, finish: str, told: int = 0
) -> dict[str, Any]:
    """A token row; earlier rows of the conversation hold the user turns of its first ``told`` messages."""
    return {
        "row_id": f"{conversation}:{turn}",
        "conversation": conversation,
        "prompt_key": prompt_key(messages),
        "turn": turn,
        "input_ids": ids,
        "spans": [{"start": start, "end": len(ids)}],
        "length": len(ids),
        "completion_tokens": len(ids) - start,
        "finish_reason": finish,
        "asked": [message["content"] for message in messages[told:turn] if message["role"] == "user"],
    }


def _checked(row: dict[str, Any], options: Tokenize) -> Outcome:
    """The row, or why it is left out."""
    if row["finish_reason"] == "length" and options.truncated == "drop":
        return Reject("truncated")
    if row["completion_tokens"] < MIN_LABELS:
        return Reject("no_supervised_tokens")
    if row["length"] > options.max_length:
        return Reject("too_long")
    return row


def _mend(dropped: Counter[str], options: Tokenize) -> str:
    if dropped["too_long"]:
        return f"raise tokenize.max_length ({options.max_length})"
    if dropped["truncated"]:
        return "raise sampling.max_tokens, or set tokenize.truncated: keep"
    return "look at the source, or take the dataset out"
