"""Rows of long conversations, taken from one run of the template, against rows that are rendered turn by turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.conversation import Reject
from eyrie.render.chat_template import Template
from eyrie.render.prefixes import Watched
from eyrie.render.renderer import MANY_TURNS, Renderer, TurnRow
from tests.family_targets import FAMILIES, family_target
from tests.render.test_render_property import PLANS, Plan, base, under

__all__ = ["base"]  # a fixture

HEAD = "<|im_start|>{{ m.role }}\n"
PLAIN = "{% for m in messages %}" + HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}"
# Templates whose last turn, or whose end, is another than that of the turns before.
HOSTILE = {
    "last in capitals": PLAIN.replace("m.content", "m.content | upper if loop.last else m.content"),
    "counts": "{{ messages | length }}" + PLAIN,
    "counts later": PLAIN.replace("<|im_end|>", "{{ messages | length if loop.index == 5 }}<|im_end|>"),
    "looks at the fifth": PLAIN.replace("<|im_end|>", "{{ '!' if loop.index == 5 and loop.last }}<|im_end|>"),
    "reads the sixth": PLAIN.replace("<|im_end|>", "{{ messages[5].role if loop.index == 5 }}<|im_end|>"),
    "looks, then calls": PLAIN.replace("<|im_end|>", "{% if loop.last %}{% endif %}{{ m.tool_calls }}<|im_end|>"),
    "ends with the last words": PLAIN + "<|im_start|>user\n{{ messages[-1].content }}<|im_end|>\n",
    "in a macro": "{% macro all(messages) %}" + PLAIN + "{% endmacro %}{{ all(messages) }}",
    "system apart": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}"
    "{% endif %}" + PLAIN,
    "backwards": "{% for m in messages[::-1] %}{{ m.content[:1] }}{% endfor %}" + PLAIN,
    "long ones as JSON": "{% if messages[2] is defined %}{{ messages | tojson }}{% endif %}" + PLAIN,
    "refuses long ones": "{% if messages | length > 7 %}{{ raise_exception('long') }}{% endif %}" + PLAIN,
    "refuses a ninth": PLAIN.replace("<|im_end|>", "{{ raise_exception('9') if loop.index > 9 else '' }}<|im_end|>"),
    "refuses other words": PLAIN.replace("<|im_end|>", "{{ raise_exception('!') if 'so on' in m.content else '' }}"
                                         "<|im_end|>"),
}  # fmt: skip
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

WORDS = st.sampled_from(["a", "a", "ok", "and so on", "\n", " x ", "<|im_end|>", "<think>", "</think>", "你好"])
TEXT = st.lists(WORDS, min_size=1, max_size=3).map("".join).filter(str.strip)


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(MANY_TURNS, MANY_TURNS + 4))):
        messages.append({"role": "user", "content": draw(TEXT)})
        if draw(st.integers(0, 3)) == 0:
            call = {"type": "function", "function": {"name": "lookup", "arguments": {"word": draw(TEXT)}}}
            messages.append({"role": "assistant", "content": draw(TEXT), "tool_calls": [{**call, "id": "call_1"}]})
            messages.append({"role": "tool", "content": draw(TEXT)})
        answer = {"role": "assistant", "content": draw(TEXT)}
        messages.append({**answer, "reasoning": draw(TEXT).strip()} if draw(st.booleans()) else answer)
    return messages


def outcomes(renderer: Renderer, messages: list[dict[str, Any]], *, turn_by_turn: bool = False) -> list[Any]:
    """Ids and starts of the rows, reasons and details of the rejects."""
    with pytest.MonkeyPatch.context() as patch:
        if turn_by_turn:
            patch.setattr("eyrie.render.renderer.MANY_TURNS", len(messages))
        found = renderer.turn_rows(messages)
    return [(row.input_ids, row.start) if isinstance(row, TurnRow) else (row.reason, row.detail) for row in found]


@pytest.fixture(scope="module", params=[*FAMILIES, *HOSTILE])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("target")
    name = request.param
    if name in FAMILIES:
        return Renderer(family_target(name, folder))
    return Renderer(family_target("chatml", folder, HOSTILE[name] + PROMPT))


@settings(max_examples=12, deadline=None)
@given(talks())
def test_rows_are_those_of_rendering_turn_by_turn(renderer: Renderer, messages: list[dict[str, Any]]) -> None:
    assert renderer._template.direct
    assert outcomes(renderer, messages) == outcomes(renderer, messages, turn_by_turn=True)


@settings(max_examples=30, deadline=None)
@given(PLANS, talks())
def test_so_they_are_under_random_templates(base: Renderer, plan: Plan, messages: list[dict[str, Any]]) -> None:
    renderer = under(base, plan)
    messages = [{**message, "role": "user"} if message["role"] == "tool" else message for message in messages]
    assert outcomes(renderer, messages) == outcomes(renderer, messages, turn_by_turn=True)


def counted(renderer: Renderer, monkeypatch: pytest.MonkeyPatch, turns: int) -> int:
    """Messages that the template went over for a conversation of so many turns."""
    seen = 0
    pieces = Template.pieces

    def counting(self: Template, messages: Any, *others: Any) -> Any:
        nonlocal seen
        seen += len(messages._messages if isinstance(messages, Watched) else messages)
        return pieces(self, messages, *others)

    monkeypatch.setattr(Template, "pieces", counting)
    roles = ("user", "assistant")
    rows = renderer.turn_rows([{"role": roles[n % 2], "content": f"words {n}"} for n in range(2 * turns)])
    assert not any(isinstance(row, Reject) for row in rows)
    return seen


@pytest.mark.parametrize("family", ["chatml", "llama-3", "deepseek-v3.1"])
def test_a_hundred_turns_are_not_a_hundred_conversations(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(family_target(family, tmp_path))
    assert counted(renderer, monkeypatch, 100) < 6 * 200, "turn by turn it is 20,000"


def test_a_template_that_looks_ahead_is_run_for_each_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(family_target("qwen3", tmp_path))
    assert counted(renderer, monkeypatch, 20) > 20 * 20
