"""A token row as pieces that a page can show: text, control tokens, boundaries, and which token is supervised."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from markupsafe import Markup, escape

# Of a long row the middle is left out: (tokens shown at the start, tokens shown at the end) of a stretch.
CONTEXT_SHOWN, ANSWER_SHOWN = (150, 250), (900, 300)
SIGNS = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n", "\t": "\N{RIGHTWARDS ARROW TO BAR}\t"}
JOINER = "\N{ZERO WIDTH JOINER}"  # holds emoji together; every other invisible sign is shown by its number


@dataclass(frozen=True)
class Piece:
    """Some tokens that belong together on the page.

    Attributes:
        kind: ``text``; ``special``, a control token; ``answer``, the place where a span of supervised labels begins;
            ``gap``, tokens that are not shown.
        text: what they decode to; of a gap, how many tokens it hides.
        start: position of the first token in the row.
        ids: the tokens; none for a boundary or a gap.
        supervised: whether they are labels.
    """

    kind: Literal["text", "special", "answer", "gap"]
    text: str
    start: int
    ids: tuple[int, ...] = ()
    supervised: bool = False


def pieces(
    tokenizer: Any, ids: Sequence[int], spans: Sequence[tuple[int, int]], specials: Collection[int]
) -> Iterator[Piece]:
    """The row from left to right.

    Supervised text comes token by token, context in one piece up to the next control token or boundary. Tokens that
    only together make a character stay together.

    Args:
        tokenizer: the target's, in the manner of transformers.
        ids: the row's tokens.
        spans: half-open ranges of supervised labels, ascending.
        specials: ids of control tokens.
    """
    end = 0
    for first, last in spans:
        yield from _stretch(tokenizer, ids, (end, first), specials, supervised=False)
        yield Piece("answer", str(last - first), first)
        yield from _stretch(tokenizer, ids, (first, last), specials, supervised=True)
        end = last
    yield from _stretch(tokenizer, ids, (end, len(ids)), specials, supervised=False)


def _stretch(
    tokenizer: Any, ids: Sequence[int], bounds: tuple[int, int], specials: Collection[int], *, supervised: bool
) -> Iterator[Piece]:
    start, end = bounds
    head, tail = ANSWER_SHOWN if supervised else CONTEXT_SHOWN
    if end - start <= head + tail:
        yield from _shown(tokenizer, ids, start, end, specials, supervised=supervised)
        return
    yield from _shown(tokenizer, ids, start, start + head, specials, supervised=supervised)
    yield Piece("gap", str(end - start - head - tail), start + head)
    yield from _shown(tokenizer, ids, end - tail, end, specials, supervised=supervised)


def _shown(
    tokenizer: Any, ids: Sequence[int], start: int, end: int, specials: Collection[int], *, supervised: bool
) -> Iterator[Piece]:
    held: list[Piece] = []  # context that waits to be joined
    for place, group, text in _decoded(tokenizer, ids, start, end, specials):
        if group[0] in specials:
            yield from _joined(held)
            held = []
            yield Piece("special", text, place, group, supervised)
        elif supervised:
            yield Piece("text", text, place, group, supervised=True)
        else:
            held.append(Piece("text", text, place, group))
    yield from _joined(held)


def _joined(held: list[Piece]) -> Iterator[Piece]:
    if held:
        ids = tuple(id for piece in held for id in piece.ids)
        yield Piece("text", "".join(piece.text for piece in held), held[0].start, ids)


def _decoded(
    tokenizer: Any, ids: Sequence[int], start: int, end: int, specials: Collection[int]
) -> Iterator[tuple[int, tuple[int, ...], str]]:
    """Tokens in the smallest groups that decode to whole characters: position, ids, text.

    Each group is decoded behind the one before it, because some tokenizers swallow a space at the start of a text.
    """

    def decode(some: Sequence[int]) -> str:
        return str(tokenizer.decode(list(some), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    before: tuple[int, ...] = ()
    place = start
    while place < end:
        size = 1
        if ids[place] in specials:
            yield place, (ids[place],), str(tokenizer.convert_ids_to_tokens(ids[place]))
            place, before = place + 1, ()
            continue
        lead = decode(before)
        while True:
            group = tuple(ids[place : place + size])
            text = decode((*before, *group))
            text = text[len(lead) :] if text.startswith(lead) else decode(group)
            following = place + size
            if not text.endswith("\N{REPLACEMENT CHARACTER}") or following >= end or ids[following] in specials:
                break
            if size == 4:  # no character has more bytes: this one is broken
                break
            size += 1
        yield place, group, text
        place, before = place + size, group


def visible(text: str) -> Markup:
    """``text`` as HTML in which nothing hides: markup is escaped, and signs that cannot be seen are named.

    A row may hold anything: tags, marks that turn the direction of writing, control characters.
    """
    parts: list[str] = []
    plain: list[str] = []
    for character in text:
        if character in SIGNS:
            plain.append(SIGNS[character])
        elif character != JOINER and unicodedata.category(character) in {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}:
            parts += [escape("".join(plain)), Markup("<i>U+{}</i>").format(f"{ord(character):04X}")]
            plain = []
        else:
            plain.append(character)
    return Markup("").join([*parts, escape("".join(plain))])
