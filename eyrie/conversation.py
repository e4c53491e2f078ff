"""Conversations: messages in one normal form, and the closed list of reasons for which a row is left out.

Sources spell roles, keys and tool calls in many ways. :func:`normalise` maps what is known to the one form that is
stored, and refuses what is not: an unknown role may be the data's own voice or the target's, and a wrong guess trains
on the wrong tokens.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}

REASONS = {
    # normalising a row of a source
    "malformed": "the row, a message or its content is not of a shape that the adapter knows",
    "no_messages": "the row holds no message",
    "unknown_role": "a role that is none of the known names",
    "bad_json": "a column that should hold JSON does not parse",
    "bad_unicode": "text that is no valid Unicode (a lone surrogate)",
    "non_text_part": "an image or another part that a text-only target cannot read",
    "empty_content": "a message without text and without tool calls",
    "bad_order": "turns in an order that no chat has (two answers in a row, a tool result without a call)",
    "no_user_turn": "no user turn to answer",
    "no_assistant_turn": "a native conversation without an answer",
    "tool_turns": "tool calls in a dataset that drops tool declarations",
    "language": "not in the language asked for",
    "too_short": "fewer turns than asked for",
    "prompt_too_long": "longer than max_prompt_chars",
    "duplicate": "the same prompt stands earlier in this dataset",
    # asking an engine
    "refused": "the engine gave no answer: the prompt was refused or filtered, or failed again and again",
    "drifted": "the answer's text, encoded again, has another count of tokens than the engine billed",
    "unparsed": "the answer's text holds reasoning or tool calls that the server did not parse",
    # conversation -> token rows
    "truncated": "an answer cut by max_tokens",
    "too_long": "longer than tokenize.max_length",
    "no_supervised_tokens": "no token that the target generated",
    "unstable_boundary": "the chat template renders history differently once the turn is finished",
    "no_stop_id": "the rendered turn does not end with a stop id",
    "template_refused": "the chat template refuses the conversation",
    "reasoning_dropped": "the chat template drops the turn's reasoning",
    "over_budget": "the shard's token budget is full",
    # merge
    "cross_dataset_duplicate": "the same prompt stands in a dataset that comes earlier in the config",
    "held_out_prompt": "shares its prompt, or a long run of its words, with a row of the run's own test split",
    "benchmark_prompt": "shares its prompt, or a long run of its words, with a configured benchmark suite",
}

KEY_WORDS = 5  # a first turn with fewer words ("hello") names no conversation: later user turns join its key


class Reject(Exception):
    """A row is left out; ``reason`` is a key of :data:`REASONS`, ``detail`` says what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in REASONS:
            raise KeyError(f"{reason!r} is no reason in REASONS")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Message:
    """One turn. ``reasoning`` is text thought before ``content``; ``tool_calls`` are OpenAI-style dicts."""

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As stored: absent fields are left out."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        for key in ("reasoning", "tool_calls", "name"):
            if (value := getattr(self, key)) is not None:
                row[key] = value
        return row


@dataclass(frozen=True)
class Conversation:
    """Messages in normal form, with the tools declared to the assistant and what the source says about the row."""

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """16 hex digits that depend on messages and tools alone."""
        content: dict[str, Any] = {"messages": [message.to_dict() for message in self.messages]}
        if self.tools:
            content["tools"] = self.tools
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

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
        return Conversation(self.messages[: last + 1], self.tools, self.meta)

    def as_finished(self) -> Conversation:
        """The conversation up to and with its last answer."""
        last = max((i for i, message in enumerate(self.messages) if message.role == "assistant"), default=-1)
        if last < 0:
            raise Reject("no_assistant_turn")
        return Conversation(self.messages[: last + 1], self.tools, self.meta)


def normalise(raw: Any) -> Conversation:
    """A raw row ``{"messages": [...], "tools": ..., "meta": {...}}`` in normal form.

    Messages may spell ``role|from``, ``content|value|text`` and ``reasoning|reasoning_content``; content may be a list
    of text parts; tools and tool calls may be JSON strings. Whatever stands before the first user turn, apart from
    one system message, is cut off.

    Raises:
        Reject: with the reason, for anything that is not understood.
    """
    if not isinstance(raw, dict):
        raise Reject("malformed", f"row is {type(raw).__name__}")
    listed = parsed(raw.get("messages"))
    if not listed:
        raise Reject("no_messages")
    if not isinstance(listed, list):
        raise Reject("malformed", f"messages is {type(listed).__name__}")
    messages = _ordered([_message(message) for message in listed])
    tools = parsed(raw.get("tools")) or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Reject("malformed", "tools is no list of objects")
    conversation = Conversation(tuple(messages), _without_nulls(tools), raw.get("meta") or {})
    _check_unicode(conversation)
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
    """``value``, or what it holds when it is a JSON string."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise Reject("bad_json", str(error)) from None


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise Reject("malformed", f"message is {type(raw).__name__}")
    spelled = _first(raw, "role", "from")
    role = ROLES.get(spelled.strip().lower()) if isinstance(spelled, str) else None
    if role is None:
        raise Reject("unknown_role", repr(spelled)[:60])
    calls = parsed(raw.get("tool_calls")) or None
    if calls is not None and (role != "assistant" or not all(isinstance(call, dict) for call in calls)):
        raise Reject("malformed", "tool_calls")
    content = _text(_first(raw, "content", "value", "text"))
    reasoning = _text(_first(raw, "reasoning", "reasoning_content")) or None
    if not content.strip() and not calls and role != "tool":
        raise Reject("empty_content", role)
    name = raw.get("name")
    return Message(role, content, reasoning, _without_nulls(calls), name if isinstance(name, str) and name else None)


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
            elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
                parts.append(part["text"])
            else:
                raise Reject("non_text_part", str(part.get("type")) if isinstance(part, dict) else "")
        content = "".join(parts)
    if not isinstance(content, str):
        raise Reject("malformed", f"content is {type(content).__name__}")
    return content.replace("\r\n", "\n")


def _ordered(messages: list[Message]) -> list[Message]:
    """Cut what stands before the first user turn (a leading system message stays); refuse impossible orders."""
    system = messages[:1] if messages[0].role == "system" else []
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
    """Without keys that hold null: unified Arrow structs put every key of every row into all of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _check_unicode(conversation: Conversation) -> None:
    try:
        json.dumps(conversation.to_row(0), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Reject("bad_unicode") from None
    except (TypeError, ValueError):
        raise Reject("malformed", "holds something that is no JSON") from None
