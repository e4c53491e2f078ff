"""The target card: facts, hashes that move with what they cover, and one-line errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from eyrie.errors import EyrieError
from eyrie.targets import TargetCard, card, default_layers, identify, read_card

RECIPE = {"revision": 1, "target": {"model": "anything"}}


@pytest.fixture
def copy(tiny_target: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_target, tmp_path / "copy")


def card_of(folder: Path) -> TargetCard:
    out = folder.parent / "target.json"
    identify(RECIPE, str(folder), out)
    return read_card(out)


def test_facts(tiny_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "target.json"
    identify(RECIPE, str(tiny_target), out)
    found = read_card(out)
    assert found.model == str(tiny_target)
    assert found.architecture == "LlamaForCausalLM"
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (6, 64, 600)
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (4, 2, 16)
    assert found.rope_theta == 10_000.0
    assert found.tied_embeddings
    assert found.dtype == "bfloat16"
    assert found.stop_ids == [2]
    assert found.special_ids == [0, 1, 2]
    assert found.identity() == {"target": found.target, "tokenizer": found.tokenizer, "template": found.template}
    first = out.read_bytes()
    identify(RECIPE, str(tiny_target), out)
    assert out.read_bytes() == first


def test_each_hash_moves_with_its_own_files(copy: Path) -> None:
    before = card_of(copy)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("helpful", "kind"))
    other = card_of(copy)
    assert other.template != before.template
    assert (other.target, other.tokenizer) == (before.target, before.tokenizer)

    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    assert card_of(copy).target != before.target
    assert card_of(copy).tokenizer == before.tokenizer


def test_large_weights_are_hashed_by_header_and_size(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "WHOLE_HASH_BYTES", 0)
    before = card_of(copy)
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    assert card_of(copy).target == before.target
    import numpy as np

    save_file({"a": np.zeros(3, np.float32)}, copy / "model.safetensors")
    assert card_of(copy).target != before.target


def test_stop_ids_come_from_every_place_that_names_them(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    found = card_of(copy)
    assert found.stop_ids == [0, 2, 7]
    assert found.special_ids == [0, 1, 2, 7]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", "holds no tokenizer"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_what_a_folder_lacks_is_named(copy: Path, missing: str, message: str) -> None:
    (copy / missing).unlink()
    with pytest.raises(EyrieError, match=message) as caught:
        card_of(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (copy.parent / "target.json").exists()


def test_a_missing_folder_or_an_unreachable_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EyrieError, match=r"target.model: no folder .*absent"):
        identify(RECIPE, str(tmp_path / "absent"), tmp_path / "target.json")
    with pytest.raises(EyrieError, match=r"target.model: no folder data/targets/x"):
        identify(RECIPE, "data/targets/x", tmp_path / "target.json")
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(EyrieError, match=r"owner/name is no local folder and could not be fetched") as caught:
        identify(RECIPE, "owner/name", tmp_path / "target.json")
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_the_snapshot_it_names(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[object] = []

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(tiny_target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    identify({"target": {"revision": "abc"}}, "owner/name", tmp_path / "target.json")
    assert asked == [("owner/name", "abc")]
    assert read_card(tmp_path / "target.json").model == "owner/name"


def test_default_layers() -> None:
    assert default_layers(30) == (2, 15, 27)
    assert default_layers(61) == (2, 30, 58)
    with pytest.raises(EyrieError, match=r"set hidden.layers"):
        default_layers(5)


def test_a_card_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match=r"missing; rebuild"):
        read_card(tmp_path / "target.json")
    (tmp_path / "target.json").write_text('{"model": 5}')
    with pytest.raises(EyrieError, match=r"no target card"):
        read_card(tmp_path / "target.json")
