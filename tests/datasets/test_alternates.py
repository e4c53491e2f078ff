"""Published schemas beside the row that an adapter's docstring shows: other spellings, columns and splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_schemas import read, shown_row, turns

from eyrie.conversation import Conversation
from eyrie.datasets import ADAPTERS

ASKED, SAID = ("user", "Why is the sky blue?"), ("assistant", "Short waves scatter more.")
SHARED: dict[str, Any] = {"teacher": "t", "tokens": 3}  # columns that mean nothing here


def from_value(*pairs: tuple[str, str], **more: Any) -> list[dict[str, Any]]:
    return [{"from": role, "value": text, **more} for role, text in pairs]


def role_content(*pairs: tuple[str, str], **more: Any) -> list[dict[str, Any]]:
    return [{"content": text, "role": role, **more} for role, text in pairs]


PAIR = (("human", ASKED[1]), ("gpt", SAID[1]))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        # a blend of blends spells its turns with role and content
        ("eaglechat", {"id": "1", "conversations": role_content(ASKED, SAID)}),
        ("perfectblend", {"conversations": from_value(*PAIR), "source": None}),
        # human and gpt in the data, human and assistant in what is written about it
        ("openthoughts3", {"difficulty": None, "domain": "d", "conversations": from_value(PAIR[0], SAID)}),
        ("openthoughts", {"system": None, "conversations": from_value(*PAIR)}),
        ("openthoughts", {"system": "", "conversations": from_value(ASKED, SAID)}),
        # scraped messages carry fields of their own, and Arrow gives them to every message
        ("sharegpt", {"id": "QWJhYvA_12", "conversations": from_value(*PAIR, markdown=None, text=None)}),
        ("sharegpt", {"id": "a", "conversations": from_value(("user", ASKED[1]), ("bard", SAID[1]))}),
        ("ultrachat", {"prompt": "p", "prompt_id": "i", "messages": role_content(ASKED, SAID, ASKED)}),
        ("mixture-of-thoughts", {"messages": role_content(ASKED, SAID), "num_tokens": 3, "source": "s"}),
        # one repository, files of several schemas
        ("kimi-k2.5-million", {"conversations": from_value(*PAIR)}),
        ("kimi-k2.5-million", {"conversation": json.dumps(role_content(ASKED, SAID))}),
        ("kimi-k2.5-million", {"prompt": ASKED[1], "response": SAID[1], **SHARED}),
        ("kimi-k2.5-million", {"instruction": ASKED[1], "output": SAID[1], "messages": None}),
        ("octomed-kimi", {"question": ASKED[1], "answer": SAID[1], "images": []}),
        ("octomed-kimi", {"problem": ASKED[1], "response": SAID[1], "image": None}),
        ("magicoder-oss", {"lang": None, "problem": ASKED[1], "solution": SAID[1]}),
        ("opencodeinstruct", {"id": 3, "input": ASKED[1], "output": SAID[1], "domain": None}),
        ("codealpaca", {"instruction": ASKED[1], "input": None, "output": SAID[1]}),
        ("infinity", {"conversation": role_content(ASKED, ("assistant", "old"), ("user", "later")),
                      "generated_message": {"role": "assistant", "content": SAID[1]}}),
        ("nemotron-chat", {"input": role_content(ASKED), "output": SAID[1], "reasoning": "off"}),
        ("swe-smith", {"messages": role_content(ASKED, SAID, agent="main"), "instance_id": "i", "traj_id": "t"}),
        ("openhands-sft", {"messages": role_content(ASKED, SAID)}),
        ("coderforge", {"messages": role_content(ASKED, SAID), "tools": None, "trajectory_id": "t"}),
    ],
)  # fmt: skip
def test_other_spellings_are_the_same_conversation(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    (made,) = read(name, [row], tmp_path)
    assert isinstance(made, Conversation), made
    assert turns(made.as_finished()) == [ASKED, SAID]
    assert turns(read(name, [row], tmp_path, "answered")[0].as_prompt())[0] == ASKED


def test_reasoning_may_stand_in_a_column_of_its_own(tmp_path: Path) -> None:
    row = {"question": ASKED[1], "answer": SAID[1]}
    rows = [{**row, name: "Rayleigh."} for name in ("thinking", "reasoning", "reasoning_content")]
    for made in read("kimi-k2.5-million", [*rows, {**row, "answer": f"<think>Rayleigh.</think>{SAID[1]}"}], tmp_path):
        assert [message.reasoning for message in made.messages] == [None, "Rayleigh."]
        assert made.meta == {"generator": "kimi-k2.5"}


def test_a_picture_beside_a_question_is_for_another_target(tmp_path: Path) -> None:
    row = {"question": ASKED[1], "answer": SAID[1], "images": [{"bytes": "AA=="}]}
    assert read("octomed-kimi", [row], tmp_path) == ["non_text_part"]


def test_a_trajectory_may_be_a_json_string_with_a_role_of_its_own(tmp_path: Path) -> None:
    """Roles are system, user and ``ai``, the text stands in ``text``; the system's in ``system_prompt``."""
    shown = shown_row("swe-agent")
    as_text = {**shown, "trajectory": json.dumps(shown["trajectory"])}
    plain = {**shown, "trajectory": [{**turn, "cutoff_date": "01.01.2023"} for turn in shown["trajectory"]]}
    told = {**shown, "trajectory": [{"role": "system", "system_prompt": None, "text": "SETTING: a shell."},
                                    *shown["trajectory"][1:]]}  # fmt: skip
    first, *others = read("swe-agent", [shown, as_text, plain, told], tmp_path)
    assert others == [first] * 3
    assert [role for role, _ in turns(first)] == ["system", "user", "assistant", "user"]
    assert read("swe-agent", [{**shown, "trajectory": "[{"}], tmp_path) == ["bad_json"]


def test_a_question_with_choices_begins_with_capitals(tmp_path: Path) -> None:
    row = shown_row("math-qa")
    assert read("math-qa", [{key.lower(): value for key, value in row.items()}], tmp_path) == ["malformed"]


@pytest.mark.parametrize(
    ("name", "subset", "split"),
    [
        ("hermes-kimi", "kimi", "train"),
        ("opencodeinstruct", "train", "train"),
        ("mixture-of-thoughts", "all", "train"),
        ("openthoughts", "default", "train"),
        ("ultrachat", None, "train_sft"),
        ("swe-smith", None, "tool"),
        ("coderforge", "trajectories", "SWE_Rebench"),
        ("openhands-sft", None, "train.success.oss"),
        ("gsm8k", "main", "train"),
    ],
)
def test_splits_and_subsets_that_are_not_the_usual_ones(name: str, subset: str | None, split: str) -> None:
    hub = ADAPTERS[name].hub
    assert (hub.subset, hub.split) == (subset, split)
