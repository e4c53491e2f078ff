"""A Llama-family Hugging Face folder as stacked arrays, every key accounted for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from eyrie.errors import EyrieError


@dataclass(frozen=True)
class LlamaConfig:
    """The part of ``config.json`` that decoding needs."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tied: bool

    @classmethod
    def read(cls, folder: Path) -> LlamaConfig:
        """Raises :class:`EyrieError` for an architecture or option this decoder does not implement."""
        raw = json.loads((folder / "config.json").read_text())
        refuse = unsupported(raw)
        if refuse:
            raise EyrieError(f"{folder}/config.json: {refuse}; this target needs the library's own decoder")
        heads = raw["num_attention_heads"]
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab_size=raw["vocab_size"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(rope(raw).get("rope_theta", 10_000.0)),
            max_position_embeddings=raw["max_position_embeddings"],
            tied=bool(raw.get("tie_word_embeddings", False)),
        )


def rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a config: transformers 5 nests them, older files keep them at the top."""
    return {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **(raw.get("rope_parameters") or raw.get("rope_scaling") or {}),
    }


def unsupported(raw: dict[str, Any]) -> str:
    """Why this decoder cannot run the model of ``config.json``; empty when it can."""
    if raw.get("model_type") != "llama":
        return f"model_type {raw.get('model_type')!r} is not llama"
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        return "projections with bias"
    if raw.get("hidden_act", "silu") != "silu":
        return f"activation {raw['hidden_act']!r} is not silu"
    kind = rope(raw).get("rope_type", rope(raw).get("type", "default"))
    if kind != "default":
        return f"rope_type {kind!r} is not default"
    heads = raw["num_attention_heads"]
    if (raw.get("head_dim") or raw["hidden_size"] // heads) % 8:
        return "a head size that is no multiple of 8"
    return ""


@dataclass
class LlamaWeights:
    """Weights in the dtype of the file (bfloat16 or float32), stacked over layers.

    Shapes: ``embed_VH``, ``head_VH`` (the same tensor when tied), ``qkv_LNH`` with N = (heads + 2 * kv heads) * head
    size, ``o_LHN``, ``gate_up_LNH`` with N = 2 * intermediate size, ``down_LHI``; norms are float32.
    """

    config: LlamaConfig
    embed_VH: Tensor
    head_VH: Tensor
    final_norm_H: Tensor
    attention_norm_LH: Tensor
    mlp_norm_LH: Tensor
    qkv_LNH: Tensor
    o_LHN: Tensor
    gate_up_LNH: Tensor
    down_LHI: Tensor

    @classmethod
    def load(cls, folder: Path) -> LlamaWeights:
        """Read ``*.safetensors`` of ``folder``.

        Raises:
            EyrieError: a tensor is missing, left over, or of a dtype other than bfloat16, float16 or float32.
        """
        config = LlamaConfig.read(folder)
        state = read_state(folder)

        def take(name: str) -> Tensor:
            try:
                tensor = state.pop(name)
            except KeyError:
                raise EyrieError(
                    f"{folder}: the weights lack {name!r}; the folder is incomplete, fetch it again"
                ) from None
            # float16 has other exponent bits, so it is widened once; bfloat16 stays as it is
            return tensor if tensor.dtype in (torch.bfloat16, torch.float32) else tensor.float()

        def stack(*names: str) -> Tensor:
            layers = range(config.num_layers)
            return torch.stack([torch.cat([take(f"model.layers.{i}.{n}.weight") for n in names]) for i in layers])

        embed = take("model.embed_tokens.weight")
        weights = cls(
            config=config,
            embed_VH=embed,
            head_VH=embed if config.tied else take("lm_head.weight"),
            final_norm_H=take("model.norm.weight").float(),
            attention_norm_LH=stack("input_layernorm").float(),
            mlp_norm_LH=stack("post_attention_layernorm").float(),
            qkv_LNH=stack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o_LHN=stack("self_attn.o_proj"),
            gate_up_LNH=stack("mlp.gate_proj", "mlp.up_proj"),
            down_LHI=stack("mlp.down_proj"),
        )
        state.pop("lm_head.weight", None)
        rest = [name for name in state if not name.endswith("rotary_emb.inv_freq")]
        if rest:
            raise EyrieError(
                f"{folder}: holds {len(rest)} tensors a Llama has not ({rest[0]!r}, ...): not this architecture"
            )
        return weights

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """``cos, sin`` of shape ``[length, head_dim / 2]``, float32."""
        return rotary(length, self.config.head_dim, self.config.rope_theta)


def rotary(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """``cos, sin`` tables of shape ``[length, head_dim / 2]``, float32, as transformers computes them."""
    frequency = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    angle = torch.arange(length).float()[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over the last dimension; ``cos`` and ``sin`` broadcast against its halves."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def read_state(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, by name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EyrieError(f"{folder}: no *.safetensors there; point target.model at a Hugging Face folder")
    state: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (safe_open is no mapping)
                state[name] = reader.get_tensor(name)
    return state


def storage(weight: Tensor) -> np.ndarray:
    """The weight as numpy holds it: bfloat16 bits as uint16, float32 as is. Shares memory."""
    if weight.dtype == torch.bfloat16:
        return weight.contiguous().view(torch.uint16).numpy()
    return weight.contiguous().numpy()


def widened_rows(stored_VH: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Rows ``[M, H]`` of a table that :func:`storage` gave, float32."""
    rows = stored_VH[ids]
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows
