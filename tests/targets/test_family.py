"""Families are data: every file is whole, and the tokens of a tokenizer say which one it belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from eyrie.render.renderer import Renderer
from eyrie.targets.family import GENERIC, Family, families, recognise
from eyrie.targets.selftest import Rendering
from tests.family_targets import FAMILIES, family_target, kimi_target


def test_the_known_families() -> None:
    assert families().keys() == {GENERIC, "chatml", "qwen3", "llama-3", "deepseek", "kimi-k2", "gpt-oss"}
    for name, family in families().items():
        assert family.name == name
        assert family.stops
        assert len(family.control_tokens()) == len(set(family.control_tokens()))
        assert not set(family.stops) & set(family.message_ends)


@pytest.mark.parametrize("name", [*FAMILIES, "kimi-k2"])
def test_tokens_say_which_family(name: str, tmp_path: Path) -> None:
    folder = kimi_target(tmp_path) if name == "kimi-k2" else family_target(name, tmp_path)
    wanted = {"deepseek-r1": "deepseek", "deepseek-v3.1": "deepseek"}.get(name, name)
    assert Renderer(folder, rendering=Rendering(trust_remote_code=True)).family.name == wanted


def test_a_template_that_writes_other_tokens_is_of_no_known_family() -> None:
    tokens = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    assert recognise(tokens, "{{ '<|im_start|>' }}").name == "qwen3"
    assert recognise(tokens[:3], "{{ '<|im_start|>' }}").name == "chatml"
    assert recognise(tokens, "{{ '[INST]' }}").name == GENERIC
    assert recognise([], "{{ '<|im_start|>' }}").name == GENERIC


def test_a_faulty_file_is_refused() -> None:
    whole = {"name": "x", "describes": "x", "tokens": ["[A]"], "turn_tokens": ["[A]"]}
    assert Family.model_validate(whole).control_tokens() == ["[A]"]
    with pytest.raises(ValidationError, match="is no control token of the family"):
        Family.model_validate({**whole, "turn_tokens": ["[B]"]})
    with pytest.raises(ValidationError, match="name it"):
        Family.model_validate({**whole, "ids": {"[A]": 5}})
    with pytest.raises(ValidationError, match="Extra inputs"):
        Family.model_validate({**whole, "stop": []})
