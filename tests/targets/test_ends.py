"""The ends of a target, read without the rest of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie.drafters.eagle3 import Eagle3, Eagle3Config, start_from_target
from eyrie.errors import EyrieError
from eyrie.targets.ends import LAYER_NAMES, read_ends

LAYERS = 6


def changed(tiny_target: Path, folder: Path, change) -> Path:  # type: ignore[no-untyped-def]
    """A copy of the target whose tensors went through ``change``."""
    shutil.copytree(tiny_target, folder)
    state = load_file(folder / "model.safetensors")
    save_file(change(state), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_ends_are_the_tensors_of_the_file(tiny_target: Path) -> None:
    state = load_file(tiny_target / "model.safetensors")
    ends = read_ends(tiny_target, LAYERS)
    assert torch.equal(ends.embed_VH, state["model.embed_tokens.weight"])
    assert torch.equal(ends.head_VH, state.get("lm_head.weight", state["model.embed_tokens.weight"]))
    assert torch.equal(ends.final_norm_H, state["model.norm.weight"])
    assert set(ends.last_layer) == set(LAYER_NAMES)
    assert torch.equal(ends.last_layer["mlp.up_proj.weight"], state["model.layers.5.mlp.up_proj.weight"])


def test_a_nested_text_model_and_a_head_of_its_own(tiny_target: Path, tmp_path: Path) -> None:
    def nest(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nested = {f"language_model.{name}": tensor for name, tensor in state.items()}
        return nested | {"language_model.lm_head.weight": torch.full((600, 64), 0.5)}

    ends = read_ends(changed(tiny_target, tmp_path / "nested", nest), LAYERS)
    assert ends.head_VH.unique().tolist() == [0.5]
    assert set(ends.last_layer) == set(LAYER_NAMES)


def test_a_last_layer_of_other_parts_still_gives_head_and_norm(tiny_target: Path, tmp_path: Path) -> None:
    def experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("mlp.up_proj", "mlp.experts.0.up_proj"): tensor for name, tensor in state.items()}

    ends = read_ends(changed(tiny_target, tmp_path / "experts", experts), LAYERS)
    assert ends.last_layer == {}
    drafter = Eagle3(
        Eagle3Config(
            hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64, vocab_size=600, draft_vocab_size=600,
            layers=(1, 3, 5), ttt_steps=1, target_sha="x",
        )
    )  # fmt: skip
    start_from_target(drafter, ends, torch.Generator().manual_seed(0))
    assert torch.equal(drafter.lm_head.weight, ends.head_VH.float())
    assert torch.equal(drafter.norm.weight, ends.final_norm_H.float())


def test_an_unknown_architecture_is_named(tiny_target: Path, tmp_path: Path) -> None:
    folder = changed(
        tiny_target, tmp_path / "odd", lambda state: {n.replace("embed_tokens", "wte"): t for n, t in state.items()}
    )
    with pytest.raises(EyrieError, match=r"odd: its weights hold no \*embed_tokens.weight"):
        read_ends(folder, LAYERS)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(EyrieError, match=r"no \*.safetensors there"):
        read_ends(folder, LAYERS)
