"""Adapters for published schemas: each says where its data stands, which columns it has and what a row means.

An entry is a function from one row of the source to the raw conversation that :func:`eyrie.conversation.normalise`
takes. The entry's docstring shows one row; roles, keys and reasoning marks that normalise knows need no word there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from eyrie.conversation import Reject
from eyrie.datasets.registry import Adapter, Hub, Option, Raw, Source, register
from eyrie.datasets.streams import rows_of

Row = dict[str, Any]
Shape = Callable[[Row, Source], Row]

CONTAINERS = ("messages", "conversations", "conversation", "trajectory")
PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("instruction", "response"),
    ("problem", "response"), ("problem", "solution"), ("question", "answer"), ("input", "output"),
)  # fmt: skip
THINKING = ("reasoning_content", "reasoning", "thinking")


def schema(
    name: str,
    *,
    repo: str,
    licence: str,
    columns: Mapping[str, str],
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    files: str | None = None,
    **options: Option,
) -> Callable[[Shape], Shape]:
    """Register a shape as the adapter ``name``.

    Args:
        columns: every column that is read, and what it means; no other is fetched from a Parquet file.
        revision: commit that the entry was written for, where one is known; a config pins its own with ``revision``.
        options: the adapter's options with their defaults.
    """

    def registered(shape: Shape) -> Shape:
        def read(source: Source) -> Iterator[Raw]:
            return shaped_rows(rows_of(source, tuple(columns)), shape, source)

        read.__doc__ = shape.__doc__
        register(Adapter(name, read, options, ("path", "repo"), Hub(repo, subset, split, revision, files), licence))
        return shape

    return registered


def shaped_rows(rows: Iterator[Row], shape: Shape, source: Source) -> Iterator[Raw]:
    """Each row in the shape of a conversation, or its :class:`Reject`, which remembers the row."""
    for row in rows:
        try:
            yield shape(row, source)
        except Reject as reject:
            reject.row = row
            yield reject


def column(row: Row, name: str) -> Any:
    """The row's value, null included. Raises :class:`Reject` when the row has no such column."""
    if name not in row:
        raise Reject("malformed", f"no column {name!r}; the row has: {', '.join(map(str, row))}"[:200])
    return row[name]


def pair(
    source: Source,
    prompt: Any,
    answer: Any,
    *,
    system: Any = None,
    reasoning: Any = None,
    **meta: Any,
) -> Row:
    """One question, and for a native dataset its answer."""
    messages = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    if source.kind == "native":
        messages.append({"role": "assistant", "content": answer, "reasoning": reasoning})
    return chat(messages, **meta)


def chat(messages: Any, tools: Any = None, **meta: Any) -> Row:
    """A raw conversation; ``meta`` are short facts about it, nulls left out."""
    return {
        "messages": messages,
        "tools": tools,
        "meta": {key: value for key, value in meta.items() if value is not None},
    }


def recognised(row: Row, source: Source) -> Row:
    """A row whose columns have one of the usual names: a list of messages, or a question and its answer.

    Raises:
        Reject: none of the known names.
    """
    for container in CONTAINERS:
        if row.get(container) is not None:
            return {"messages": row[container], "tools": row.get("tools"), "images": row.get("images")}
    for asked, answered in PAIRS:
        if row.get(asked) is not None and answered in row:
            thought = next((row[name] for name in THINKING if row.get(name)), None)
            made = pair(source, row[asked], row[answered], system=row.get("system"), reasoning=thought)
            return {**made, "images": row.get("images")}
    raise Reject("malformed", f"no known columns; the row has: {', '.join(map(str, row))}"[:200])
