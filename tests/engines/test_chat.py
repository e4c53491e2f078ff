"""Chat replies, whole or in pieces: what is read out of them, what they are worth, and what a history is sent as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyrie.config import Sampling
from eyrie.engines.base import Answer, Request
from eyrie.engines.chat import Reply, answer_of, to_openai
from eyrie.engines.hire import encoder
from eyrie.render.renderer import Renderer
from tests.family_targets import family_target
from tests.generate_desk import STOP


def test_reasoning_and_tool_calls_reach_the_template() -> None:
    seen: list[dict[str, Any]] = []

    def encode(request: Request, message: dict[str, Any]) -> tuple[list[int], list[int]]:
        seen.append(message)
        return [1], [5, 6, STOP]

    reply = Reply()
    for delta in (
        {"reasoning": "let me "},
        {"reasoning_content": "see"},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"at": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "go", "arguments": ""}}]},
    ):
        reply.take({"choices": [{"delta": delta, "finish_reason": None}]})
    reply.take({"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": {"completion_tokens": 3}})
    answer = answer_of(reply, Request(0, [1], Sampling(), 0), encode, {})
    assert (answer.output_ids, answer.finish_reason) == ([5, 6, STOP], "stop")
    assert seen == [
        {
            "role": "assistant", "content": "", "reasoning": "let me see",
            "tool_calls": [
                {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"at": 1}}},
                {"type": "function", "id": "c2", "function": {"name": "go", "arguments": {}}},
            ],
        }
    ]  # fmt: skip


def worth(message: dict[str, Any], finish: str = "stop", *, max_tokens: int = 64, **more: Any) -> Answer:
    """What a chat reply is worth; text is encoded a character an id, reasoning first."""

    def encode(_: Request, said: dict[str, Any]) -> tuple[list[int], list[int]]:
        return [1], [*((said.get("reasoning") or "") + said["content"]).encode(), STOP]

    reply = Reply()
    reply.take({"choices": [{"message": message, "finish_reason": finish, **more}]})
    return answer_of(reply, Request(0, [1] * 500, Sampling(max_tokens=max_tokens), 0), encode, {})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize(
    ("content", "reasoning"),
    [
        ("One and one.</think>Two.", None),  # the parser is off, and the prompt had opened the block
        (None, "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"),
        ("", 'I look.\n<tool_call>{"name": "f"}</tool_call>'),
        (None, "One and one. It is two."),  # the closing tag was swallowed: where the answer begins nobody knows
    ],
)
def test_what_the_server_s_parsers_mixed_up_is_no_answer(content: str | None, reasoning: str | None, name: str) -> None:
    answer = worth({"content": content, name: reasoning})
    assert (answer.output_ids, answer.finish_reason) == ([], "unparsed")
    assert answer.facts["why"].startswith("unparsed: ")


def test_a_reasoning_may_talk_about_tags() -> None:
    answer = worth({"content": "Two.", "reasoning": "He quotes <think>."})
    assert answer.output_ids == [*b"He quotes <think>.Two.", STOP]


def test_an_answer_cut_in_its_reasoning_is_truncated_and_its_tokens_count() -> None:
    """Content is empty and the reasoning long; it is tokenize that leaves such rows out, unless it is told not to."""
    thought = "So I think, and think on, and"
    answer = worth({"content": "", "reasoning_content": thought}, "length")
    assert answer.finish_reason == "length"
    assert answer.output_ids == list(thought.encode())


@pytest.mark.parametrize(("finish", "kept"), [("stop", "stop"), ("length", "length")])
def test_the_finish_reason_alone_says_whether_an_answer_was_cut(finish: str, kept: str) -> None:
    """Neither an answer as long as max_tokens allows, nor a prompt longer than that, is a sign of it."""
    ids = [*b"four", STOP] if finish == "stop" else list(b"fours")
    answer = worth({"content": "x"}, finish, max_tokens=5, token_ids=ids)
    assert (answer.output_ids, answer.finish_reason) == (ids, kept)
    short = worth({"content": "x"}, finish, max_tokens=400, token_ids=[7, STOP])
    assert (short.output_ids, short.finish_reason) == ([7, STOP], kept)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_call_in_the_history_carries_its_reasoning_even_when_it_has_none(name: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    history = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "reasoning": "Once more.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "Done."},
    ]
    sent = to_openai(history, name)
    assert [message.get(name) for message in sent] == [None, "", None, "Once more.", None, None]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_text_is_encoded_as_the_targets_template_would_serve_it(tiny_target: Path) -> None:
    renderer = Renderer(tiny_target)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    request = Request(0, renderer.prompt_ids(messages), Sampling(max_tokens=64), 0, messages)
    said = "The capital of France is Paris."
    count = len(renderer.tokenizer.encode(said, add_special_tokens=False))
    for finish, tokens in (("stop", count + 1), ("length", count)):
        reply = Reply()
        reply.take({"choices": [{"message": {"content": said}, "finish_reason": finish}]})
        reply.take({"choices": [], "usage": {"completion_tokens": count}})
        answer = answer_of(reply, request, encoder(renderer.last_turn), {})
        assert answer.prompt_ids == request.prompt_ids
        assert len(answer.output_ids) == tokens
        assert renderer.decode(answer.output_ids) == said
        assert (answer.output_ids[-1] == 2) is (finish == "stop")


def test_a_reasoning_that_was_cut_is_not_closed(tmp_path: Path) -> None:
    """The template closes the block and ends the turn; the target had written neither."""
    renderer = Renderer(family_target("qwen3", tmp_path))
    messages = [{"role": "user", "content": "What is one and one?"}]
    thought = "<think>\nOne and one make"
    written = renderer.tokenizer.encode(thought, add_special_tokens=False)
    reply = Reply()
    message = {"content": "", "reasoning": thought.removeprefix("<think>\n")}
    reply.take({"choices": [{"message": message, "finish_reason": "length"}]})
    reply.take({"choices": [], "usage": {"completion_tokens": len(written)}})
    request = Request(0, renderer.prompt_ids(messages), Sampling(max_tokens=64), 0, messages)
    answer = answer_of(reply, request, encoder(renderer.last_turn), {})
    assert (answer.output_ids, answer.finish_reason) == (written, "length")
