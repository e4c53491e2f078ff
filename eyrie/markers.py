"""Marks that sources write into the text of an answer: reasoning blocks and tool calls.

What the marks enclose becomes a field of its own (see :mod:`eyrie.conversation`); the marks themselves go. A mark
without its partner says that the text was cut or that it only talks about marks, and neither can be told from the
other: it raises :class:`Unpaired`.
"""

from __future__ import annotations

from collections.abc import Sequence

THINK = ("<think>", "</think>")
THOUGHT = ("<|begin_of_thought|>", "<|end_of_thought|>")
SOLUTION = ("<|begin_of_solution|>", "<|end_of_solution|>")
TAGS = (*THINK, *THOUGHT, *SOLUTION)


class Unpaired(ValueError):
    """A mark without its partner, or in a place where it has no meaning."""


def split_reasoning(text: str, *, parserless: Sequence[str] | None = None) -> tuple[str | None, str]:
    """Reasoning and answer of an assistant's text; ``(None, text)`` when it holds no mark.

    Two styles are known: ``<think>`` reasoning ``</think>`` answer, and the four marks of OpenThoughts, which enclose
    the thought and the solution. Line feeds beside the marks belong to the marks.

    Args:
        parserless: the text is what a server without a reasoning parser gave out: the opening tag may be missing, since
            the prompt ended with it, and a tool section, which begins with one of these strings, ends the reasoning
            when the closing tag is missing.

    Raises:
        Unpaired: one-sided, nested, repeated or misplaced marks.
    """
    if "<" not in text or not any(tag in text for tag in TAGS):
        return None, text
    if any(tag in text for tag in THINK):
        return _think(text, parserless)
    rest, parts = text, []
    for opening, closing in (THOUGHT, SOLUTION):
        before, opened, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if before.strip() or not opened or not closed:
            raise Unpaired(f"{opening} {closing}")
        parts.append(inside.strip("\n"))
    _no_tag(rest, *parts)
    if rest.strip():
        raise Unpaired(f"text behind {SOLUTION[1]}")
    return parts[0], parts[1]


def _think(text: str, parserless: Sequence[str] | None) -> tuple[str, str]:
    opening, closing = THINK
    body = text.lstrip()
    if body.startswith(opening):
        body = body.removeprefix(opening)
    elif parserless is None:
        raise Unpaired(f"no {opening} at the beginning")
    reasoning, closed, content = body.partition(closing)
    if not closed:
        begins = [at for mark in parserless or () if (at := body.find(mark)) >= 0]
        if not begins:
            raise Unpaired(f"no {closing}")
        reasoning, content = body[: min(begins)], body[min(begins) :]
    _no_tag(reasoning, content)
    return reasoning.strip("\n"), content.lstrip("\n")


def _no_tag(*texts: str) -> None:
    for text in texts:
        for tag in TAGS:
            if tag in text:
                raise Unpaired(f"{tag} a second time")
