"""Sources of the user's own: any file, folder or hub dataset."""

from __future__ import annotations

from collections.abc import Iterator

from eyrie.conversation import ROLES, Reject, listed
from eyrie.datasets.registry import Raw, Source, adapter
from eyrie.datasets.schema import CONTAINERS, Row, chat, column, pair, shaped_rows
from eyrie.datasets.streams import rows_of
from eyrie.errors import EyrieError


@adapter("jsonl", places=("path",), prompt="prompt")
def jsonl(source: Source) -> Iterator[Raw]:
    """A ``.jsonl`` or ``.jsonl.zst`` file in its own order.

    Each row holds a list of messages (``messages``, ``conversations``, ``conversation`` or ``trajectory``) or, in the
    column that option ``prompt`` names, one user text. ``tools`` beside the messages are the declared tools.
    """
    if source.path is None:
        raise EyrieError("adapter jsonl: needs `path`, the .jsonl or .jsonl.zst file to read")
    prompt = source.options["prompt"]

    def shape(row: Row, _: Source) -> Row:
        for container in CONTAINERS:
            if row.get(container) is not None:
                return {"messages": row[container], "tools": row.get("tools"), "images": row.get("images")}
        if row.get(prompt) is None:
            raise Reject("malformed", f"neither messages nor a column {prompt!r}")
        return {"messages": [{"role": "user", "content": row[prompt]}], "tools": row.get("tools")}

    return shaped_rows(rows_of(source), shape, source)


@adapter(
    "columns",
    places=("path", "repo"),
    messages="",
    prompt="",
    response="",
    reasoning="",
    system="",
    tools="",
    role="",
    content="",
    roles="",
)
def columns(source: Source) -> Iterator[Raw]:
    """Any JSON lines, Parquet or hub dataset, by the names of its columns.

    Either ``messages`` names the column with the list of turns, or ``prompt`` the one with the user's text and
    ``response`` (for a native dataset) the one with the answer, ``reasoning`` the one with its reasoning. ``system``
    and ``tools`` name columns too. ``role`` and ``content`` are the keys inside a turn, where they are not among the
    usual ones. ``roles`` gives the data's own role names a meaning: ``teacher=assistant, pupil=user``.
    """
    chosen = dict(source.options)
    named = {key: chosen[key] for key in ("messages", "prompt", "response", "reasoning", "system", "tools")}
    if bool(named["messages"]) == bool(named["prompt"]):
        raise EyrieError("adapter columns: set option `messages` or option `prompt` to the name of a column, not both")
    if source.kind == "native" and named["prompt"] and not named["response"]:
        raise EyrieError("adapter columns: a native dataset needs option `response`, the column with the answer")
    meanings = _meanings(chosen["roles"])

    def shape(row: Row, _: Source) -> Row:
        cell = {key: column(row, name) if name else None for key, name in named.items()}
        if named["prompt"]:
            made = pair(source, cell["prompt"], cell["response"], system=cell["system"], reasoning=cell["reasoning"])
            return {**made, "tools": cell["tools"], "images": row.get("images")}
        turns = [_turn(turn, chosen["role"], chosen["content"], meanings) for turn in listed(cell["messages"])]
        if cell["system"]:
            turns.insert(0, {"role": "system", "content": cell["system"]})
        return {**chat(turns, cell["tools"]), "images": row.get("images")}

    return shaped_rows(rows_of(source, [*filter(None, named.values()), "images"]), shape, source)


def _meanings(text: str) -> dict[str, str]:
    """``"teacher=assistant, pupil=user"`` as a mapping."""
    meanings: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, role = (part.strip() for part in entry.partition("="))
        if not name or role not in ROLES.values():
            raise EyrieError(
                f"adapter columns: option 'roles' holds {entry!r}; write name=role with one of the roles "
                f"{', '.join(sorted(set(ROLES.values())))}, separated by commas"
            )
        meanings[name.lower()] = role
    return meanings


def _turn(turn: object, role: str, content: str, meanings: dict[str, str]) -> object:
    """A turn with the user's own keys and role names replaced by the usual ones."""
    if not isinstance(turn, dict):
        return turn
    made = dict(turn)
    if content:
        made["content"] = column(turn, content)
    spelled = column(turn, role) if role else made.get("role") or made.get("from")
    if role or meanings:
        made["role"] = meanings.get(spelled.strip().lower(), spelled) if isinstance(spelled, str) else spelled
    return made
