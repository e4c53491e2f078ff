"""Conversations: messages in one normal form, and the closed list of reasons for which a row is left out.

Sources spell roles, keys and tool calls in many ways. :func:`normalise` maps what is known to the one form that is
stored, and refuses what is not: an unknown role may be the data's own voice or the target's, and a wrong guess trains
on the wrong tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from eyrie.markers import Unpaired, split_reasoning

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

REASONS = {
    # normalising a row of a source
    "malformed": "the row, a message or its content is not of a shape that the adapter knows",
    "no_messages": "the row holds no list of messages",
    "unknown_role": "a role that is none of the known names",
    "bad_json": "a column that should hold JSON does not parse",
    "unpaired_markers": "a reasoning or tool-call mark without its partner, or in a place where it means nothing",
    "bad_unicode": "text that is no valid Unicode (a lone surrogate)",
    "non_text_part": "an image or another part that a text-only target cannot read",
    "empty_content": "a message without text and without tool calls",
    "bad_order": "turns in an order that no chat has (two answers in a row, a tool result without a call)",
    "no_user_turn": "no user turn to answer",
    "no_assistant_turn": "a native conversation without an answer",
    "tool_turns": "tool calls in a dataset that drops tool declarations",
    "low_score": "scored below the adapter's min_score",
    "language": "not in the language asked for",
    "too_short": "fewer turns than asked for",
    "prompt_too_long": "longer than max_prompt_chars",
    "duplicate": "the same prompt stands earlier in this dataset",
    # asking an engine
    "refused": "the engine gave no answer: the prompt was refused or filtered, or failed again and again",
    "drifted": "the answer's text, encoded again, has another count of tokens than the engine billed",
    "unparsed": "the answer's text holds reasoning or tool calls that the server did not parse",
    # turns that stay unanswered because the conversation ended before them; the row keeps the answers it has
    "no_call": "tool results follow in the data, and the target called no tool",
    "other_call": "tool results follow in the data, and the target called other tools",
    "unexpected_call": "the target called a tool for which the data holds no result",
    # conversation -> token rows
    "truncated": "an answer cut by max_tokens",
    "too_long": "longer than tokenize.max_length",
    "no_supervised_tokens": "an answer of fewer than two tokens, whose first a drafter is never asked for",
    "unstable_boundary": "the chat template renders history differently once the turn is finished",
    "no_stop_id": "the rendered turn does not end with a stop id",
    "template_refused": "the chat template refuses the conversation",
    "reasoning_dropped": "the chat template drops the turn's reasoning",
    "calls_dropped": "the chat template drops tool calls of the turn, or what is said beside them",
    "reasoning_unwanted": "reasoning in a run whose target answers without it (target.thinking: false)",
    "broken_turn": "the rendered turn breaks a rule of the target's family (a turn token inside, an open think block)",
    "quoted_control": "quotes a control string, which this tokenizer cannot encode as text",
    "over_budget": "the shard's token budget is full",
    # merge
    "over_cap": "the dataset's token_cap is full",
    "cross_dataset_duplicate": "the same prompt stands in a dataset that comes earlier in the config",
    "held_out_prompt": "shares a long run of words with a prompt of the run's own test split",
    "benchmark_prompt": "shares its prompt, or a long run of its words, with a configured benchmark suite",
}

KEY_WORDS = 5  # a first turn with fewer words ("hello") names no conversation: later user turns join its key


CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
LINE_END = re.compile(r"\r+\n")
IMAGES = frozenset(
    {"images", "image", "videos", "audios"}
)  # keys of a message that hold what a text-only target cannot read


class Reject(Exception):
    """A row is left out; ``reason`` is a key of :data:`REASONS`, ``detail`` says what was found.

    ``row`` is the source's own row, where an adapter refused it before it had the shape of a conversation.
    """

    row: Any = None

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in REASONS:
            raise KeyError(f"{reason!r} is no reason in REASONS")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Message:
    """One turn.

    ``reasoning`` is text thought before ``content``. ``tool_calls`` are OpenAI-style, with parsed arguments:
    ``{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}``, the id only if the source has
    one; ``tool_call_id`` of a tool's result names the call that it answers.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As stored: absent fields are left out."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        for key in ("reasoning", "tool_calls", "tool_call_id", "name"):
            if (value := getattr(self, key)) is not None:
                row[key] = value
        return row


@dataclass(frozen=True)
class Conversation:
    """Messages in normal form, with the tools declared to the assistant and what the source says about the row."""

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        """16 hex digits that depend on messages and tools alone."""
        content: dict[str, Any] = {"messages": [message.to_dict() for message in self.messages]}
        if self.tools:
            content["tools"] = self.tools
        return hashlib.sha256(CANONICAL.encode(content).encode()).hexdigest()[:16]

    @property
    def chars(self) -> int:
        """Characters of all messages and tool declarations."""
        tools = len(json.dumps(self.tools, ensure_ascii=False)) if self.tools else 0
        return tools + sum(len(message.content) + len(message.reasoning or "") for message in self.messages)

    def to_row(self, index: int) -> dict[str, Any]:
        """The row of a prompt shard; ``index`` is the position in the source stream."""
        row: dict[str, Any] = {
            "id": self.id,
            "index": index,
            "messages": [message.to_dict() for message in self.messages],
        }
        if self.tools:
            row["tools"] = self.tools
        if self.meta:
            row["meta"] = self.meta
        return row

    def as_prompt(self) -> Conversation:
        """The part that a target is asked to answer: everything up to and with the last user turn."""
        last = max((i for i, message in enumerate(self.messages) if message.role == "user"), default=-1)
        if last < 0:
            raise Reject("no_user_turn")
        return self._until(last)

    def as_turns(self, count: int) -> Conversation:
        """The part that a target is asked to answer turn by turn: the first ``count`` user turns and what they led to.

        Tool results behind the last of them stay; an answer that nothing follows goes.
        """
        users = [i for i, message in enumerate(self.messages) if message.role == "user"]
        if not users:
            raise Reject("no_user_turn")
        end = users[count] if count < len(users) else len(self.messages)
        while self.messages[end - 1].role == "assistant":
            end -= 1
        return self._until(end - 1)

    def as_finished(self) -> Conversation:
        """The conversation up to and with its last answer."""
        last = max((i for i, message in enumerate(self.messages) if message.role == "assistant"), default=-1)
        if last < 0:
            raise Reject("no_assistant_turn")
        return self._until(last)

    def _until(self, last: int) -> Conversation:
        if last + 1 == len(self.messages):
            return self
        return Conversation(self.messages[: last + 1], self.tools, self.meta)


def normalise(raw: Any) -> Conversation:
    """A raw row ``{"messages": [...], "tools": ..., "meta": {...}}`` in normal form; the normal form of it is itself.

    Messages may spell ``role|from``, ``content|value|text`` and ``reasoning|reasoning_content``; an answer may carry
    its reasoning between marks (see :mod:`eyrie.markers`); content may be a list of text parts; messages, tools, tool
    calls and the arguments of a call may be JSON strings. Nulls inside tools and calls go: unified Arrow structs put
    every key of every row into all of them. Whatever stands before the first user turn, apart from one system message,
    is cut off.

    Raises:
        Reject: with the reason, for anything that is not understood.
    """
    if not isinstance(raw, dict):
        raise Reject("malformed", f"row is {type(raw).__name__}")
    try:
        messages = _ordered([_message(message) for message in listed(raw.get("messages"))])
        _refuse_images(raw)
        conversation = Conversation(tuple(messages), _tools(raw.get("tools")), raw.get("meta") or {})
        _check_json(conversation)
    except RecursionError:
        raise Reject("malformed", "nested too deeply") from None
    return conversation


def prompt_key(messages: Sequence[dict[str, Any]]) -> str:
    """16 hex digits of the conversation's opening, blind to case, spacing and the marks that end a sentence.

    The opening is the first user turn; while it has fewer than :data:`KEY_WORDS` words, the next user turn joins it,
    because a greeting is shared by conversations that have nothing else in common.
    """
    opening: list[str] = []
    words = 0
    for message in messages:
        if message["role"] != "user":
            continue
        opening.append(plain_text(message["content"]))
        words += len(opening[-1].split())
        if words >= KEY_WORDS:
            break
    return hashlib.sha256("\n".join(opening).encode()).hexdigest()[:16]


def plain_text(text: str) -> str:
    """``text`` compatibility-composed, case-folded, with single spaces and no sentence mark at its end."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".?!\u2026 ")


def parsed(value: Any) -> Any:
    """``value``, or what it holds when it is a JSON string; an empty string holds nothing."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # not JSON; a number of 5,000 digits; 10,000 brackets
        raise Reject("bad_json", str(error)[:200]) from None


def listed(value: Any) -> list[Any]:
    """The list of messages, also from a JSON string, or when Arrow gives it as one list per key."""
    value = parsed(value)
    if value is None:
        raise Reject("no_messages")
    if isinstance(value, dict) and value:
        columns = list(value.values())
        if all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
            return [dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True)]
    if not isinstance(value, list):
        raise Reject("malformed", f"messages is {type(value).__name__}")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise Reject("malformed", f"message is {type(raw).__name__}")
    spelled = _first(raw, "role", "from")
    role = ROLES.get(spelled.strip().lower()) if isinstance(spelled, str) else None
    if role is None:
        raise Reject("unknown_role", repr(spelled)[:60])
    _refuse_images(raw)
    calls = _calls(raw)
    content = _text(_first(raw, "content", "value", "text"))
    reasoning = _text(_first(raw, "reasoning", "reasoning_content"))
    if role == "assistant":
        content, reasoning = _unmarked(content, reasoning)
    elif calls or reasoning.strip():
        raise Reject("malformed", f"{'tool_calls' if calls else 'reasoning'} of a {role} message")
    if not content.strip() and not calls and role != "tool":
        raise Reject("empty_content", role)
    answered, name = raw.get("tool_call_id"), raw.get("name")
    return Message(
        role,
        content,
        reasoning if reasoning.strip() else None,
        calls,
        answered if role == "tool" and isinstance(answered, str) and answered else None,
        name if isinstance(name, str) and name else None,
    )


def _unmarked(content: str, reasoning: str) -> tuple[str, str]:
    """Content and reasoning of an answer, the reasoning that stands in the content taken out of it."""
    try:
        marked, content = split_reasoning(content)
    except Unpaired as error:
        raise Reject("unpaired_markers", str(error)) from None
    if marked is None or not marked.strip() or marked == reasoning.strip("\n"):
        return content, reasoning
    if reasoning.strip():
        raise Reject("unpaired_markers", "two different reasonings")
    return content, marked


def _calls(raw: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The message's tool calls in one form; ``function_call`` is the older name of a single one."""
    calls = parsed(raw.get("tool_calls")) or None
    if calls is None and (single := parsed(raw.get("function_call"))):
        calls = [single]
    if calls is None:
        return None
    if not isinstance(calls, list):
        raise Reject("malformed", f"tool_calls is {type(calls).__name__}")
    return [_call(parsed(call)) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = parsed(call.get("function")) if isinstance(call, dict) else None
    function = call if function is None else function
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or call.get("type") not in {None, "function"}:
        raise Reject("malformed", f"tool call {str(call)[:60]}")
    arguments = parsed(function.get("arguments"))
    if not isinstance(arguments, dict | None):
        raise Reject("malformed", f"arguments of tool call {name} are {type(arguments).__name__}")
    made = {"type": "function", "function": {"name": name, "arguments": _without_nulls(arguments or {})}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) and call["id"] else made


def _tools(raw: Any) -> list[dict[str, Any]] | None:
    """The declared tools as ``{"type": "function", "function": {"name": ..., ...}}``."""
    tools = parsed(raw) or None
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Reject("malformed", f"tools is {type(tools).__name__}")
    return [_tool(parsed(tool)) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = parsed(tool.get("function")) if isinstance(tool, dict) else None
    wrapped = function is not None
    if not wrapped and isinstance(tool, dict):
        function = {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Reject("malformed", f"declared tool {str(tool)[:60]}")
    if isinstance(function.get("parameters"), str):
        function = {**function, "parameters": parsed(function["parameters"])}
    kind = tool["type"] if wrapped and isinstance(tool.get("type"), str) else "function"
    return {"type": kind, "function": _without_nulls(function)}


def _refuse_images(raw: dict[str, Any]) -> None:
    if IMAGES.isdisjoint(raw):
        return
    for key in sorted(IMAGES & raw.keys()):
        if isinstance(raw.get(key), list | dict | bytes) and raw[key]:
            raise Reject("non_text_part", key)


def _first(raw: dict[str, Any], *keys: str) -> Any:
    """The value of the first key that is present and not null: an empty string is a value, not an absence."""
    for key in keys:
        if raw.get(key) is not None:
            return raw[key]
    return None


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        parts = []
        for part in content:
            if isinstance(part, str):
                parts.append(part)
            elif isinstance(part, dict) and part.get("type") in {None, "text"} and isinstance(part.get("text"), str):
                parts.append(part["text"])
            else:
                raise Reject("non_text_part", str(part.get("type")) if isinstance(part, dict) else "")
        content = "".join(parts)
    if not isinstance(content, str):
        raise Reject("malformed", f"content is {type(content).__name__}")
    return LINE_END.sub("\n", content) if "\r\n" in content else content


def _ordered(messages: list[Message]) -> list[Message]:
    """Cut what stands before the first user turn (a leading system message stays); refuse impossible orders."""
    system = messages[:1] if messages and messages[0].role == "system" else []
    rest = messages[len(system) :]
    while rest and rest[0].role != "user":
        rest = rest[1:]
    if not rest:
        raise Reject("no_user_turn")
    before = "system"
    called = False
    for message in rest:
        if message.role == "assistant" and before == "assistant":
            raise Reject("bad_order", "assistant after assistant")
        if message.role == "system":
            raise Reject("bad_order", "system inside the conversation")
        if message.role == "tool" and not called:
            raise Reject("bad_order", "tool without a call")
        called = bool(message.tool_calls) or (called and message.role == "tool")
        before = message.role
    return system + rest


def _without_nulls(value: Any) -> Any:
    """Without keys that hold null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _check_json(conversation: Conversation) -> None:
    """Refuse what could not be written, or would read back as something else."""
    try:
        _ = conversation.id  # writes it once; kept, for it is wanted later
        json.dumps(conversation.meta, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Reject("bad_unicode") from None
    except (TypeError, ValueError):
        raise Reject("malformed", "holds something that is no JSON") from None
