"""The ends of a target that a drafter needs: embeddings, head, final norm and, where it fits, the last layer.

Only these tensors are read, so a target of a trillion parameters costs a few gigabytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from eyrie.errors import EyrieError

LAYER_NAMES = (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    "input_layernorm.weight", "post_attention_layernorm.weight",
)  # fmt: skip


@dataclass(frozen=True)
class TargetEnds:
    """Tensors of the target, in the dtype of its files.

    Attributes:
        embed_VH, head_VH: embeddings and output head (the same tensor when they are tied).
        final_norm_H: weight of the norm before the head.
        last_layer: :data:`LAYER_NAMES` of the last decoder layer; empty when that layer has another shape of parts
            (mixture of experts, latent attention).
    """

    embed_VH: Tensor
    head_VH: Tensor
    final_norm_H: Tensor
    last_layer: dict[str, Tensor]


def read_ends(folder: Path, num_layers: int) -> TargetEnds:
    """Read the ends out of a Hugging Face folder.

    Raises:
        EyrieError: no safetensors, or no embeddings or final norm under the usual names.
    """
    files = _files_of(folder)
    embed_name = next((name for name in files if name.endswith("embed_tokens.weight")), None)
    if embed_name is None:
        raise EyrieError(f"{folder}: its weights hold no *embed_tokens.weight; this architecture is not known")
    prefix = embed_name.removesuffix("embed_tokens.weight")
    norm_name = prefix + "norm.weight"
    if norm_name not in files:
        raise EyrieError(f"{folder}: its weights hold no {norm_name!r}; this architecture is not known")
    # tied heads are not stored
    head_name = next((name for name in files if name.endswith("lm_head.weight")), embed_name)
    layer = f"{prefix}layers.{num_layers - 1}."
    wanted = {name: layer + name for name in LAYER_NAMES}
    fits = all(name in files for name in wanted.values())
    embed = _read(files, embed_name)
    return TargetEnds(
        embed_VH=embed,
        head_VH=embed if head_name == embed_name else _read(files, head_name),
        final_norm_H=_read(files, norm_name),
        last_layer={name: _read(files, full) for name, full in wanted.items()} if fits else {},
    )


def _files_of(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            names |= dict.fromkeys(reader.keys(), file)
    if not names:
        raise EyrieError(f"{folder}: no *.safetensors there; point target.model at a Hugging Face folder")
    return names


def _read(files: dict[str, Path], name: str) -> Tensor:
    with safe_open(files[name], framework="pt") as reader:
        return reader.get_tensor(name)
