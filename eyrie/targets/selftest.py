"""The start-up self-test: what a target's tokenizer and chat template do, found before anything is rendered.

Whatever would make every row wrong is an error; the rest is recorded in the target card, where tokenize reads it.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from eyrie.conversation import Reject
from eyrie.errors import EyrieError
from eyrie.recipes import canonical_json

if TYPE_CHECKING:
    from eyrie.render.renderer import Renderer

READING = {"calls", "channels"}  # of a family: how answers become messages, which no rendering depends on
QUESTION, ANSWER = "What is one and one?", "The sum is two."
THOUGHTS = ("First zebra thought.", "Second walrus thought.")
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class Rendering(BaseModel):
    """How a target's conversations become ids.

    Attributes:
        family: name in :func:`eyrie.targets.family.families`; None: recognise it.
        thinking: as the config asks; None leaves it to the template.
        template_kwargs: arguments of every rendering.
        control_ids: the family's control tokens that the tokenizer has, by name.
        quotes_as_text: control strings in a message become plain characters; where they cannot, the row is rejected.
        boundary: ``stable``, or the reason for which the turns of a plain chat are rejected.
        own_reasoning, own_reasoning_with_calls: the finished turn ``kept`` its reasoning; or the template lost it and
            it is ``inserted`` behind the generation prompt; or it is ``lost`` and such turns are rejected.
        history_reasoning: earlier turns keep it, lose it, or some do (``mixed``).
        prompt_opens_think: the generation prompt ends inside a think block.
        renders_tools: tool declarations are rendered.
        departs: where the template differs from what its family does.
        rules: sha256 of all this and of the family's file, but for how answers are read back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str | None = None
    thinking: bool | None = None
    template_kwargs: dict[str, Any] = {}
    trust_remote_code: bool = False
    control_ids: dict[str, int] = {}
    quotes_as_text: bool = True
    boundary: str = "stable"
    own_reasoning: Literal["kept", "inserted", "lost"] = "lost"
    own_reasoning_with_calls: Literal["kept", "inserted", "lost"] = "lost"
    history_reasoning: Literal["kept", "dropped", "mixed"] = "dropped"
    prompt_opens_think: bool = False
    renders_tools: bool = False
    departs: list[str] = []
    rules: str = ""


def examine(folder: Path, config: dict[str, Any], *, thinking: bool | None, trust_remote_code: bool) -> Rendering:
    """Test the tokenizer and the chat template of ``folder``.

    Args:
        config: the model's ``config.json``.

    Raises:
        EyrieError: no tokenizer or template, one that refuses a plain question, ids that the loader shifted, text that
            does not survive a round trip, or a thinking switch that the template does not have.
    """
    from eyrie.render.renderer import Renderer

    started = Rendering(thinking=thinking, trust_remote_code=trust_remote_code)
    renderer = Renderer(folder, rendering=started)
    family, think = renderer.family, renderer.think
    try:
        renderer.render([{"role": "user", "content": QUESTION}], None, generation=True)
    except Reject as reject:
        raise EyrieError(
            f"{folder}: its chat template refuses a plain question ({reject.detail}); use an instruction-tuned model's"
        ) from None
    check_ids(renderer, config)
    check_round_trip(renderer)
    renderer.arguments = switch_arguments(renderer, thinking)
    ids_of = renderer.controls.ids_of
    history = history_reasoning(renderer)
    expected = family.expects.history_reasoning
    other = think is not None and expected not in (None, history)
    found = started.model_copy(
        update={
            "family": family.name,
            "template_kwargs": renderer.arguments,
            "control_ids": {name: ids_of[name] for name in family.control_tokens() if name in ids_of},
            "quotes_as_text": agrees(renderer),
            "boundary": boundary(renderer),
            "own_reasoning": own_reasoning(renderer, calls=False),
            "own_reasoning_with_calls": own_reasoning(renderer, calls=True),
            "history_reasoning": history,
            "prompt_opens_think": opens_think(renderer),
            "renders_tools": renders_tools(renderer),
            "departs": [f"history_reasoning is {history}, expected {expected}"] if other else [],
        }
    )
    rules = {
        "family": family.model_dump(mode="json", exclude=READING),
        "found": found.model_dump(mode="json", exclude={"rules"}),
    }
    return found.model_copy(update={"rules": hashlib.sha256(canonical_json(rules).encode()).hexdigest()})


def check_ids(renderer: Renderer, config: dict[str, Any]) -> None:
    """Control tokens must have the ids that the tokenizer's files and the family say, one id each, both ways."""
    tokenizer, folder, family = renderer.tokenizer, renderer.folder, renderer.family
    written = written_ids(folder)
    if config.get("vocab_size") == family.vocab_size:
        written |= family.ids
    known = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    for name, id in written.items():
        if known.get(name, id) != id or (name in family.ids and name not in known):
            raise EyrieError(
                f"{folder}: control token {name} has id {known.get(name)} once loaded, it should be {id}; the "
                "installed transformers misreads this tokenizer: set target.trust_remote_code, or change its version"
            )
    present = renderer.controls.ids_of
    for name, id in ((name, present[name]) for name in family.control_tokens() if name in present):
        ids = list(tokenizer.encode(name, add_special_tokens=False))
        text = tokenizer.decode([id], skip_special_tokens=False)
        if ids != [id] or text.strip() != name:
            raise EyrieError(
                f"{folder}: control token {name} (id {id}) encodes to {ids[:8]} and decodes to {text[:40]!r}; "
                "the tokenizer's files do not fit each other, fetch them again"
            )


def check_round_trip(renderer: Renderer) -> None:
    """Chinese, emoji and code must come back from ids as they went in (compatibility forms and spacing apart)."""
    from eyrie.render.chat_template import PROBE_TEXT

    ids = renderer.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    back = renderer.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if _plain(back) != _plain(PROBE_TEXT):
        raise EyrieError(
            f"{renderer.folder}: the tokenizer does not give text back as it was ({_plain(back)[:60]!r}); "
            "its files are incomplete or do not fit each other, fetch them again"
        )


def written_ids(folder: Path) -> dict[str, int]:
    """Ids of added tokens as ``tokenizer.json`` and ``tokenizer_config.json`` state them."""
    found: dict[str, int] = {}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for token in content.get("added_tokens") or []:
            found[token["content"]] = token["id"]
        for id, token in (content.get("added_tokens_decoder") or {}).items():
            found[token["content"] if isinstance(token, dict) else str(token)] = int(id)
    return found


def switch_arguments(renderer: Renderer, thinking: bool | None) -> dict[str, Any]:
    """Template arguments for ``target.thinking``. Raises :class:`EyrieError` when the template has no such switch."""
    if thinking is None:
        return {}
    switch = renderer.family.switch
    if switch is not None and renderer.think is not None:
        chat = [{"role": "user", "content": QUESTION}]
        with_, without = (
            renderer.render(chat, None, generation=True, arguments=arguments)
            for arguments in (switch.thinking, switch.plain)
        )
        if with_ != without:
            return switch.thinking if thinking else switch.plain
    raise EyrieError(
        f"target.thinking: the chat template of {renderer.folder} has no switch for it "
        f"(family {renderer.family.name}); leave the option out"
    )


def agrees(renderer: Renderer) -> bool:
    try:
        return renderer.segments_agree
    except Reject:
        return False


def boundary(renderer: Renderer) -> str:
    chat = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    ]
    (row,) = renderer.turn_rows(chat)
    return row.reason if isinstance(row, Reject) else "stable"


def own_reasoning(renderer: Renderer, *, calls: bool) -> Literal["kept", "inserted", "lost"]:
    """What becomes of the reasoning of the turn that a row supervises."""
    answer: dict[str, Any] = {"role": "assistant", "content": ANSWER, "reasoning": THOUGHTS[0]}
    if calls:
        answer["content"] = ""  # with words as well gpt-oss refuses it, and a template may write the call alone
        call = {"name": "lookup", "arguments": {"word": "sum"}}
        answer["tool_calls"] = [{"id": "functions.lookup:0", "type": "function", "function": call}]
    chat = [{"role": "user", "content": QUESTION}, answer]
    if renderer.thinking is False or isinstance(renderer.turn_rows(chat)[0], Reject):
        return "lost"
    shown = [renderer.for_template(message) for message in chat]
    return "kept" if THOUGHTS[0] in renderer.render(shown, None, generation=False) else "inserted"


def history_reasoning(renderer: Renderer) -> Literal["kept", "dropped", "mixed"]:
    """What becomes of the reasoning of earlier turns."""
    chat: list[dict[str, Any]] = []
    for thought in THOUGHTS:
        chat += [
            {"role": "user", "content": QUESTION},
            renderer.for_template({"role": "assistant", "content": ANSWER, "reasoning": thought}),
        ]
    try:
        text = renderer.render([*chat, {"role": "user", "content": QUESTION}], None, generation=True)
    except Reject:
        return "dropped"
    kept = [thought in text for thought in THOUGHTS]
    return "kept" if all(kept) else "mixed" if any(kept) else "dropped"


def opens_think(renderer: Renderer) -> bool:
    think = renderer.think
    if think is None:
        return False
    text = renderer.render([{"role": "user", "content": QUESTION}], None, generation=True)
    return any(text.endswith(think.open + layout.after_open) for layout in think.layouts)


def renders_tools(renderer: Renderer) -> bool:
    try:
        renderer.check_tools([{"role": "user", "content": QUESTION}], [TOOL])
    except (EyrieError, Reject):
        return False
    return True


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())
