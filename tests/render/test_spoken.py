"""Served ids -> the message that stands in the context of the next turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyrie.conversation import Reject
from eyrie.render.renderer import Renderer
from eyrie.targets.selftest import Rendering
from tests.family_targets import family_target, kimi_target

USER = {"role": "user", "content": "What is one and one?"}
PROPERTIES = {
    "word": {"type": "string"},
    "n": {"type": "integer"},
    "often": {"type": ["boolean", "null"]},
    "of": {"anyOf": [{"type": "object"}, {"type": "array"}]},
    "free": {"description": "says no type"},
}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": PROPERTIES}}}
FAMILIES = ["chatml", "qwen3", "llama-3", "deepseek-r1", "deepseek-v3.1", "gpt-oss", "kimi-k2"]


def target(name: str, folder: Path) -> Renderer:
    if name == "kimi-k2":
        return Renderer(kimi_target(folder), None, Rendering(trust_remote_code=True))
    return Renderer(family_target(name, folder))


def call(word: str, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "lookup", "arguments": {"word": word, **others}}}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{key: value for key, value in made.items() if key != "id"} for made in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


# what the fixtures' templates write; calls in the form of other families stand below
THINKERS = ["qwen3", "deepseek-r1", "deepseek-v3.1", "gpt-oss", "kimi-k2"]
ANSWERS: list[tuple[list[str], dict[str, Any]]] = [
    (FAMILIES, {"content": "Two."}),
    (FAMILIES, {"content": "Over,\n  two lines.\n\nThe end"}),
    (THINKERS, {"content": "Two.", "reasoning": "One and one.\n\nThat is it."}),
    (["qwen3", "llama-3", "kimi-k2"], {"content": "", "tool_calls": [call("a {b} \u4f60")]}),
    (["qwen3", "kimi-k2"], {"content": "", "reasoning": "Look it up.", "tool_calls": [call("a"), call("b")]}),
]


@pytest.mark.parametrize(("name", "answer"), [(name, answer) for names, answer in ANSWERS for name in names])
def test_what_the_template_wrote_is_read_back(name: str, answer: dict[str, Any], tmp_path: Path) -> None:
    renderer = target(name, tmp_path / name)
    message = {"role": "assistant", **answer}
    row = renderer.last_turn([USER, message])
    assert not isinstance(row, Reject)
    said = renderer.said(
        row.input_ids[: row.start], row.input_ids[row.start :], tools=[TOOL] if "tool_calls" in answer else None
    )
    assert without_ids(said) == message


@pytest.mark.parametrize(
    ("name", "text", "declared", "reason"),
    [
        ("qwen3", "<think>\nNever closed", False, "unparsed"),
        ("qwen3", "Two</think> after all", False, "unparsed"),
        ("qwen3", "<think>\na\n</think>\n\nb <think> c</think>", False, "unparsed"),
        ("qwen3", "<think>\na\n</think>\n\n", False, "empty_content"),
        ("qwen3", '<tool_call>\n{"name": "lookup", "arguments": }\n</tool_call>', True, "unparsed"),
        ("qwen3", '<tool_call>\n{"name": "lookup", "arguments": "no object"}\n</tool_call>', True, "unparsed"),
        ("qwen3", '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call> and text', True, "unparsed"),
        ("qwen3", "<tool_call>", True, "unparsed"),
        ("qwen3", "<tool_call>\n<function=lookup>\n<parameter=word>\na\n</function>\n</tool_call>", True, "unparsed"),
        ("qwen3", "<tool_call>\n<function=lookup>\n</function>\n</tool_call> and text", True, "unparsed"),
        (
            "deepseek-v3.1",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="lookup">\n'
            '<｜DSML｜parameter name="word">a</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            True,
            "unparsed",
        ),
        ("qwen3", "a <|im_start|> b", False, "unparsed"),
        ("gpt-oss", "no channel at all", False, "unparsed"),
        ("gpt-oss", "<|channel|>analysis<|message|>only thoughts<|end|>", False, "empty_content"),
        ("gpt-oss", '<|channel|>commentary to=functions.lookup<|message|>{"word": "a"}', False, "unparsed"),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>x", True, "unparsed"),
    ],
)
def test_what_is_not_understood_is_refused(name: str, text: str, declared: bool, reason: str, tmp_path: Path) -> None:
    renderer = target(name, tmp_path / name)
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    with pytest.raises(Reject) as caught:
        renderer.said([], ids, tools=[TOOL] if declared else None)
    assert caught.value.reason == reason


def test_a_call_without_declared_tools_is_text(tmp_path: Path) -> None:
    renderer = target("chatml", tmp_path / "t")
    text = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    assert renderer.said([], ids, tools=None) == {"role": "assistant", "content": text}
    (made,) = renderer.said([], ids, tools=[TOOL])["tool_calls"]
    assert made["function"] == {"name": "lookup", "arguments": {}}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (
            "llama-3",  # what Llama 3.1's template writes and the model answers: no mark at all
            '{"name": "lookup", "parameters": {"word": "a"}}',
            {"content": "", "tool_calls": [call("a")]},
        ),
        ("llama-3", '{"name": "Ada", "age": 36}', {"content": '{"name": "Ada", "age": 36}'}),
        (
            "llama-3",
            'Like {"name": "lookup", "parameters": {"word": "a"}}',
            {"content": 'Like {"name": "lookup", "parameters": {"word": "a"}}'},
        ),
        (
            "deepseek-r1",
            "<think>\nLook.\n</think>\n\nA moment.<｜tool▁calls▁begin｜>"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>lookup\n"
            '```json\n{"word": "a"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>lookup\n'
            '```json\n{"word": "b"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            {"content": "A moment.", "reasoning": "Look.", "tool_calls": [call("a"), call("b")]},
        ),
        (
            "deepseek-v3.1",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>lookup<｜tool▁sep｜>{"word": "a"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            {"content": "", "tool_calls": [call("a")]},
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.lookup "
            '<|constrain|>json<|message|>{"word": "a"}',
            {"content": "", "reasoning": "Look.", "tool_calls": [call("a")]},
        ),
        (
            "gpt-oss",
            "<|channel|>commentary<|message|>A moment.<|end|><|start|>assistant"
            ' to=functions.lookup<|channel|>commentary json<|message|>{"word": "a"}',
            {"content": "A moment.", "tool_calls": [call("a")]},
        ),
        (
            "qwen3",  # Qwen3-Coder and Qwen3.5
            "<think>\nLook.\n</think>\n\nA moment.\n\n<tool_call>\n<function=lookup>\n"
            "<parameter=word>\n12\n\n</parameter>\n"
            "<parameter=n>\n3\n</parameter>\n<parameter=often>\nTrue\n</parameter>\n"
            '<parameter=of>\n{"a": [1]}\n</parameter>\n<parameter=free>\n4\n</parameter>\n</function>\n</tool_call>\n'
            "<tool_call>\n<function=lookup>\n<parameter=word>\nb\n</parameter>\n<parameter=n>\nthree\n</parameter>\n"
            "</function>\n</tool_call>",
            {
                "content": "A moment.",
                "reasoning": "Look.",
                "tool_calls": [call("12\n", n=3, often=True, of={"a": [1]}, free="4"), call("b", n="three")],
            },
        ),
        (
            "qwen3",  # a function that was not declared
            "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
            {"content": "", "tool_calls": [{"type": "function", "function": {"name": "stop", "arguments": {}}}]},
        ),
        (
            "deepseek-v3.1",  # V3.2; V4 calls the block tool_calls
            'A moment.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="lookup">\n'
            '<｜DSML｜parameter name="word" string="true">1</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="n" string="false">[2, null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="lookup">\n<｜DSML｜parameter name="word" string="true">b</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            {"content": "A moment.", "tool_calls": [call("1", n=[2, None]), call("b")]},
        ),
    ],
)
def test_calls_as_published_models_write_them(name: str, text: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    renderer = target(name, tmp_path / name)
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    assert renderer.said([], ids, tools=[TOOL]) == {"role": "assistant", **wanted}


@pytest.mark.parametrize(
    "parameters",
    [None, "none", [], {}, {"properties": []}, {"properties": {"n": "integer"}}, {"properties": {"n": {"type": [{}]}}},
     {"properties": {"n": {"anyOf": {"type": "integer"}}}}],
)  # fmt: skip
def test_a_declaration_that_says_nothing_of_an_argument_leaves_it_text(parameters: Any, tmp_path: Path) -> None:
    """Datasets declare tools in every way; none may end the stage."""
    renderer = target("qwen3", tmp_path)
    tool = {"type": "function", "function": {"name": "lookup", "parameters": parameters}}
    text = "<tool_call>\n<function=lookup>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    (made,) = renderer.said([], ids, tools=[tool])["tool_calls"]
    assert made["function"]["arguments"] == {"n": "3"}
