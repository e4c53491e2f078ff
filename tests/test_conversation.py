"""The normal form of conversations: what is understood, what is refused and why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie.conversation import REASONS, ROLES, Conversation, Reject, normalise, prompt_key

USER = {"role": "user", "content": "How are you?"}
ASSISTANT = {"role": "assistant", "content": "Well."}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}


def refused(raw: Any) -> str:
    with pytest.raises(Reject) as caught:
        normalise(raw)
    return caught.value.reason


def test_keys_and_roles_may_be_spelled_in_many_ways() -> None:
    raw = {
        "messages": [{"from": "human", "value": "a"}, {"role": "GPT", "text": "b"}, {"from": "User", "content": "c"}]
    }
    assert [m.to_dict() for m in normalise(raw).messages] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert set(ROLES.values()) == {"system", "user", "assistant", "tool"}


def test_an_empty_string_is_a_value_and_does_not_fall_through_to_another_key() -> None:
    assert refused({"messages": [{"role": "user", "content": "", "text": "not this"}]}) == "empty_content"


def test_columns_may_be_json_strings_and_arrow_nulls_go() -> None:
    tools = '[{"type": "function", "function": {"name": "f", "strict": null}}]'
    made = normalise({"messages": '[{"role": "user", "content": "a"}]', "tools": tools})
    assert made.tools == [{"type": "function", "function": {"name": "f"}}]
    assert made.messages[0].content == "a"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no_user_turn"),
        ([{"role": "system", "content": "s"}], "no_user_turn"),
        (None, "no_messages"),
        ("[{", "bad_json"),
        (7, "malformed"),
        (["hello"], "malformed"),
        ([{"role": "narrator", "content": "a"}], "unknown_role"),
        ([{"content": "a"}], "unknown_role"),
        ([{"role": "user", "content": "  \n"}], "empty_content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "non_text_part"),
        ([{"role": "user", "content": 5}], "malformed"),
        ([{"role": "user", "content": "\ud800"}], "bad_unicode"),
        ([USER, ASSISTANT, ASSISTANT], "bad_order"),
        ([USER, {"role": "system", "content": "x"}], "bad_order"),
        ([USER, {"role": "tool", "content": "x"}], "bad_order"),
        ([ASSISTANT], "no_user_turn"),
        ([{"role": "user", "content": "a", "tool_calls": [CALL]}], "malformed"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_reason(messages: Any, reason: str) -> None:
    assert refused({"messages": messages}) == reason


def test_a_call_without_text_and_its_result_are_legal() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    made = normalise({"messages": [USER, call, {"role": "function", "content": "1", "name": "f"}, ASSISTANT]})
    assert [m.role for m in made.messages] == ["user", "assistant", "tool", "assistant"]
    assert made.messages[1].tool_calls == [CALL]


def test_what_stands_before_the_first_user_turn_is_cut_but_the_system_message_stays() -> None:
    system = {"role": "system", "content": "s"}
    made = normalise({"messages": [system, ASSISTANT, USER, ASSISTANT]})
    assert [m.role for m in made.messages] == ["system", "user", "assistant"]


def test_text_parts_are_joined_and_line_ends_unified() -> None:
    parts = [{"type": "text", "text": "a\r\n"}, "b"]
    assert normalise({"messages": [{"role": "user", "content": parts}]}).messages[0].content == "a\nb"


def test_prompt_and_finished_conversation() -> None:
    made = normalise({"messages": [USER, ASSISTANT, USER]})
    assert len(made.as_prompt().messages) == 3
    assert len(made.as_finished().messages) == 2
    with pytest.raises(Reject, match="no_assistant_turn"):
        normalise({"messages": [USER]}).as_finished()


def test_the_id_depends_on_messages_and_tools_alone() -> None:
    one = normalise({"messages": [USER], "meta": {"a": 1}})
    assert one.id == normalise({"messages": [{"from": "human", "value": "How are you?"}]}).id
    assert len(one.id) == 16
    assert int(one.id, 16) >= 0
    assert one.id != normalise({"messages": [USER], "tools": [{"name": "f"}]}).id
    assert one.id != Conversation(()).id


def test_an_unlisted_reason_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Reject("whatever")
    assert all(text for text in REASONS.values())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_prompt_keys_are_blind_to_case_spacing_and_sentence_marks_but_not_to_code() -> None:
    assert prompt_key([user("What  is\nthe capital of France?")]) == prompt_key([user("what is the capital of france")])
    assert prompt_key([user("balance the brackets < and > here")]) != prompt_key(
        [user("balance the brackets ( and ) here")]
    )


def test_a_greeting_alone_names_no_conversation() -> None:
    first = [user("hello"), {"role": "assistant", "content": "hi"}, user("do you like strong coffee?")]
    second = [user("hello"), {"role": "assistant", "content": "hi"}, user("what do you do all day?")]
    assert prompt_key(first) != prompt_key(second)
    long = user("a question with quite a few words")
    assert prompt_key([long, user("x")]) == prompt_key([long, user("y")])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.strip() != "")


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_normal_form_is_a_fixed_point(texts: list[str]) -> None:
    roles = ["user", "assistant"]
    made = normalise({"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]})
    again = normalise({"messages": [message.to_dict() for message in made.messages]})
    assert again == made
    assert again.id == made.id
