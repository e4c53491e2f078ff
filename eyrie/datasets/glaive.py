"""Glaive's function-calling conversations: two flat strings with markers."""

from __future__ import annotations

import json
import re
from typing import Any

from eyrie.conversation import Reject
from eyrie.datasets.registry import Source
from eyrie.datasets.schema import Row, chat, column, schema

END = "<|endoftext|>"
CALL = "<functioncall>"
ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
# A marker opens a turn at the start, behind an empty line, or behind an end of text; elsewhere it is part of a text.
TURN = re.compile(r"(?:\A\s*|\n[ \t]*\n\s*|<\|endoftext\|>\s*)(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*")
QUOTED = re.compile(r'"arguments"\s*:\s*\'(.*)\'\s*\}\s*\Z', re.DOTALL)
NAMED = re.compile(r'\A\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*\Z')
ESCAPED_APOSTROPHE = re.compile(r"(?<!\\)((?:\\\\)*)\\'")


@schema(
    "glaive",
    repo="glaiveai/glaive-function-calling-v2",
    revision="e7f4b6456019f5d8bcb991ef0dd67d8ff23221ac",
    licence="Apache-2.0",
    columns={"system": "SYSTEM: a sentence, then one JSON object per declared function", "chat": "all turns in one"},
)
def glaive(row: Row, _: Source) -> Row:
    """Conversations with function calls, their JSON arguments in single quotes.

    Functions that the system text declares become tools, and the sentence that introduces them goes, because a chat
    template writes its own. Calls get ids ``functions.<name>:<n>``, counted over the conversation; results name them.

        {"system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\\n{\\"name\\": \\"count\\", \\"description\\": \\"Count letters\\", \\"parameters\\": {\\"type\\": \\"object\\"}}",
         "chat": "USER: How long is 'it's'?\\n\\n\\nASSISTANT: <functioncall> {\\"name\\": \\"count\\", \\"arguments\\": '{\\"text\\": \\"it\\\\'s\\"}'} <|endoftext|>\\n\\n\\nFUNCTION RESPONSE: {\\"length\\": 4}\\n\\n\\nASSISTANT: Four characters. <|endoftext|>\\n\\n\\n"}
    """  # noqa: E501
    system, flat = row.get("system"), column(row, "chat")
    if not isinstance(flat, str) or not isinstance(system, str | None):
        raise Reject("malformed", "system and chat are no texts")
    text, tools = _declared((system or "").strip().removeprefix("SYSTEM:").strip())
    messages: list[Row] = [{"role": "system", "content": text}] if text else []
    pieces = TURN.split(flat)
    if pieces[0].strip():
        raise Reject("malformed", "text before the first marker")
    count = 0
    called: Row | None = None
    for marker, said in zip(pieces[1::2], pieces[2::2], strict=True):
        said = said.replace(END, "").strip()
        message: Row = {"role": ROLES[marker], "content": said}
        if marker == "ASSISTANT":
            called = None
            if CALL in said:
                before, inside = said.split(CALL, 1)
                function = _call(inside)
                called = {"id": f"functions.{function['name']}:{count}", "type": "function", "function": function}
                count += 1
                message.update(content=before.strip(), tool_calls=[called])
        elif marker == "FUNCTION RESPONSE" and called:
            message.update(tool_call_id=called["id"], name=called["function"]["name"])
        messages.append(message)
    return chat(messages, tools)


def _declared(system: str) -> tuple[str, list[Any] | None]:
    """The system text without declarations, and the functions that it declares as JSON objects in a row."""
    begin = system.find("{")
    if begin < 0:
        return system, None
    decoder, at, tools = json.JSONDecoder(strict=False), begin, []
    while at < len(system):
        try:
            tool, at = decoder.raw_decode(system, at)
        except (ValueError, RecursionError) as error:
            raise Reject("bad_json", f"declared function: {error}"[:200]) from None
        tools.append(tool)
        while at < len(system) and system[at] in " \t\r\n,":
            at += 1
    return "", tools


def _call(text: str) -> Row:
    """``{"name": ..., "arguments": '...'}`` with the arguments' JSON in single quotes, or bare."""
    quoted = QUOTED.search(text)
    if quoted:
        named = NAMED.match(text[: quoted.start()])
        if not named:
            raise Reject("bad_json", f"function call {text.strip()[:60]}")
        return {"name": named[1], "arguments": _json(quoted[1])}
    call = _json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise Reject("malformed", f"function call {text.strip()[:60]}")
    return {"name": call["name"], "arguments": call.get("arguments")}


def _json(text: str) -> Any:
    """JSON that may hold raw line ends, and apostrophes escaped as inside single quotes."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(ESCAPED_APOSTROPHE.sub(r"\1'", text), strict=False)
    except (ValueError, RecursionError) as error:
        raise Reject("bad_json", f"function call: {error}"[:200]) from None
