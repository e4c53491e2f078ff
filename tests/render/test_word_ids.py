"""Encoding word by word gives the tokenizer's own ids, or declines."""

from __future__ import annotations

import json
import string
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import eyrie.render.words
from eyrie.render.words import UNSAFE, WordEncoder
from tests.family_targets import base_bpe

# Cuts as the families have them: contractions, letters with one sign before, numbers alone or by threes, lines.
LINES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THREES = LINES.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [cut, level]}


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}
KNOWN = {"gpt2": GPT2, "digits": DIGITS, "lines": split(LINES), "threes": split(THREES)}
UNKNOWN = {
    "other class": split(r"\p{P}+|[^\p{P}]+"),
    "intersection": split(r"[\p{L}&&[^\p{N}]]+|."),
    "removed": split(LINES, "Removed"),
    "prefix": {**GPT2, "add_prefix_space": True},
    "other kind": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True},
}


def made(cut: dict[str, Any], **changes: Any) -> tuple[Tokenizer, WordEncoder | None]:
    content = {**base_bpe(), "pre_tokenizer": cut, **changes}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer, WordEncoder.of(tokenizer, content)


ENCODERS = {name: made(cut) for name, cut in KNOWN.items()}
FOREIGN = (
    "\u4f60\u597d\uff0c\u3002\u3000\u2002\u00a0\u00e9\u00df\u00b5\u00b2\u00bd\u2460"
    "\uff12\uff21\u042f\u3042\u30fc\ud55c\u2014\u2019\u2192\u25a0\u00d7\u3005"
)
TEXT = (
    st.text(string.printable, max_size=80)
    | st.text("aB1 \n'._" + FOREIGN, max_size=60)
    | st.lists(
        st.sampled_from(["the", " fox", "'s", "'LL", "\n", "\r\n", "  ", "\t", "12345", "x1", "_", "...", *FOREIGN]),
        max_size=20,
    ).map("".join)
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(KNOWN)), TEXT)
def test_ids_are_those_of_the_tokenizer(name: str, text: str) -> None:
    tokenizer, words = ENCODERS[name]
    assert words is not None
    ids = words.ids(text)
    if set(text) & set("\x0b\x0c"):
        assert ids is None
    else:
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["\x1c", "\u200b", "e\u0301", "\u0915", "\U0001f426", "\u017f", "\u2028", "\ufeff"])
def test_characters_of_no_certain_class_are_left_to_the_tokenizer(text: str) -> None:
    _, words = ENCODERS["gpt2"]
    assert words is not None
    assert words.ids(f"the {text} fox") is None


@pytest.mark.parametrize("name", KNOWN)
def test_every_character_is_cut_as_the_tokenizer_cuts_it(name: str) -> None:
    """Each character of each class between and beside letters, numbers, spaces and signs."""
    tokenizer, words = ENCODERS[name]
    assert words is not None
    known = [chr(code) for code in range(0x10000) if not (0xD800 <= code < 0xE000 or UNSAFE.search(chr(code)))]
    assert len(known) > 32_000
    assert all(unicodedata.is_normalized("NFC", char) for char in known)
    for at in range(0, len(known), 500):
        text = "".join(f"a{char}b 1{char}2 {char}{char} .{char}. {char}\n" for char in known[at : at + 500])
        spans = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert words.cut(text) == spans, hex(ord(known[at]))


def test_what_a_normalizer_changes_is_left_to_the_tokenizer() -> None:
    for kind, wanted in (("NFC", True), ("NFKC", False)):
        tokenizer, words = made(GPT2, normalizer={"type": kind})
        assert words is not None
        ids = words.ids("the \uff26\uff4f\uff58")
        assert (ids == tokenizer.encode("the \uff26\uff4f\uff58").ids) == wanted
        assert words.ids("the fox") == tokenizer.encode("the fox").ids


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_cuts_are_left_to_the_tokenizer(name: str) -> None:
    assert made(UNKNOWN[name])[1] is None


def test_a_normalizer_that_changes_ascii_is_not_known() -> None:
    assert made(GPT2, normalizer={"type": "Lowercase"})[1] is None
    assert made(GPT2, normalizer={"type": "NFC"})[1] is not None


def test_added_tokens_that_are_text_are_left_to_the_tokenizer() -> None:
    token = {"id": 500, "content": "<fim>", "special": False, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}  # fmt: skip
    tokenizer, words = made(GPT2, added_tokens=[token])
    assert words is not None
    assert words.ids("a <fim> b") is None
    assert words.ids("a <fi> b") == tokenizer.encode("a <fi> b").ids
    assert tokenizer.token_to_id("<fim>") in tokenizer.encode("a <fim> b").ids


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyrie.render.words, "REMEMBERED_CHARS", 30)
    tokenizer, words = made(GPT2)
    assert words is not None
    for number in range(40):
        text = f"word{number} and some more of them"
        assert words.ids(text) == tokenizer.encode(text).ids
    assert sum(map(len, words._memory)) <= 30 + len(text)
