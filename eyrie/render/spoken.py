"""The text of a served answer -> the message that stands in the context of the next turn.

A server's parsers do this for its clients; here it is done from the served ids, so that it is the same for every
engine. What a family's answers look like is data (``think``, ``calls``, ``channels`` in ``eyrie/targets/families``).
Text that is not understood is refused: a guess would put words into the target's mouth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from eyrie.conversation import Reject
from eyrie.targets.family import Calls, Family, Listed, Think

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
"""Templates that write an argument as text write these for JSON's own names, and targets learn it from them."""


def message_of(text: str, family: Family, *, think: Think | None, opened: bool, tools: Tools) -> Message:
    """``role``, ``content`` and, where there are any, ``reasoning`` and ``tool_calls`` (arguments parsed, no ids).

    Args:
        text: the answer with its control strings, the one that ended it left out.
        think: the family's think block, where this tokenizer has its tokens.
        opened: the prompt ended inside a think block.
        tools: the declared tools. Without any a call is text like any other.

    Raises:
        Reject: ``unparsed``, or ``empty_content`` for an answer that says nothing.
    """
    calls: list[Message] = []
    if family.channels:
        reasoning, content, calls = _channels(text, family.channels, bool(tools))
    else:
        reasoning, content = _thought(text, think, opened)
        if tools and family.calls:
            content, calls = _called(content, family.calls, tools)
    if not content.strip() and not calls:
        raise Reject("empty_content", "assistant")
    message: Message = {"role": "assistant", "content": content}
    if reasoning.strip():
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _thought(text: str, think: Think | None, opened: bool) -> tuple[str, str]:
    """Reasoning, and what stands behind it; line feeds beside the think tokens belong to them."""
    if think is None:
        return "", text
    body = text if opened else text.lstrip()
    if not opened and not body.startswith(think.open):
        if think.open in body or think.close in body:
            raise Reject("unparsed", f"{think.open} or {think.close} inside the answer")
        return "", text
    reasoning, closed, content = body.removeprefix(think.open).partition(think.close)
    if not closed or any(token in reasoning + content for token in (think.open, think.close)):
        raise Reject("unparsed", f"{think.open} and {think.close} do not pair")
    return reasoning.strip("\n"), content.lstrip("\n")


def _called(text: str, calls: Calls, tools: Tools) -> tuple[str, list[Message]]:
    """What is said before the tool calls, and the calls; nothing but marks and white space may stand behind them."""
    marked = [at for mark in calls.marks if (at := text.find(mark)) >= 0]
    if not marked:
        bare = re.fullmatch(f"(?P<call>{calls.bare})", text.strip(), re.DOTALL) if calls.bare else None
        return ("", [_call(bare)]) if bare else (text, [])
    before, rest = text[: min(marked)], text[min(marked) :]
    pattern = re.compile(calls.pattern, re.DOTALL)
    made = [_call(found) for found in pattern.finditer(rest)]
    if calls.listed and not made:
        pattern = re.compile(calls.listed.pattern, re.DOTALL)
        made = [_listed(found, calls.listed, tools) for found in pattern.finditer(rest)]
    left = pattern.sub("", rest)
    for mark in calls.marks:
        left = left.replace(mark, "")
    if not made or left.strip():
        raise Reject("unparsed", f"a tool call that is none: {rest[:60]!r}")
    return before.rstrip("\n"), made


def _listed(found: re.Match[str], listed: Listed, tools: Tools) -> Message:
    """From a call whose arguments are written one by one."""
    argument = re.compile(listed.argument, re.DOTALL)
    if argument.sub("", found["text"]).strip():
        raise Reject("unparsed", f"a tool call with text beside its arguments: {found['text'][:60]!r}")
    name, arguments = found["name"], {}
    for one in argument.finditer(found["text"]):
        marked = one.groupdict().get("string")
        kinds = _kinds(tools, name, one["name"]) if marked is None else {"string"} if marked == "true" else set()
        arguments[one["name"]] = _value(one["text"], kinds)
    return _as_message(name, arguments)


def _kinds(tools: Tools, function: str, argument: str) -> set[str]:
    """The JSON types that a declaration allows for an argument; a string when it does not say."""
    for tool in tools or ():
        declared = tool.get("function") or tool
        if _at(declared, "name") == function:
            return _types(_at(declared, "parameters", "properties", argument)) or {"string"}
    return {"string"}


def _at(value: Any, *names: str) -> Any:
    """What stands under ``names`` in nested objects; None where there is none. Declarations are not checked."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _types(schema: Any) -> set[str]:
    named = _at(schema, "type")
    found = {kind for kind in [named, *_list(named)] if isinstance(kind, str)}
    choices = [part for key in ("anyOf", "oneOf") for part in _list(_at(schema, key))]
    return found.union(*map(_types, choices))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _value(text: str, kinds: set[str]) -> Any:
    """An argument's text, as servers read it: a string where one is allowed, else JSON where it is some."""
    if "string" in kinds:
        return text
    try:
        return json.loads(PYTHON_NAMES.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def _channels(text: str, pattern: str, tools: bool) -> tuple[str, str, list[Message]]:
    """Reasoning, content and calls of an answer that is a row of messages, each in a channel of its own."""
    said: dict[str, list[str]] = {}
    calls = []
    compiled = re.compile(pattern, re.DOTALL)
    if compiled.sub("", text).strip():
        raise Reject("unparsed", "text outside of every channel")
    for found in compiled.finditer(text):
        if name := found["name"] or found["first"]:
            calls.append(_call(found, name))
        else:
            said.setdefault(found["channel"], []).append(found["text"])
    if calls and not tools:
        raise Reject("unparsed", "a tool call, and no tools are declared")
    content = "".join(part for channel, parts in said.items() if channel != "analysis" for part in parts)
    return "".join(said.get("analysis", [])), content, calls


def _call(found: re.Match[str], name: str | None = None) -> Message:
    """From the groups ``name`` and ``text`` (JSON of the arguments), or ``call`` (JSON of both)."""
    groups = found.groupdict()
    try:
        if groups.get("call") is not None:
            whole = json.loads(groups["call"])
            name, arguments = whole.get("name"), whole.get("arguments", whole.get("parameters"))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        else:
            name, arguments = name or groups["name"], json.loads(groups["text"].strip() or "{}")
    except (ValueError, AttributeError, RecursionError) as error:
        raise Reject("unparsed", f"a tool call: {error}"[:160]) from None
    return _as_message(name, {} if arguments is None else arguments)


def _as_message(name: Any, arguments: Any) -> Message:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Reject("unparsed", "a tool call without a name, or with arguments that are no object")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
