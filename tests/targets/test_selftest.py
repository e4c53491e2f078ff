"""The start-up self-test: what is found, and what stops a run before anything is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eyrie.errors import EyrieError
from eyrie.targets import identify, read_card
from eyrie.targets.card import TargetCard
from eyrie.targets.selftest import Rendering, examine
from tests.family_targets import FAMILIES, TEMPLATES, family_target, kimi_target


def found(folder: Path, thinking: bool | None = None, trusted: bool = False) -> Rendering:
    config = json.loads((folder / "config.json").read_text())
    return examine(folder, config, thinking=thinking, trust_remote_code=trusted)


def card_of(folder: Path, **target: Any) -> TargetCard:
    save_file({"a": np.zeros(3, np.float32)}, folder / "model.safetensors")
    out = folder.parent / "target.json"
    identify({"target": target}, str(folder), out)
    return read_card(out)


FINDINGS = {
    # own reasoning, with calls, history, prompt opens the think block, tools rendered
    "chatml": ("lost", "lost", "dropped", False, False),
    "qwen3": ("kept", "kept", "dropped", False, True),
    "llama-3": ("lost", "lost", "dropped", False, False),
    "deepseek-r1": ("inserted", "lost", "dropped", True, False),
    "deepseek-v3.1": ("inserted", "lost", "dropped", False, False),
    "gpt-oss": ("kept", "lost", "dropped", False, False),
}


def facts(rendering: Rendering) -> tuple[Any, ...]:
    return (
        rendering.own_reasoning,
        rendering.own_reasoning_with_calls,
        rendering.history_reasoning,
        rendering.prompt_opens_think,
        rendering.renders_tools,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_findings(name: str, tmp_path: Path) -> None:
    rendering = found(family_target(name, tmp_path))
    assert facts(rendering) == FINDINGS[name]
    assert rendering.boundary == "stable"
    assert rendering.quotes_as_text
    assert rendering.template_kwargs == {}
    assert rendering.departs == []


def test_findings_of_kimi_with_its_own_code(tmp_path: Path) -> None:
    card = card_of(kimi_target(tmp_path / "kimi"), trust_remote_code=True)
    assert facts(card.rendering) == ("inserted", "kept", "dropped", True, True)
    assert card.rendering.family == "kimi-k2"
    assert card.rendering.control_ids["<|im_middle|>"] == 163601
    assert card.rendering.control_ids["<think>"] == 163606
    assert card.stop_ids == [163585, 163586], "the config's eos and the end of a turn"
    assert card.rendering.trust_remote_code


def test_rules_and_template_hashes_move_with_what_they_cover(tmp_path: Path) -> None:
    folder = family_target("qwen3", tmp_path / "qwen")
    plain, off = card_of(folder), card_of(folder, thinking=False)
    assert off.rendering.template_kwargs == {"enable_thinking": False}
    assert plain.template != off.template, "other prompts: answers made for one do not serve the other"
    assert plain.rendering.rules != off.rendering.rules
    assert plain.tokenizer == off.tokenizer
    assert card_of(folder).model_dump() == plain.model_dump()


def test_harmony_message_ends_stop_nothing(tmp_path: Path) -> None:
    folder = family_target("gpt-oss", tmp_path / "oss")
    card = card_of(folder)
    ids = card.rendering.control_ids
    assert card.stop_ids == sorted([ids["<|return|>"], ids["<|call|>"]])


def test_shifted_ids_stop_the_run_and_nothing_is_written(tmp_path: Path) -> None:
    """A loader that closes the gaps between slots moves every id behind the first gap."""
    folder = kimi_target(tmp_path / "kimi", shift=1)
    with pytest.raises(EyrieError, match=r"control token .* has id 163\d+ once loaded, it should be 163\d+"):
        card_of(folder, trust_remote_code=True)
    assert not (tmp_path / "target.json").exists()


def test_ids_that_differ_from_the_files_are_found_in_any_family(tmp_path: Path) -> None:
    folder = family_target("chatml", tmp_path)
    path = folder / "tokenizer_config.json"
    stated = {"added_tokens_decoder": {"777": {"content": "<|endoftext|>"}}}
    loaded = Rendering(family="chatml")
    from eyrie.render.renderer import Renderer
    from eyrie.targets.selftest import check_ids

    renderer = Renderer(folder, rendering=loaded)
    check_ids(renderer, {})
    path.write_text(json.dumps({**json.loads(path.read_text()), **stated}))
    with pytest.raises(EyrieError, match=r"<\|endoftext\|> has id 500 once loaded, it should be 777"):
        check_ids(renderer, {})


def test_a_tokenizer_that_loses_text_is_an_error(tmp_path: Path) -> None:
    folder = family_target("chatml", tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[^\\x00-\\x7f]"}, "content": "?"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(EyrieError, match="does not give text back as it was"):
        found(folder)


def test_thinking_needs_a_switch(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match=r"target.thinking: .* has no switch for it \(family chatml\)"):
        found(family_target("chatml", tmp_path / "a"), thinking=True)
    with pytest.raises(EyrieError, match=r"has no switch for it \(family deepseek\)"):
        found(family_target("deepseek-r1", tmp_path / "b"), thinking=False)
    assert found(family_target("deepseek-v3.1", tmp_path / "c"), thinking=True).prompt_opens_think


def test_a_variant_that_keeps_some_history_is_recorded(tmp_path: Path) -> None:
    """Two templates of one model circulate: the last plain answer ends the history, or (by a slip) the first."""
    text = (TEMPLATES / "kimi-k2.jinja").read_text()
    slip = text.replace("not message.tool_calls %}{%- set", "not message.tool_calls and ns.answered < 0 %}{%- set")
    assert slip != text
    folder = kimi_target(tmp_path)
    (folder / "chat_template.jinja").write_text(slip)
    rendering = found(folder, trusted=True)
    assert rendering.history_reasoning == "mixed"
    assert rendering.departs == ["history_reasoning is mixed, expected dropped"]


def test_a_template_without_boundaries_is_recorded(tmp_path: Path) -> None:
    folder = family_target("chatml", tmp_path)
    path = folder / "chat_template.jinja"
    path.write_text("{{ messages | length }}" + path.read_text())
    assert found(folder).boundary == "unstable_boundary"


def test_a_template_that_refuses_a_plain_question(tmp_path: Path) -> None:
    folder = family_target("chatml", tmp_path)
    (folder / "chat_template.jinja").write_text("<|im_start|>{{ raise_exception('no chats here') }}")
    with pytest.raises(EyrieError, match=r"refuses a plain question \(no chats here\)"):
        found(folder)


def test_code_beside_the_weights_needs_trust(tmp_path: Path) -> None:
    folder = kimi_target(tmp_path)
    with pytest.raises(EyrieError, match=r"read that code, then set target.trust_remote_code"):
        found(folder)
    assert found(folder, trusted=True).renders_tools
