"""Local files of conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eyrie.conversation import Reject
from eyrie.datasets.registry import Raw, Source, adapter
from eyrie.errors import EyrieError
from eyrie.formats.jsonl import read_jsonl

CONTAINERS = ("messages", "conversations", "conversation", "trajectory")


@adapter("jsonl", prompt="prompt")
def jsonl(source: Source) -> Iterator[Raw]:
    """A ``.jsonl`` or ``.jsonl.zst`` file in its own order.

    Each row holds a list of messages (``messages``, ``conversations``, ``conversation`` or ``trajectory``) or, in the
    column that option ``prompt`` names, one user text. ``tools`` beside the messages are the declared tools.
    """
    if source.path is None:
        raise EyrieError("adapter jsonl: needs `path`, the .jsonl or .jsonl.zst file to read")
    column = source.options["prompt"]
    for row in read_jsonl(Path(source.path)):
        for container in CONTAINERS:
            if row.get(container) is not None:
                yield {"messages": row[container], "tools": row.get("tools")}
                break
        else:
            if row.get(column) is None:
                yield Reject("malformed", f"neither messages nor a column {column!r}")
            else:
                yield {"messages": [{"role": "user", "content": row[column]}], "tools": row.get("tools")}
