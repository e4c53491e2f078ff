"""Loading a Llama folder: every key accounted for, everything unsupported refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie.errors import EyrieError
from eyrie.llama.weights import LlamaConfig, LlamaWeights, rotary


@pytest.fixture
def folder(tiny_target: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_target / name, tmp_path)
    return tmp_path


def state_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def set_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def fault(folder: Path) -> str:
    with pytest.raises(EyrieError) as caught:
        LlamaWeights.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_every_tensor_lands_where_it_belongs(tiny_target: Path) -> None:
    weights, state = LlamaWeights.load(tiny_target), state_of(tiny_target)
    c = weights.config
    assert (c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim) == (64, 6, 4, 2, 16)
    assert c.tied
    assert weights.head_VH is weights.embed_VH
    found: dict[str, Tensor] = {
        "model.embed_tokens.weight": weights.embed_VH,
        "model.norm.weight": weights.final_norm_H,
    }
    for i in range(c.num_layers):
        query, key, value = weights.qkv_LNH[i].split([64, 32, 32])
        gate, up = weights.gate_up_LNH[i].split(128)
        parts = {
            "input_layernorm": weights.attention_norm_LH[i], "post_attention_layernorm": weights.mlp_norm_LH[i],
            "self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value,
            "self_attn.o_proj": weights.o_LHN[i], "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": weights.down_LHI[i],
        }  # fmt: skip
        found |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in parts.items()}
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name].float(), tensor.float()), name
    assert weights.qkv_LNH.dtype == torch.bfloat16
    assert weights.final_norm_H.dtype == torch.float32


def test_an_untied_head_is_its_own_tensor(folder: Path) -> None:
    state = state_of(folder)
    state["lm_head.weight"] = torch.randn(600, 64).bfloat16()
    save_file(state, folder / "model.safetensors")
    set_config(folder, tie_word_embeddings=False)
    weights = LlamaWeights.load(folder)
    assert torch.equal(weights.head_VH, state["lm_head.weight"])
    assert torch.equal(weights.embed_VH, state["model.embed_tokens.weight"])


def test_a_tied_folder_may_carry_the_head_twice(folder: Path) -> None:
    state = state_of(folder)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors")
    weights = LlamaWeights.load(folder)
    assert weights.head_VH is weights.embed_VH


def test_float16_is_widened(folder: Path) -> None:
    state = {name: tensor.half() for name, tensor in state_of(folder).items()}
    save_file(state, folder / "model.safetensors")
    weights = LlamaWeights.load(folder)
    assert weights.down_LHI.dtype == torch.float32
    assert torch.equal(weights.down_LHI[3], state["model.layers.3.mlp.down_proj.weight"].float())


def test_several_files_are_one_state(folder: Path, tiny_target: Path) -> None:
    state = state_of(folder)
    names = sorted(state)
    (folder / "model.safetensors").unlink()
    save_file({n: state[n] for n in names[:20]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: state[n] for n in names[20:]}, folder / "model-00002-of-00002.safetensors")
    assert torch.equal(LlamaWeights.load(folder).qkv_LNH, LlamaWeights.load(tiny_target).qkv_LNH)


def test_a_missing_key_is_named(folder: Path) -> None:
    state = state_of(folder)
    del state["model.layers.4.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors")
    assert "model.layers.4.mlp.up_proj.weight" in fault(folder)


def test_a_head_that_is_neither_tied_nor_there_is_missed(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=False)
    assert "lm_head.weight" in fault(folder)


def test_a_leftover_key_is_named(folder: Path) -> None:
    state = state_of(folder)
    state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(state, folder / "model.safetensors")
    assert "model.layers.0.self_attn.q_norm.weight" in fault(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "safetensors" in fault(folder)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "qwen3"}, "qwen3"),
        ({"attention_bias": True}, "bias"),
        ({"mlp_bias": True}, "bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0}}, "llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"head_dim": 12}, "head size"),
    ],
)
def test_what_this_decoder_cannot_run_is_refused(folder: Path, values: dict[str, Any], named: str) -> None:
    set_config(folder, **values)
    message = fault(folder)
    assert named in message
    assert "config.json" in message


def test_older_configs_keep_the_rope_base_at_the_top(folder: Path) -> None:
    set_config(folder, rope_parameters=None, rope_theta=123456.0)
    assert LlamaConfig.read(folder).rope_theta == 123456.0


def test_rotary_tables_are_the_library_s(tiny_library) -> None:  # type: ignore[no-untyped-def]
    cos, sin = rotary(50, 16, 10_000.0)
    expected_cos, expected_sin = tiny_library.model.rotary_emb(torch.zeros(1), torch.arange(50)[None])
    assert torch.equal(torch.cat([cos, cos], -1), expected_cos[0])
    assert torch.equal(torch.cat([sin, sin], -1), expected_sin[0])
