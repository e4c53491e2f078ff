"""Tool calls that a template takes in a form of its own, or drops without a word, and prompts that hold the day."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyrie.conversation import Reject
from eyrie.render.call_forms import PLAIN, CallForm, lost_of_calls
from eyrie.render.renderer import Renderer, TurnRow
from tests.family_targets import family_target

USER = {"role": "user", "content": "What is it?"}
CALL = {"type": "function", "function": {"name": "lookup", "arguments": {"word": "\u8bcd"}}}
ASKED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "uno"}
SAID = {"role": "assistant", "content": "It is one."}

# DeepSeek-V3's kind: calls are seen by a null content, their arguments joined to a string
NULL_AND_TEXT = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
# Llama's kind: the call alone; gpt-oss's: the first of several
FIRST_ALONE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{ '[' + f.name + ' ' + (f.arguments | tojson) + ']' }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
# gpt-oss's kind: the thoughts of a call stand there until an answer follows
THOUGHTS_UNTIL_ANSWERED = """{% set ns = namespace(done=false) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.done = true %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.tool_calls %}{{ '(' + m.reasoning + ') ' if m.reasoning and not ns.done else '' }}{{ '[' + m.tool_calls[0].function.name + ']' }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
DAY = """{% macro head() %}{{ 'Today is ' + strftime_now('%Y-%m-%d') + '.\\n' }}{% endmacro %}{{ head() }}"""


def rows(renderer: Renderer, talk: list[dict[str, Any]]) -> list[str]:
    """The answer of each row, or the reason and detail of its rejection."""
    decode = renderer.tokenizer.decode
    return [
        decode(row.input_ids[row.start :]) if isinstance(row, TurnRow) else str(row) for row in renderer.turn_rows(talk)
    ]


def test_calls_are_given_in_the_form_that_the_template_writes(tmp_path: Path) -> None:
    renderer = Renderer(family_target("chatml", tmp_path, NULL_AND_TEXT))
    assert renderer.call_form == CallForm(as_text=True, null_content=True)
    assert rows(renderer, [USER, ASKED, TOLD, SAID]) == [
        '[lookup {"word": "\u8bcd"}]<|im_end|>',
        "It is one.<|im_end|>",
    ]
    assert "[lookup" in renderer.tokenizer.decode(renderer.prompt_ids([USER, ASKED, TOLD]))


def test_words_beside_a_call_that_such_a_template_takes_for_the_answer_are_a_reject(tmp_path: Path) -> None:
    renderer = Renderer(family_target("chatml", tmp_path, NULL_AND_TEXT))
    first, second = rows(renderer, [USER, {**ASKED, "content": "I look it up."}, TOLD, SAID])
    assert first == "calls_dropped: turn 1: a call of lookup"
    assert second == "It is one.<|im_end|>"


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        ({**ASKED, "content": "I look it up."}, "what is said beside the calls"),
        ({**ASKED, "tool_calls": [CALL, CALL]}, "a call of lookup"),
    ],
)
def test_a_turn_that_is_rendered_in_part_is_a_reject(answer: dict[str, Any], lost: str, tmp_path: Path) -> None:
    renderer = Renderer(family_target("chatml", tmp_path, FIRST_ALONE))
    assert renderer.call_form == PLAIN
    assert rows(renderer, [USER, answer]) == [f"calls_dropped: turn 1: {lost}"]
    assert rows(renderer, [USER, ASKED]) == ['[lookup {"word": "\u8bcd"}]<|im_end|>']


def test_what_a_control_string_spells_is_not_said(tmp_path: Path) -> None:
    renderer = Renderer(family_target("chatml", tmp_path, FIRST_ALONE))
    assert rows(renderer, [USER, {**ASKED, "content": "im_end"}]) == [
        "calls_dropped: turn 1: what is said beside the calls"
    ]


def test_the_same_holds_where_the_boundary_is_found_in_the_ids(tmp_path: Path) -> None:
    """With a hint behind the generation prompt the finished turn does not continue it."""
    hinted = FIRST_ALONE.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\nSure: ' }}")
    assert hinted != FIRST_ALONE
    renderer = Renderer(family_target("chatml", tmp_path, hinted))
    assert rows(renderer, [USER, {**ASKED, "content": "I look."}]) == [
        "calls_dropped: turn 1: what is said beside the calls"
    ]


def test_a_template_without_calls_takes_them_as_they_are(tmp_path: Path) -> None:
    renderer = Renderer(family_target("chatml", tmp_path))
    assert renderer.call_form == PLAIN
    (row,) = renderer.turn_rows([USER, {**SAID, "tool_calls": [CALL]}])
    assert isinstance(row, Reject)
    assert row.reason == "calls_dropped"


def test_what_is_lost() -> None:
    message = {"content": "\ufb01ne ", "tool_calls": [CALL, CALL]}
    assert lost_of_calls("fi ne lookup lookup", message) == ""
    assert lost_of_calls("fine lookup", message) == "a call of lookup"
    assert lost_of_calls("lookup lookup", message) == "what is said beside the calls"
    assert lost_of_calls("", {"content": "fine"}) == ""


@pytest.mark.parametrize("own", [False, True])
def test_a_template_that_writes_the_day_writes_the_same_every_day(own: bool, tmp_path: Path) -> None:
    """A prompt that changed at midnight would give other rows, and other answers to one seed."""
    renderer = Renderer(family_target("chatml", tmp_path, DAY + FIRST_ALONE))
    assert renderer._template.direct
    renderer._template.direct = not own
    assert renderer.tokenizer.decode(renderer.prompt_ids([USER])).startswith("Today is 2025-01-01.\n")


def test_thoughts_that_leave_the_history_as_the_turn_ends_are_in_its_context(tmp_path: Path) -> None:
    """The answer is taken from the turn behind its question alone; what a server saw still had the thoughts."""
    renderer = Renderer(family_target("chatml", tmp_path, THOUGHTS_UNTIL_ANSWERED))
    talk = [USER, {**ASKED, "reasoning": "Look it up."}, TOLD, SAID]
    assert rows(renderer, talk) == ["(Look it up.) [lookup]<|im_end|>", "It is one.<|im_end|>"]
    last = renderer.last_turn(talk)
    assert isinstance(last, TurnRow)
    assert last.input_ids[: last.start] == renderer.prompt_ids(talk[:3])
    assert "(Look it up.)" in renderer.tokenizer.decode(last.input_ids[: last.start])
