"""Source -> prompt shard: normalise, reject with a reason, drop duplicates, cut the shard's slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyrie.config import Config, Dataset
from eyrie.conversation import Conversation, Reject, normalise, prompt_key
from eyrie.datasets.keys import KeySet
from eyrie.datasets.pins import named_hub, refuse_unpinned
from eyrie.datasets.registry import Hub, Option, Raw, find_adapter
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import jsonl_writer
from eyrie.formats.manifest import RowCounts, sha256_of
from eyrie.formats.publish import atomic, publish

QUOTED = 300  # characters of a rejected row that the rejects file shows


def rejects_path(out: Path) -> Path:
    """``s0000.jsonl.zst`` -> ``s0000.rejects.jsonl.zst``."""
    return out.with_name(out.name.removesuffix(".jsonl.zst") + ".rejects.jsonl.zst")


def ingest(recipe: dict[str, Any], dataset_name: str, out: Path) -> None:
    """Publish one prompt shard and, beside it, the rows it left out.

    Shard k owns the kept rows ``[k * prompts_per_shard, (k + 1) * prompts_per_shard)`` of the stream. Its account
    covers the stretch of the source from behind the last kept row of the shard before it to its own last kept row, or
    to the end of the source when it is not full. So no row is counted twice, and what no shard reads is in no account.

    Raises:
        EyrieError: no such adapter or option, a hub dataset that is not pinned to a commit, a source that cannot be
            read, a shard that would be empty.
    """
    dataset = dataset_of(recipe)
    refuse_unpinned(dataset, dataset_name)
    shard = recipe["shard"]
    first, last = shard * dataset.prompts_per_shard, (shard + 1) * dataset.prompts_per_shard
    reasons: Counter[str] = Counter()  # of all rejects up to here, the earlier shards' too
    dropped: Counter[str] = Counter()  # of this shard's account
    facts: dict[str, str] = {}
    examples: dict[str, str] = {}
    found = kept = characters = 0
    with (
        publish(out, stage="ingest", recipe=recipe, inputs=_inputs(dataset)) as draft,
        atomic(rejects_path(out)) as part,
        jsonl_writer(part) as write_reject,
        jsonl_writer(draft.path) as write,
    ):
        for index, raw, outcome in examined(dataset, dataset_name, facts):
            if isinstance(outcome, Reject):
                reasons[outcome.reason] += 1
                examples.setdefault(outcome.reason, outcome.detail)
                if first <= found:
                    dropped[outcome.reason] += 1
                    write_reject(_rejected(index, raw, outcome))
                continue
            if found >= first:
                write(outcome.to_row(index))
                kept += 1
                characters += sum(len(message.content) for message in outcome.messages)
            found += 1
            if found == last:
                break
        if not kept:
            raise EyrieError(_empty(dataset, dataset_name, shard, found, reasons, examples))
        draft.rows = RowCounts(read=kept + dropped.total(), kept=kept, dropped=dict(sorted(dropped.items())))
        source = {"source": dict(sorted(facts.items()))} if facts else {}
        draft.facts = {"kind": dataset.kind, "characters": characters, **source}


def check_sources(config: Config) -> None:
    """Hold every dataset and suite against its adapter, before anything is made. Nothing is read.

    Raises:
        EyrieError: no such adapter, option or place; named by its path in the config.
    """
    suites = config.bench.suites
    asked = [
        *((f"datasets.{name}", it.adapter, it.options, it.path, named_hub(it)) for name, it in config.datasets.items()),
        *((f"bench.suites.{name}", it.dataset, it.options, None, Hub()) for name, it in suites.items() if it.dataset),
    ]
    for where, adapter, options, path, hub in asked:
        try:
            find_adapter(adapter).check(options, path, hub)
        except EyrieError as error:
            raise EyrieError(f"{where}: {error}") from error


def _inputs(dataset: Dataset) -> dict[str, str]:
    """Hashes of the local file, or of every file in the local folder."""
    if not dataset.path:
        return {}
    path = Path(dataset.path)
    if not path.is_dir():
        return {path.name: sha256_of(path)} if path.exists() else {}
    return {str(file.relative_to(path)): sha256_of(file) for file in sorted(path.rglob("*")) if file.is_file()}


def dataset_of(recipe: dict[str, Any]) -> Dataset:
    """The dataset section that an ingest recipe describes; its token budget is not part of the recipe."""
    return Dataset.model_validate({**recipe["dataset"], "token_budget": 1})


def examined(
    dataset: Dataset, name: str, facts: dict[str, str] | None = None
) -> Iterator[tuple[int, Raw, Conversation | Reject]]:
    """Every row of the source: position, raw row, and what became of it. ``facts`` takes what the reader finds out."""
    try:
        adapter = find_adapter(dataset.adapter)
        rows = adapter.open(dataset.options, dataset.kind, dataset.path, named_hub(dataset), facts)
        seen = KeySet()
        for index, raw in enumerate(rows):
            try:
                conversation = shaped(raw, dataset)
                named = raw.get("key") if isinstance(raw, dict) else None
                if named is not None and not seen.add(f"key:{named}"):
                    raise Reject("duplicate", str(named))
                if not seen.add(_duplicate_key(given(conversation) if dataset.turns else conversation, dataset.kind)):
                    raise Reject("duplicate")
                yield index, raw, conversation
            except Reject as reject:
                yield index, raw, reject
    except EyrieError as error:
        raise EyrieError(f"dataset {name}: {error}") from error


def shaped(raw: Raw, dataset: Dataset) -> Conversation:
    """Normalise one row and cut it to what the dataset's kind needs. Raises :class:`Reject`."""
    if isinstance(raw, Reject):
        raise raw
    conversation = normalise(raw)
    if dataset.turns:
        conversation = conversation.as_turns(dataset.turns)
    elif dataset.kind == "answered":
        conversation = conversation.as_prompt()
    else:
        conversation = conversation.as_finished()
    if dataset.tools == "drop":
        if any(message.tool_calls or message.role == "tool" for message in conversation.messages):
            raise Reject("tool_turns")
        conversation = Conversation(conversation.messages, None, conversation.meta)
    asked = given(conversation) if dataset.turns else conversation
    if asked.chars > dataset.max_prompt_chars:
        raise Reject("prompt_too_long", f"{asked.chars} characters")
    return conversation


def given(conversation: Conversation) -> Conversation:
    """What the target is told when it answers turn by turn: all but the data's own answers."""
    told = tuple(message for message in conversation.messages if message.role != "assistant")
    return Conversation(told, conversation.tools, conversation.meta)


def suite_prompts(adapter: str, options: dict[str, Option]) -> list[Conversation]:
    """The prompts of a benchmark suite: every row of the adapter that can be asked, tool declarations dropped."""
    dataset = Dataset(adapter=adapter, options=options, token_budget=1, tools="drop", max_prompt_chars=10**9)
    rows = examined(dataset, f"of suite {adapter}")
    return [outcome for _, _, outcome in rows if isinstance(outcome, Conversation)]


def _duplicate_key(conversation: Conversation, kind: str) -> str:
    """Prompts that differ in case and spacing alone are the same (see prompt_key); conversations only when equal."""
    if kind == "native":
        return conversation.id
    context = [m for m in conversation.messages if m.role != "user"]
    others = Conversation(tuple(context), conversation.tools).id if context or conversation.tools else ""
    users = "\n".join(m.content for m in conversation.messages if m.role == "user")
    return prompt_key([{"role": "user", "content": users}]) + others


def _rejected(index: int, raw: Raw, reject: Reject) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "reason": reject.reason}
    if reject.detail:
        row["detail"] = reject.detail
    if not isinstance(raw, Reject):
        row["row"] = _excerpt(raw.get("messages"))
    elif raw.row is not None:
        row["row"] = _excerpt(raw.row)
    return row


def _excerpt(value: Any) -> str:
    """The beginning of a row; half a surrogate pair must not keep it from being shown."""
    return str(value)[:QUOTED].encode(errors="replace").decode()


def _empty(dataset: Dataset, name: str, shard: int, found: int, reasons: Counter[str], examples: dict[str, str]) -> str:
    if found == 0:
        counts = [f"{reason} {count}" for reason, count in reasons.most_common()]
        if counts and (detail := examples[reasons.most_common(1)[0][0]]):
            counts[0] += f", as in: {detail}"
        why = "; ".join(counts) or "the source is empty"
        return f"dataset {name}: yields no prompt ({why}); mend the source or the options of adapter {dataset.adapter}"
    return (
        f"dataset {name}: shard s{shard:04d} would be empty, the source holds {found} usable prompts and "
        f"prompts_per_shard is {dataset.prompts_per_shard}; lower datasets.{name}.token_budget or prompts_per_shard"
    )
