"""Prompts that ship inside Python packages, read as plain files.

The packages are never imported: only their data is wanted, and their own dependencies are not installed.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from eyrie.conversation import Reject
from eyrie.datasets.registry import Raw, Source, adapter
from eyrie.errors import EyrieError

Row = TypeVar("Row")

BFCL_SINGLE_TURN = (
    "simple_python,simple_java,simple_javascript,multiple,parallel,parallel_multiple,irrelevance,"
    "live_simple,live_multiple,live_parallel,live_parallel_multiple,live_relevance,live_irrelevance"
)
CJK_SHARE = 0.02  # above this share of CJK characters a text counts as Chinese


@adapter("human-eval")
def human_eval(source: Source) -> Iterator[Raw]:
    """164 Python functions to complete from signature and docstring."""
    path = package_file("human_eval", "data/HumanEval.jsonl.gz", distribution="human-eval")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file if line.strip()]
    for problem in shuffled(problems, lambda row: row["task_id"]):
        code = problem["prompt"].strip("\n")
        text = f"Complete the following Python function.\n\n```python\n{code}\n```"
        yield _prompt(text, task_id=problem["task_id"])


@adapter("writingbench", language="any")
def writingbench(source: Source) -> Iterator[Raw]:
    """1,000 writing briefs; ``language`` is ``any``, ``en`` or ``zh``."""
    wanted = source.options["language"]
    if wanted not in {"any", "en", "zh"}:
        raise EyrieError(f"adapter writingbench: option 'language' is {wanted!r}; choose any, en or zh")
    path = package_file("inspect_evals", "writingbench/benchmark_all.jsonl", distribution="inspect-evals")
    briefs = read_lines(path)
    for brief in shuffled(briefs, lambda row: str(row["index"])):
        language = {"english": "en", "chinese": "zh"}.get(str(brief.get("lang")).lower()) or guess_language(
            brief["query"]
        )
        if wanted not in {"any", language}:
            yield Reject("language", language)
        else:
            yield _prompt(brief["query"], domain=brief["domain2"], language=language)


@adapter("bfcl", files=BFCL_SINGLE_TURN)
def bfcl(source: Source) -> Iterator[Raw]:
    """Questions for function calling with their tool declarations; ``files`` names categories, comma-separated."""
    rows: list[tuple[str, dict[str, Any]]] = []
    for category in (part.strip() for part in source.options["files"].split(",")):
        path = package_file("bfcl_eval", f"data/BFCL_v4_{category}.json", distribution="bfcl-eval")
        rows += [(category, row) for row in read_lines(path)]
    for category, row in shuffled(rows, lambda pair: pair[1]["id"]):
        turns = row.get("question") or []
        if len(turns) != 1:
            yield Reject("malformed", f"{len(turns)} turns; only single-turn categories are read")
            continue
        tools = [{"type": "function", "function": declared} for declared in row.get("function", [])]
        yield {"messages": turns[0], "tools": tools, "meta": {"task_id": row["id"], "category": category}}


@adapter("chitchat", part="all", turns=0)
def chitchat(source: Source) -> Iterator[Raw]:
    """7,168 conversations between two people; the one who opens becomes the user.

    ``part`` is ``all``, or one of the disjoint halves ``prompts`` and ``conversations``, so that one dataset can be
    answered by the target and another keep its own answers without sharing a conversation. ``turns`` is how many user
    turns are used; 0 is the opening alone for an answered dataset, and the whole conversation for a native one.
    """
    part, turns = source.options["part"], source.options["turns"]
    if part not in {"all", "prompts", "conversations"}:
        raise EyrieError(f"adapter chitchat: option 'part' is {part!r}; choose all, prompts or conversations")
    if turns < 0:
        raise EyrieError(f"adapter chitchat: option 'turns' is {turns}; it cannot be negative")
    path = package_file("chitchat_dataset", "dataset.json", distribution="chitchat-dataset")
    conversations = json.loads(path.read_text(encoding="utf-8"))
    for name in shuffled(conversations, str):
        half = "prompts" if digest(f"part:{name}") % 2 == 0 else "conversations"
        if part not in {"all", half}:
            continue
        messages = _speakers(conversations[name]["messages"])
        if source.kind == "answered":
            wanted = 2 * max(turns, 1) - 1
            if len(messages) < wanted:
                yield Reject("too_short", f"{len(messages)} turns")
                continue
            messages = messages[:wanted]
        elif turns:
            messages = messages[: 2 * turns]
        yield {"messages": messages, "meta": {"task_id": name}}


def _speakers(blocks: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """Blocks of texts as alternating turns: what one person writes in a row is one message."""
    messages: list[dict[str, str]] = []
    names: dict[str, str] = {}
    for block in blocks:
        text = "\n".join(said["text"].strip() for said in block if said["text"].strip())
        if not text:
            continue
        role = names.setdefault(block[0]["sender"], "assistant" if names else "user")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + text
        else:
            messages.append({"role": role, "content": text})
    return messages


def _prompt(text: str, **meta: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "meta": meta}


def package_file(package: str, name: str, *, distribution: str) -> Path:
    """A file inside an installed package, found without importing it.

    Raises:
        EyrieError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    if spec is None:
        raise EyrieError(f"package {distribution} is not installed; `pip install --no-deps {distribution}`")
    raise EyrieError(f"package {distribution} holds no file {name}; check the option that names it, or the version")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file. Unlike :meth:`str.splitlines`, only a line feed ends a row."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file if line.strip()]


def digest(text: str) -> int:
    """A number that depends on the text alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def shuffled(rows: Iterable[Row], name: Callable[[Row], str]) -> list[Row]:
    """Rows in the order of their names' hashes: sources are grouped by topic, a shard should not be."""
    return sorted(rows, key=lambda row: (digest(name(row)), name(row)))


def guess_language(text: str) -> str:
    """``zh`` when more than :data:`CJK_SHARE` of the characters are CJK ideographs, else ``en``."""
    ideographs = sum("\u4e00" <= char <= "\u9fff" for char in text)
    return "zh" if ideographs > CJK_SHARE * len(text) else "en"
