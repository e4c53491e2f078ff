"""Target families: how one kind of chat format is built, as data.

A family is one YAML file in ``eyrie/targets/families/``; its name is the file's. It is recognised by control tokens
alone, so a fine-tuned target needs no entry. A target of no known family is rendered by the generic method: its own
template, its own special tokens, and the think and tool tokens that it happens to share with others.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

GENERIC = "generic"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Layout(Part):
    """Text that stands around a reasoning: after the opening token, before the closing one, and behind that."""

    after_open: str
    before_close: str
    after_close: str


class Think(Part):
    """The think block. Of several layouts the one whose opening ends the generation prompt holds, else the first."""

    open: str
    close: str
    layouts: list[Layout]


class Switch(Part):
    """Template arguments with which the target thinks, and with which it answers at once."""

    thinking: dict[str, Any]
    plain: dict[str, Any]


class Listed(Part):
    """Calls whose arguments are written one by one.

    ``pattern`` finds a call (groups ``name`` and ``text``), ``argument`` each of its arguments: groups ``name`` and
    ``text``, and ``string`` where the answer says whether the text is a string ("true") or JSON. Where it does not,
    the tool's declaration says what the text is.
    """

    pattern: str
    argument: str


class Calls(Part):
    """How an answer calls tools. A text with one of ``marks`` calls some; ``pattern`` finds each call: its group
    ``call`` is JSON of name and arguments, or ``name`` and ``text`` are the name and JSON of the arguments. ``listed``
    is another way that members of the family have. ``bare`` is the pattern of a whole answer that is one call without
    any mark."""

    marks: list[str]
    pattern: str
    listed: Listed | None = None
    bare: str | None = None


class Expectation(Part):
    """What the family's templates do; the start-up self-test records where a template departs from it."""

    history_reasoning: Literal["kept", "dropped"] | None = None


class Family(Part):
    """One chat format.

    Attributes:
        tokens: added tokens that every member has.
        turn_tokens: tokens that open a turn; none may stand inside an answer.
        answer_after: the last control token before an answer is one of these.
        stops: tokens that end an answer; a member may lack some.
        message_ends: tokens that look like stops and are none: the answer goes on behind them.
        calls: how an answer calls tools; None where that is not known.
        channels: pattern of one message of an answer that consists of several: groups ``channel`` and ``text``, and
            ``first`` or ``name`` when it is a tool call.
        call_id: how history spells the id of a tool call; ``index`` counts over the whole conversation.
        vocab_size, ids: with this vocabulary the tokens have these ids.
    """

    name: str
    describes: str
    tokens: list[str] = []
    turn_tokens: list[str] = []
    answer_after: list[str] = []
    stops: list[str] = []
    message_ends: list[str] = []
    think: Think | None = None
    switch: Switch | None = None
    tool_tokens: list[str] = []
    calls: Calls | None = None
    channels: str | None = None
    call_id: str | None = None
    expects: Expectation = Expectation()
    vocab_size: int | None = None
    ids: dict[str, int] = {}

    @model_validator(mode="after")
    def _whole(self) -> Family:
        known = {*self.tokens, *self.stops, *self.tool_tokens, *self._think_tokens()}
        for name in (*self.turn_tokens, *self.answer_after, *self.message_ends, *self.ids):
            if name not in known and not name.startswith("<"):
                raise ValueError(f"{name!r} is no control token of the family")
        if self.vocab_size is None and self.ids:
            raise ValueError("ids hold for one vocab_size; name it")
        return self

    def control_tokens(self) -> list[str]:
        """Every token that the family gives a meaning to, in a fixed order, none twice."""
        named = (self.tokens, self.stops, self.message_ends, self.turn_tokens, self.answer_after,
                 self._think_tokens(), self.tool_tokens)  # fmt: skip
        return list(dict.fromkeys(name for group in named for name in group))

    def _think_tokens(self) -> list[str]:
        return [self.think.open, self.think.close] if self.think else []


# Tokens that mean the same wherever they occur.
_GENERIC = Family(
    name=GENERIC,
    describes="any other template",
    stops=["<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>"],
    think=Think(
        open="<think>",
        close="</think>",
        layouts=[
            Layout(after_open="\n", before_close="\n", after_close="\n\n"),
            Layout(after_open="", before_close="", after_close=""),
        ],
    ),
    switch=Switch(thinking={"enable_thinking": True}, plain={"enable_thinking": False}),
    tool_tokens=["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
)


@cache
def families() -> dict[str, Family]:
    """All families by name, the generic one included."""
    folder = files("eyrie.targets").joinpath("families")
    found = {GENERIC: _GENERIC}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".yaml"):
            name = entry.name.removesuffix(".yaml")
            found[name] = Family.model_validate({"name": name, **yaml.safe_load(entry.read_text(encoding="utf-8"))})
    return found


def recognise(added_tokens: Collection[str], template: str) -> Family:
    """The family whose tokens the tokenizer has and whose turn tokens the template writes; of several, the one with
    the most tokens (ChatML's are a part of Qwen3's). The generic family when there is none."""
    fits = [
        family
        for family in families().values()
        if family.tokens
        and all(token in added_tokens for token in family.tokens)
        and any(token in template for token in family.turn_tokens or family.tokens)
    ]
    return max(fits, key=lambda family: len(family.tokens), default=_GENERIC)
