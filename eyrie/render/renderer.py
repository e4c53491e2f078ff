"""Conversations -> token ids, and the spans that the assistant produced.

Text becomes ids the way the target sees it when it is served: the chat template renders the conversation, its control
strings become control ids. What a person wrote never does: a message that quotes ``<|im_end|>`` is encoded as plain
characters. Spans are found by rendering a conversation with and without its last turn, never by searching text.

A served answer continues the ids of its prompt, so a row is the prompt's ids, then those of the answer, encoded apart:
a merge across the boundary ("\\n" + "\\n..." into one token) is something that no server ever sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.conversation import Reject
from eyrie.errors import EyrieError
from eyrie.formats.tokens import MIN_LABELS
from eyrie.render.call_forms import CallForm, find_form, lost_of_calls
from eyrie.render.chat_template import (
    PROBE_TEXT,
    REASONING_KEYS,
    TEMPLATE_ERRORS,
    Template,
    load_tokenizer,
)
from eyrie.render.controls import ControlEncoder, Quotes, Trail
from eyrie.render.prefixes import Prefixes
from eyrie.render.spoken import message_of
from eyrie.targets.family import Layout, Think, families, recognise

if TYPE_CHECKING:
    from eyrie.targets.selftest import Rendering


@dataclass(frozen=True)
class TurnRow:
    """One supervised assistant turn.

    Attributes:
        turn: index of the assistant message in the conversation.
        input_ids: context and answer, up to and with the id that ends the turn.
        start: first position of the answer; the answer is ``input_ids[start:]``.
        quotes: whether control strings stand in the conversation as plain text.
    """

    turn: int
    input_ids: list[int]
    start: int
    quotes: bool = False


@dataclass
class _Talk:
    """One conversation on its way through the template: control strings hidden, and what was encoded so far.

    ``full``: the context alone is too long, so that of every later turn is too. ``prefixes``: what the template makes
    of the whole, by generation prompt and arguments; None: the conversation is short, or the template looks ahead.
    """

    messages: list[dict[str, Any]]
    tools: Any
    quotes: Quotes | None
    trail: Trail = field(default_factory=Trail)
    full: bool = False
    prefixes: dict[Any, Prefixes | None] | None = None


class Renderer:
    """Renders conversations with a target's own tokenizer and chat template.

    Args:
        model_dir: Hugging Face folder that holds the tokenizer, or a hub id.
        stop_ids: ids that end a turn; default: the tokenizer's eos and the family's stops.
        rendering: the target card's findings; default: the family that the tokenizer shows, no template arguments.
    """

    def __init__(
        self, model_dir: Path | str, stop_ids: Sequence[int] | None = None, rendering: Rendering | None = None
    ) -> None:
        from eyrie.targets.card import resolve

        self.folder = resolve(str(model_dir))
        self.tokenizer = load_tokenizer(
            self.folder, trust_remote_code=rendering.trust_remote_code if rendering else False
        )
        self._template = Template(self.tokenizer, self.folder)
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        named = rendering.family if rendering else None
        self.family = families()[named] if named else recognise(added, self._template.texts[0])
        self.arguments = dict(rendering.template_kwargs) if rendering else {}
        self.thinking = rendering.thinking if rendering else None
        self.controls = ControlEncoder(self.tokenizer, self.family.control_tokens())
        ids_of = self.controls.ids_of
        think = self.family.think
        self.think = think if think and {think.open, think.close} <= ids_of.keys() else None
        if stop_ids is None:
            eos = self.tokenizer.eos_token_id
            stop_ids = [*self.family_stops(), *([] if eos is None else [eos])]
        self.stop_ids = frozenset(stop_ids)
        self._stops = {name for name, id in ids_of.items() if id in self.stop_ids}
        self._tools_render: dict[bool, bool] = {}
        self._segments_agree: bool | None = None

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids of the conversation with the generation prompt: what a server feeds the model before it answers.

        Raises:
            EyrieError: tools are declared and the template does not render them.
            Reject: the template refuses the conversation.
        """
        self.check_tools(messages, tools)
        talk = self._talk(messages, tools)
        return self._ids(talk, self.render(talk.messages, talk.tools, generation=True))

    def family_stops(self) -> list[int]:
        """Ids of the family's stops that this tokenizer has."""
        return [self.controls.ids_of[name] for name in self.family.stops if name in self.controls.ids_of]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, control tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def said(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], *, tools: Sequence[dict[str, Any]] | None
    ) -> dict[str, Any]:
        """The message that an answer is, for the context of the next turn (:mod:`eyrie.render.spoken`).

        Raises:
            Reject: ``unparsed``: control strings in a place where the family gives them no meaning.
        """
        ids = list(output_ids[:-1] if output_ids and output_ids[-1] in self.stop_ids else output_ids)
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        known = set(self.controls.ids_of.values())
        before = next((id for id in reversed(prompt_ids) if id in known), None)
        opened = self.think is not None and before == self.controls.ids_of[self.think.open]
        message = message_of(text, self.family, think=self.think, opened=opened, tools=tools)
        if left := self.controls.controls(message["content"] + message.get("reasoning", "")):
            raise Reject("unparsed", f"{left[0]} inside the answer")
        return message

    def turn_rows(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        max_length: int | None = None,
    ) -> list[TurnRow | Reject]:
        """One row per assistant turn, each with the context that a server would have rendered for it.

        A turn whose answer cannot be told from its context, or that is longer than ``max_length`` ids, is a
        :class:`Reject` in the list, never a guess.
        """
        self.check_tools(messages, tools)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            talk = self._talk(messages, tools)
        except Reject as reject:
            return [reject for _ in turns]
        if len(turns) >= MANY_TURNS and self._template.direct:
            talk.prefixes = {}
        rows: list[TurnRow | Reject] = []
        for turn in turns:
            if talk.full:
                rows.append(Reject("too_long"))
                continue
            try:
                rows.append(self._turn_row(talk, turn, max_length))
            except Reject as reject:
                rows.append(reject)
        return rows

    def last_turn(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        max_length: int | None = None,
    ) -> TurnRow | Reject:
        """The row of the last message, an assistant's; earlier turns are context alone."""
        self.check_tools(messages, tools)
        try:
            return self._turn_row(self._talk(messages, tools), len(messages) - 1, max_length)
        except Reject as reject:
            return reject

    def check_tools(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        """Refuse tools that the template would leave out without a word. Decided once per renderer."""
        if not tools:
            return
        has_system = messages[0]["role"] == "system"
        if has_system not in self._tools_render:
            without = self.render(list(messages[:2]), None, generation=True)
            self._tools_render[has_system] = self.render(list(messages[:2]), tools, generation=True) != without
        if not self._tools_render[has_system]:
            raise EyrieError(
                f"{self.folder}: its chat template does not render tool declarations; set `tools: drop` for this "
                "dataset to ask its questions without tools, or use a target whose template knows tools"
            )

    def _talk(self, messages: Sequence[dict[str, Any]], tools: Any) -> _Talk:
        """Raises :class:`Reject` for quoted control strings that this tokenizer cannot encode as text."""
        shown = [self.for_template(message) for message in canonical_calls(messages, self.family.call_id)]
        (hidden, declared), quotes = self.controls.hide([shown, tools or None])
        if quotes is not None and not self.segments_agree:
            raise Reject("quoted_control")
        return _Talk(hidden, declared, quotes)

    def for_template(self, message: dict[str, Any]) -> dict[str, Any]:
        """Reasoning under the template's own name for it; an inline think block is taken for what it is."""
        reasoning, think = message.get("reasoning"), self.think
        if message["role"] == "assistant" and not reasoning and think:
            inner, close, rest = message["content"].partition(think.close)
            if close and inner.lstrip().startswith(think.open):
                message = {**message, "content": rest.lstrip("\n")}
                reasoning = inner.lstrip().removeprefix(think.open).strip("\n")
        plain = {key: value for key, value in message.items() if key != "reasoning"}
        shown = {**plain, **dict.fromkeys(REASONING_KEYS, reasoning)} if reasoning else plain
        return self.call_form.of(shown) if shown.get("tool_calls") else shown

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template takes tool calls."""
        return find_form(lambda messages: self.render(messages, None, generation=False))

    def _turn_row(self, talk: _Talk, turn: int, max_length: int | None) -> TurnRow:
        """Raises :class:`Reject`."""
        ids, start = self._boundary(talk, turn)
        if max_length is not None and len(ids) > max_length:
            talk.full = start >= max_length
            raise Reject("too_long")
        if len(ids) - start < MIN_LABELS:
            raise Reject("no_supervised_tokens", f"turn {turn}")
        return TurnRow(turn, ids, start, talk.quotes is not None)

    def _boundary(self, talk: _Talk, turn: int) -> tuple[list[int], int]:
        """Ids of the turn with its context, and where the answer begins."""
        message = talk.messages[turn]
        reasoning = str(message.get("reasoning") or "").strip()
        if reasoning and self.thinking is False:
            raise Reject("reasoning_unwanted", f"turn {turn}")
        arguments = self._arguments_for(bool(reasoning))
        prompt = self._first(talk, turn, generation=True, arguments=arguments)
        finished = self._first(talk, turn + 1, generation=False, arguments=arguments)
        header = header_of(prompt, self.think)
        continues = finished.startswith(header)
        tail = finished[len(header) :] if continues else self._tail(talk, turn, finished, arguments)
        split = self._split(prompt, tail, reasoning, message["content"] or "") if self.segments_agree and tail else None
        if split is None:
            return self._by_ids(talk, turn, prompt, finished)
        context, answer = split
        ended = self.controls.cut_behind(answer, self._stops)
        if ended is None:
            raise Reject("no_stop_id", f"turn {turn}")
        if lost := lost_of_calls(self.controls.words(ended, set()), message):  # "end" is no word of <|im_end|>
            raise Reject("calls_dropped", f"turn {turn}: {lost}")
        ids = self._ids(talk, context)
        self._check_answer(self.controls.last(talk.trail), self.controls.controls(ended), turn)
        start = len(ids)
        return ids + self.controls.ids(ended, talk.quotes), start

    def _arguments_for(self, thinks: bool) -> dict[str, Any]:
        """An answer with reasoning is one that the target gives with thinking on, any other with thinking off."""
        if self.think is None or self.family.switch is None:
            return self.arguments
        return {**self.arguments, **(self.family.switch.thinking if thinks else self.family.switch.plain)}

    def _tail(self, talk: _Talk, turn: int, finished: str, arguments: dict[str, Any]) -> str | None:
        """What the finished turn has behind its header, for a template that rewrites the history as the turn ends.

        (Reasoning of a tool call may stay until the answer is there.) The turn is rendered behind its question alone,
        and the result must be the end of the whole, header included. None when it is not.
        """
        asked = [message for message in talk.messages[:turn] if message["role"] == "user"][-1:]
        if not asked:
            return None
        history = self.render(asked, talk.tools, generation=False, arguments=arguments)
        prompt = self.render(asked, talk.tools, generation=True, arguments=arguments)
        whole = self.render([*asked, talk.messages[turn]], talk.tools, generation=False, arguments=arguments)
        header = header_of(prompt, self.think)
        same = header.startswith(history) and whole.startswith(header) and finished.endswith(whole[len(history) :])
        return whole[len(header) :] if same else None

    def _split(self, prompt: str, tail: str, reasoning: str, content: str) -> tuple[str, str] | None:
        """Context and answer as text, from the prompt and what the finished turn has behind the header that they share.

        A finished turn that continues its prompt is taken as it is, but for an empty think block, which is the
        template's and not the target's and so joins the context. Another one is put together as the target writes it:
        reasoning, the closing of the think block, and what stands behind the (empty or missing) block of the finished
        turn. None when the boundary must be looked for in the ids.
        """
        think = self.think
        opened = prompt[len(header_of(prompt, think)) :]
        if tail.startswith(opened) and holds(self.controls.words(tail, self._stops), reasoning, content):
            answer = tail[len(opened) :]
            body = answer if think is None or reasoning else without_empty_think(answer, think)
            return prompt + answer[: len(answer) - len(body)], body
        if think is None:
            return None
        layout = layout_of(prompt, think)
        opening, closing = think.open + layout.after_open, layout.before_close + think.close + layout.after_close
        inside = prompt.endswith(opening)
        body = without_empty_think(tail, think)
        shown = body != tail  # an empty block where the reasoning was, so the target does write one
        unknown = not inside and (opened or len(think.layouts) > 1 or not shown)
        if reasoning and (unknown or think.open in self.controls.controls(body)):
            return None
        if not reasoning:
            return (prompt + closing if inside else prompt), body
        return prompt, ("" if inside else opening) + reasoning + closing + body

    def _by_ids(self, talk: _Talk, turn: int, prompt_text: str, finished_text: str) -> tuple[list[int], int]:
        """The boundary is where the ids of prompt and finished turn part; it may not lie inside the history."""
        prompt, finished = self._ids(talk, prompt_text), self._ids(talk, finished_text)
        start = common_prefix(prompt, finished)
        if start < len(prompt):
            history = self._ids(talk, self.render(talk.messages[:turn], talk.tools, generation=False))
            if finished[: len(history)] != history or start < len(history):
                raise Reject("unstable_boundary", f"turn {turn}")
        end = next((i + 1 for i in range(start, len(finished)) if finished[i] in self.stop_ids), 0)
        if end == 0:
            raise Reject("no_stop_id", f"turn {turn}")
        message = talk.messages[turn]
        reasoning, content = (
            self.controls.show(str(message.get(key) or "").strip(), talk.quotes) for key in ("reasoning", "content")
        )
        answer = self.decode(finished[start:end])
        if not holds(answer, reasoning, content):
            raise Reject("reasoning_dropped", f"turn {turn}")
        if lost := lost_of_calls(answer, {**message, "content": content}):
            raise Reject("calls_dropped", f"turn {turn}: {lost}")
        names = {id: name for name, id in self.controls.ids_of.items()}
        before = next((names[id] for id in reversed(finished[:start]) if id in names), "")
        self._check_answer(before, [names[id] for id in finished[start:end] if id in names], turn)
        return finished[:end], start

    def _check_answer(self, before: str, inside: Sequence[str], turn: int) -> None:
        """What holds of every answer of the family, whichever way its boundary was found.

        Args:
            before: the last control string of its context.
            inside: its own control strings, in order.

        Raises :class:`Reject`.
        """
        family = self.family
        if family.answer_after and before not in family.answer_after:
            raise Reject("broken_turn", f"turn {turn}: the answer follows {before or 'no control token'}")
        wrong = next((name for name in inside if name in family.turn_tokens), None)
        if wrong:
            raise Reject("broken_turn", f"turn {turn}: {wrong} inside the answer")
        if self.think:
            opened = inside.count(self.think.open) + (before == self.think.open)
            if opened != inside.count(self.think.close):
                raise Reject("broken_turn", f"turn {turn}: {self.think.open} and {self.think.close} do not pair")

    @property
    def segments_agree(self) -> bool:
        """Whether encoding piece by piece, between control strings, gives the ids that encoding the whole gives."""
        if self._segments_agree is None:
            plain = self.render([{"role": "user", "content": PROBE_TEXT}], None, generation=True)
            whole = list(self.tokenizer.encode(plain, add_special_tokens=False))
            self._segments_agree = self.controls.ids(plain) == whole and self.controls.quotes_as_text()
        return self._segments_agree

    def _ids(self, talk: _Talk, rendered: str) -> list[int]:
        if self.segments_agree:
            return self.controls.follow(rendered, talk.quotes, talk.trail)
        return list(self.tokenizer.encode(rendered, add_special_tokens=False))

    def _first(self, talk: _Talk, count: int, *, generation: bool, arguments: dict[str, Any]) -> str:
        """:meth:`render` of the first ``count`` messages, from a run over the whole where the template allows."""
        if talk.prefixes is not None:
            key = generation, repr(arguments)
            if key not in talk.prefixes:
                talk.prefixes[key] = self._prefixes(talk, generation, arguments)
            found = talk.prefixes[key]
            try:
                text = found.first(count) if found else None
            except TEMPLATE_ERRORS:  # of other words than the conversation's, so the conversation is not refused
                text = None
            if text is not None:
                return text
            talk.prefixes[key] = None
        return self.render(talk.messages[:count], talk.tools, generation=generation, arguments=arguments)

    def _prefixes(self, talk: _Talk, generation: bool, arguments: dict[str, Any]) -> Prefixes | None:
        """None when the template refuses the whole, or does something with the messages that only a list can."""
        last = max(turn for turn, message in enumerate(talk.messages) if message["role"] == "assistant")
        try:
            return Prefixes(
                talk.messages[: last if generation else last + 1],
                lambda messages: self._template.pieces(messages, talk.tools or None, generation, arguments),
                lambda messages: self.render(messages, talk.tools, generation=generation, arguments=arguments),
            )
        except (*TEMPLATE_ERRORS, Reject):
            return None

    def render(
        self, messages: list[dict[str, Any]], tools: Any, *, generation: bool, arguments: dict[str, Any] | None = None
    ) -> str:
        """The template's text; ``arguments`` in place of the renderer's own. Raises :class:`Reject`."""
        arguments = self.arguments if arguments is None else arguments
        try:
            text = self._template(messages, tools or None, generation, arguments)
        except TEMPLATE_ERRORS as error:
            raise Reject("template_refused", " ".join(str(error).split())[:120]) from None
        return str(text)


MANY_TURNS = 5  # from here on a run over the whole conversation costs less than one per turn


def holds(answer: str, reasoning: str, content: str) -> bool:
    """Whether the reasoning stands in the answer, and the content behind it (the one may be a part of the other)."""
    if not reasoning:
        return True
    at = answer.find(reasoning)
    return at >= 0 and answer.find(content.strip(), at + len(reasoning)) >= 0


def layout_of(prompt: str, think: Think) -> Layout:
    """The layout whose opening ends the prompt; the first one when the prompt opens no think block."""
    opened = (layout for layout in think.layouts if prompt.endswith(think.open + layout.after_open))
    return next(opened, think.layouts[0])


def without_empty_think(text: str, think: Think) -> str:
    """``text`` without the think block at its beginning, when that is empty; of the block the opening may lack."""
    rest = text.lstrip().removeprefix(think.open).lstrip()
    if not rest.startswith(think.close):
        return text
    rest = rest.removeprefix(think.close)
    behind = {layout.after_close for layout in think.layouts}
    return rest.removeprefix(next((gap for gap in sorted(behind, key=len, reverse=True) if rest.startswith(gap)), ""))


def header_of(text: str, think: Think | None) -> str:
    """The prompt without the think block, open or empty, at its end."""
    if think is None:
        return text
    rest = text.rstrip()
    if rest.endswith(think.close):
        rest = rest.removesuffix(think.close).rstrip()
        return rest.removesuffix(think.open)
    return rest.removesuffix(think.open) if rest.endswith(think.open) else text


def canonical_calls(messages: Sequence[dict[str, Any]], spelling: str | None) -> list[dict[str, Any]]:
    """Messages whose tool calls, and the results that answer them, carry ids in the family's spelling.

    ``spelling`` holds ``{name}`` and ``{index}``, which counts over the whole conversation; None leaves ids alone. A
    result is matched by the id it names, else by its place: the first result answers the first open call.

    Raises:
        Reject: a result without an open call.
    """
    if spelling is None:
        return list(messages)
    changed: list[dict[str, Any]] = []
    index = 0
    waiting: list[tuple[Any, str]] = []
    for message in messages:
        if message.get("tool_calls"):
            waiting, calls = [], []
            for call in message["tool_calls"]:
                name = (call.get("function") or call).get("name", "")
                waiting.append((call.get("id"), spelling.format(name=name, index=index)))
                calls.append({**call, "id": waiting[-1][1]})
                index += 1
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            if not waiting:
                raise Reject("bad_order", "more tool results than calls")
            named = message.get("tool_call_id")
            place = next((i for i, (old, _) in enumerate(waiting) if named is not None and old == named), 0)
            message = {**message, "tool_call_id": waiting.pop(place)[1]}
        changed.append(message)
    return changed


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids the two share from the start."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))
