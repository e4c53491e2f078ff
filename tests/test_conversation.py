"""The normal form of conversations: what is understood, what is refused and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.conversation import REASONS, ROLES, Conversation, Reject, normalise, prompt_key
from eyrie.markers import TAGS

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


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": content, **more}]}


def split(raw: dict[str, Any]) -> tuple[str | None, str]:
    message = normalise(raw).messages[-1]
    return message.reasoning, message.content


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (answer("<think>\na\n</think>\n\nb"), ("a", "b")),
        (answer(" <think>a</think>b"), ("a", "b")),
        (answer("<think></think>b"), (None, "b")),
        (answer("<think>\n\n</think>b"), (None, "b")),
        (answer("b", reasoning_content="a"), ("a", "b")),
        (answer("b", reasoning="a"), ("a", "b")),
        (answer("b", reasoning_content=""), (None, "b")),
        (answer("<think>a</think>b", reasoning_content="a"), ("a", "b")),
        (answer("<think></think>b", reasoning_content="a"), ("a", "b")),
        (
            answer("<|begin_of_thought|>\n\na\n\n<|end_of_thought|>\n\n<|begin_of_solution|>b<|end_of_solution|>\n"),
            ("a", "b"),
        ),
        (answer("if a < b: print('<thinking>')"), (None, "if a < b: print('<thinking>')")),
    ],
)
def test_reasoning_has_a_field_of_its_own(raw: dict[str, Any], expected: tuple[str | None, str]) -> None:
    assert split(raw) == expected


@pytest.mark.parametrize(
    "content",
    [
        "<think>never closed",
        "never opened</think>b",
        "<think>a</think>b</think>c",
        "<think>a<think>b</think>c",
        "text first <think>a</think>b",
        "<|begin_of_thought|>a<|end_of_thought|>b",
        "<|begin_of_solution|>b<|end_of_solution|>",
        "<|begin_of_thought|>a<|end_of_thought|><|begin_of_solution|>b",
        "<|begin_of_thought|>a<|end_of_thought|>x<|begin_of_solution|>b<|end_of_solution|>",
        "<|begin_of_thought|>a<|end_of_thought|><|begin_of_solution|>b<|end_of_solution|>x",
        "<think>a</think><|begin_of_solution|>b<|end_of_solution|>",
    ],
)
def test_marks_without_their_partner_refuse_the_row(content: str) -> None:
    assert refused(answer(content)) == "unpaired_markers"
    assert normalise({"messages": [{"role": "user", "content": content}]}).messages[0].content == content


def test_two_different_reasonings_refuse_the_row() -> None:
    assert refused(answer("<think>a</think>b", reasoning="c")) == "unpaired_markers"
    assert refused(answer("<think>all of it</think>")) == "empty_content"
    assert refused({"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}) == "malformed"


def called(calls: Any) -> list[dict[str, Any]] | None:
    return normalise(answer("x", tool_calls=calls)).messages[-1].tool_calls


def test_tool_calls_have_one_form() -> None:
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"a": {"b": [1, None]}}}}]
    arguments = {"a": {"b": [1, None], "padding": None}, "more": None}
    function = {"name": "f", "arguments": json.dumps(arguments)}
    for calls in (
        [{"function": function}],
        [{"function": {"name": "f", "arguments": arguments}, "id": None, "type": "function"}],
        [{"function": json.dumps(function)}],
        [{"name": "f", "arguments": arguments}],
        json.dumps([{"function": function}]),
        [json.dumps({"function": function})],
    ):
        assert called(calls) == expected
    assert normalise(answer(None, function_call=function)).messages[-1].tool_calls == expected
    assert called([]) is called(None) is called("") is called("[]") is None
    without = called([{"function": {"name": "f", "arguments": None}}])
    assert without == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("[{", "bad_json"),
        (3, "malformed"),
        ({"name": "f"}, "malformed"),
        ([3], "malformed"),
        ([{"function": {"arguments": "{}"}}], "malformed"),
        ([{"function": {"name": "f", "arguments": "{'a': 1}"}}], "bad_json"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], "malformed"),
        ([{"function": {"name": "f", "arguments": '{"a": NaN}'}}], "bad_json"),
        ([{"function": {"name": "f", "arguments": "[" * 100_000}}], "bad_json"),
        ([{"function": {"name": "f", "arguments": '{"a": ' + "9" * 5000 + "}"}}], "bad_json"),
        ([{"type": "custom", "name": "f"}], "malformed"),
    ],
)
def test_tool_calls_that_are_not_understood(calls: Any, reason: str) -> None:
    assert refused(answer("x", tool_calls=calls)) == reason


def test_declared_tools_have_one_form() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "enum": None}}}}
    clean = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    expected = [{"type": "function", "function": clean}]
    for tools in (
        [{"type": "function", "function": function}],
        [function],
        [{"type": "function", **function}],
        [json.dumps(function)],
        [{"name": "f", "parameters": json.dumps(function["parameters"])}],
        json.dumps([{"type": "function", "function": json.dumps(function)}]),
    ):
        assert normalise({"messages": [USER], "tools": tools}).tools == expected
    for nothing in (None, [], "", "[]", "null"):
        assert normalise({"messages": [USER], "tools": nothing}).tools is None
    for tools, reason in (("[{", "bad_json"), ({"name": "f"}, "malformed"), ([{}], "malformed"), ("None", "bad_json")):
        assert refused({"messages": [USER], "tools": tools}) == reason


def test_results_keep_the_id_of_their_call() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "1", "tool_call_id": "a"}
    made = normalise({"messages": [USER, call, result]})
    assert made.messages[-1].tool_call_id == "a"
    assert made.messages[0].tool_call_id is None
    assert refused({"messages": [USER, call, {"role": "tool", "content": {"a": 1}}]}) == "malformed"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}, "text": None}]},
        {"role": "user", "content": "<image> what is it?", "images": ["x.png"]},
    ],
)
def test_images_are_refused(message: dict[str, Any]) -> None:
    assert refused({"messages": [message]}) == "non_text_part"


def test_images_beside_the_messages_are_refused_and_empty_columns_are_not() -> None:
    assert refused({"messages": [USER], "images": ["x.png"]}) == "non_text_part"
    padded = {"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}], "images": []}
    assert normalise({"messages": [padded], "images": None}).messages[0].content == "a"


def test_arrow_may_give_one_list_per_key() -> None:
    made = normalise({"messages": {"from": ["human", "gpt"], "value": ["a", "b"]}})
    assert [(m.role, m.content) for m in made.messages] == [("user", "a"), ("assistant", "b")]
    assert refused({"messages": {"from": ["human"], "value": []}}) == "malformed"


def test_nesting_without_end_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert refused({"messages": [USER], "tools": [{"name": "f", "parameters": deep}]}) == "malformed"


MARKED = st.sampled_from(
    [
        "<think>", "</think>", "<|begin_of_thought|>", "<|end_of_thought|>", "<|begin_of_solution|>",
        "<|end_of_solution|>", "<|im_end|>", "<|im_user|>user", "<|endoftext|>", "\r\n", "\r\r\n", "\n", " ", "\x00",
        "\ue000", "\ud800", "[{", "null", "a", "\u2028",
    ]
)  # fmt: skip
TEXT = st.one_of(st.text(max_size=8), st.lists(MARKED, max_size=6).map("".join))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
ROLE = st.sampled_from([*ROLES, "Human", " GPT ", "narrator", "model"])
PART = st.one_of(
    TEXT, st.fixed_dictionaries({"type": st.sampled_from(["text", "image", None]), "text": st.none() | TEXT})
)
CONTENT = st.one_of(TEXT, st.none(), st.lists(PART, max_size=3), JSON)
FUNCTION = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "", None])},
    optional={"arguments": st.one_of(JSON, JSON.map(json.dumps), st.dictionaries(TEXT, JSON, max_size=2))},
)
CALLS = st.one_of(
    st.none(),
    st.lists(st.one_of(FUNCTION, st.fixed_dictionaries({"id": st.none() | TEXT, "function": FUNCTION})), max_size=2),
    JSON,
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": ROLE, "content": CONTENT}),
    st.fixed_dictionaries({"from": ROLE, "value": CONTENT}, optional={"weight": JSON}),
    st.fixed_dictionaries(
        {"role": st.just("assistant")},
        optional={
            "content": CONTENT,
            "reasoning_content": st.none() | TEXT,
            "tool_calls": st.one_of(CALLS, CALLS.map(json.dumps)),
        },
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "text": TEXT, "tool_call_id": st.none() | TEXT}),
    JSON,
)
PLAIN = st.lists(TEXT, min_size=1, max_size=4).map(
    lambda texts: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
)
SAID = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), TEXT).map("x{}".format)
ANSWER = st.one_of(
    SAID.map(lambda text: {"content": text}),
    st.builds(lambda a, b: {"value": f"<think>{a}</think>{b}"}, SAID, SAID),
    st.builds(lambda a, b: {"content": b, "reasoning_content": a}, SAID, SAID),
    st.builds(lambda a: {"text": a}, st.lists(SAID, min_size=1, max_size=3)),
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b"]), JSON, max_size=2)
CALLED = st.lists(
    st.builds(
        lambda arguments, flat: (
            {"name": "f", "arguments": arguments}
            if flat
            else {"id": "c", "function": {"name": "f", "arguments": json.dumps(arguments)}, "index": None}
        ),
        ARGUMENTS,
        st.booleans(),
    ),
    min_size=1,
    max_size=2,
)
EXCHANGE = st.builds(
    lambda asked, calls, result, said: [
        {"from": "Human", "value": asked},
        *([{"role": "assistant", "content": None, "tool_calls": calls}] if calls else []),
        *([{"role": "observation", "content": result, "tool_call_id": "c"}] if calls else []),
        {"role": "gpt", **said},
    ],
    SAID,
    st.none() | CALLED,
    TEXT,
    ANSWER,
)
CHAT = st.lists(EXCHANGE, min_size=1, max_size=3).map(lambda exchanges: [turn for part in exchanges for turn in part])
ROW = st.fixed_dictionaries(
    {"messages": st.one_of(CHAT, CHAT, PLAIN, st.lists(MESSAGE, max_size=5), JSON)},
    optional={"tools": st.one_of(st.lists(FUNCTION, max_size=2), JSON.map(json.dumps))},
)


@settings(max_examples=400, deadline=None)
@given(ROW)
def test_a_row_is_refused_for_a_listed_reason_or_its_normal_form_is_a_fixed_point(raw: dict[str, Any]) -> None:
    try:
        made = normalise(raw)
    except Reject:  # an unlisted reason is a KeyError, see above
        return
    stored = json.loads(json.dumps(made.to_row(0), ensure_ascii=False).encode())
    again = normalise(stored)
    assert again == made
    assert again.id == made.id == stored["id"]
    assert made.messages[-1].role in set(ROLES.values())
    assert next(message.role for message in made.messages if message.role != "system") == "user"
    for message in made.messages:
        assert "\r\n" not in message.content
        assert message.role != "assistant" or not any(tag in message.content for tag in TAGS)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_conversations_are_kept_as_they_are(messages: list[dict[str, str]]) -> None:
    texts = "".join(message["content"] for message in messages)
    odd = any(tag in texts for tag in TAGS) or "\r\n" in texts or any("\ud800" <= c <= "\udfff" for c in texts)
    if odd or not all(message["content"].strip() for message in messages):
        return
    assert [message.to_dict() for message in normalise({"messages": messages}).messages] == messages
