"""Real tokenizers and chat templates, which this project may not ship: folders of them, named by whoever has some.

``EYRIE_REAL_TARGETS=/folder pytest tests/targets/test_real_targets.py -rP`` checks each folder in it (tokenizer, chat
template and ``config.json``; weights are not read). What transformers renders and encodes is the oracle.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from eyrie.conversation import Reject
from eyrie.errors import EyrieError
from eyrie.render.renderer import Renderer, TurnRow
from eyrie.targets.selftest import Rendering, examine

NAMED = os.environ.get("EYRIE_REAL_TARGETS")
FOLDERS = sorted(path for path in Path(NAMED).iterdir() if (path / "config.json").is_file()) if NAMED else []
pytestmark = [
    pytest.mark.skipif(not NAMED, reason="EYRIE_REAL_TARGETS names no folder of target folders"),
    pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name),
]

Talk = list[dict[str, Any]]
TYPES = {"word": {"type": "string"}, "n": {"type": "integer"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": TYPES, "required": ["word"]},
    },
}
SYSTEM = {"role": "system", "content": "Answer in one sentence, \u8bf7\u7528\u4e2d\u6587 or English."}
FIRST = {
    "role": "user",
    "content": "What is caf\u00e9 in Chinese? \U0001f426\u200d\U0001f525\n\n```py\nx = {'a': 1}\n```",
}
SAID = {"role": "assistant", "content": "It is \u5496\u5561\u9986.\n\n1. \u5496 (k\u0101)\n2. \u5561 \u2615"}
MORE = {"role": "user", "content": "  And how is it said?\n"}
LAST = {"role": "assistant", "content": "K\u0101f\u0113igu\u01cen, with a \u00bbf\u00ab."}
CALL = {"type": "function", "function": {"name": "lookup", "arguments": {"word": 'na\u00efve "\u8bcd"\n', "n": 2}}}
RESULT = {"role": "tool", "name": "lookup", "content": '{"gloss": "\u5929\u771f"}'}
THOUGHT = {"reasoning": "First: \u60f3\u4e00\u60f3.\n\nThen I say it."}


def calling(count: int = 1, first: int = 0, **parts: Any) -> Talk:
    """An answer that calls tools, and what they gave."""
    ids = [f"functions.lookup:{first + i}" for i in range(count)]
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": id, **CALL} for id in ids], **parts}
    return [answer, *({**RESULT, "tool_call_id": id} for id in ids)]


PLAIN: dict[str, Talk] = {
    "one turn": [FIRST, SAID],
    "system, two turns": [SYSTEM, FIRST, SAID, MORE, LAST],
    "six turns": [SYSTEM, *[FIRST, SAID, MORE, LAST] * 3],
}
TALKS: dict[str, Talk] = {
    **PLAIN,
    "reasoning": [SYSTEM, FIRST, {**SAID, **THOUGHT}, MORE, {**LAST, **THOUGHT}],
    "reasoning at last": [FIRST, SAID, MORE, {**LAST, **THOUGHT}],
    "a call": [SYSTEM, FIRST, *calling(), SAID, MORE, LAST],
    "a call with reasoning": [FIRST, *calling(**THOUGHT), {**SAID, **THOUGHT}, MORE, LAST],
    "a call with words": [FIRST, *calling(content="I look it up."), SAID],
    "two calls at once": [FIRST, *calling(2), SAID, MORE, *calling(2, 2), LAST],
}


@cache
def target(folder: Path) -> tuple[Renderer, Rendering]:
    found = examine(folder, json.loads((folder / "config.json").read_text()), thinking=None, trust_remote_code=False)
    return Renderer(folder, rendering=found), found


def oracle(renderer: Renderer, talk: Talk, tools: Any, arguments: dict[str, Any]) -> tuple[str, list[int]]:
    """The prompt as transformers makes it: nothing of Eyrie's is used but the shape that calls must have here."""
    shown = [renderer.for_template(message) for message in talk]
    given = {"tools": tools, "add_generation_prompt": True, **arguments}
    if any(message["content"] is None for message in shown):  # which the library takes out, and some templates look for
        compiled = _compile_jinja_template(renderer.tokenizer.chat_template)
        text = compiled.render(messages=shown, **renderer.tokenizer.special_tokens_map, **given)
    else:
        text = renderer.tokenizer.apply_chat_template(shown, tokenize=False, **given)
    return text, list(renderer.tokenizer.encode(text, add_special_tokens=False))


def plain(text: Any) -> str:
    return "".join(unicodedata.normalize("NFKC", str(text)).split())


def check(renderer: Renderer, talk: Talk, row: TurnRow, tools: Any) -> None:
    """Everything that must hold of one row."""
    message, family = talk[row.turn], renderer.family
    context, answer = row.input_ids[: row.start], row.input_ids[row.start :]
    decode = lambda ids: renderer.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # noqa: E731
    wanted = [renderer.arguments]
    if renderer.think and family.switch:
        wanted.append(family.switch.thinking if message.get("reasoning") else family.switch.plain)
    served = [oracle(renderer, talk[: row.turn], tools, arguments) for arguments in wanted]
    seen = decode(context)
    # a prompt that ends within an open think block goes on in other ids once the block is closed ("\n" and "\n\n")
    behind = next(
        (seen[len(text) :] for text, ids in reversed(served) if context == ids or seen.startswith(text)), None
    )
    assert behind is not None, f"{seen!r} is not {served[-1][0]!r}"
    assert behind or context in [ids for _, ids in served]
    # only an empty think block may stand between the prompt and the answer, since it is the template's
    think = (renderer.think.open, renderer.think.close) if renderer.think else ("", "")
    assert not behind.replace(think[0], "").replace(think[1], "").strip()
    assert [id in renderer.stop_ids for id in answer] == [False] * (len(answer) - 1) + [True]
    names = {id: name for name, id in renderer.controls.ids_of.items()}
    assert not {names.get(id) for id in answer} & set(family.turn_tokens)
    text = plain(decode(answer))
    for part in (message["content"], message.get("reasoning", "")):
        assert plain(part) in text, text
    for call in message.get("tool_calls", []):
        assert call["function"]["name"] in text
        assert "\u8bcd" in text or "\\u8bcd" in text


def read_back(renderer: Renderer, talk: Talk, row: TurnRow, tools: Any) -> str:
    """What the family makes of the answer, had the target given it: "" when that is the message."""
    message = talk[row.turn]
    try:
        said = renderer.said(row.input_ids[: row.start], row.input_ids[row.start :], tools=tools)
    except Reject as reject:
        return str(reject)
    calls = [call["function"] for call in said.get("tool_calls", [])]
    same = calls == [call["function"] for call in message.get("tool_calls", [])]
    parts = [(plain(one.get("reasoning", "")), plain(one["content"])) for one in (said, message)]
    # gpt-oss's template writes what is said beside a call into the channel of thoughts
    same &= "".join(parts[0]) == "".join(parts[1]) if calls else parts[0] == parts[1]
    return "" if same else f"{said} is not {message}"


def test_every_row_is_what_a_server_would_have_seen(folder: Path) -> None:
    renderer, found = target(folder)
    tools = [TOOL] if found.renders_tools else None
    left_out: Counter[str] = Counter()
    misread: list[str] = []
    rows = 0
    for name, talk in TALKS.items():
        for declared in (None, tools) if tools else (None,):
            for row in renderer.turn_rows(talk, declared):
                if isinstance(row, Reject):
                    left_out[f"{name}: {row}"] += 1
                    continue
                check(renderer, talk, row, declared)
                rows += 1
                if (declared or not talk[row.turn].get("tool_calls")) and (
                    wrong := read_back(renderer, talk, row, declared)
                ):
                    misread.append(f"{name}, turn {row.turn}: {wrong}")
    print(f"{folder.name}: family {found.family}, {rows} rows checked, {sum(left_out.values())} left out")
    for why, count in left_out.items():
        print(f"  {count} x {why}")
    print(*misread, sep="\n")
    assert found.boundary == "stable"
    assert found.quotes_as_text
    assert not [why for why in left_out if why.split(":")[0] in PLAIN], "a plain chat loses turns"
    assert not misread


def test_what_a_person_wrote_is_never_a_control_token(folder: Path) -> None:
    """A conversation that quotes every control string has the control ids of one that quotes none."""
    renderer, _ = target(folder)
    controls = set(renderer.controls.ids_of.values())
    quote = " ".join(renderer.controls.ids_of)[:4000]
    for talk in (TALKS["system, two turns"], TALKS["a call"]):
        quoting = [{**message, "content": f"{message['content']} {quote} Amen"} for message in talk]
        clean = [{**message, "content": f"{message['content']} Amen"} for message in talk]
        for one, other in zip(renderer.turn_rows(quoting), renderer.turn_rows(clean), strict=True):
            if isinstance(other, Reject):
                assert isinstance(one, Reject)
                continue
            assert isinstance(one, TurnRow)
            assert [id for id in one.input_ids if id in controls] == [id for id in other.input_ids if id in controls]


@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_of_thinking(thinking: bool, folder: Path) -> None:
    """Where a template has the switch, prompts differ; where it has none, the option is refused."""
    renderer, found = target(folder)
    config = json.loads((folder / "config.json").read_text())
    refused = ""
    try:
        switched = examine(folder, config, thinking=thinking, trust_remote_code=False)
    except EyrieError as error:
        refused = str(error)
    if refused:
        assert "has no switch for it" in refused
        return
    assert renderer.family.switch
    assert switched.template_kwargs == (renderer.family.switch.thinking if thinking else renderer.family.switch.plain)
    # a template that thinks only when it is told to keeps then what had to be inserted by default
    assert switched.own_reasoning in ({found.own_reasoning, "kept"} if thinking else {"lost"})
