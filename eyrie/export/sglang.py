"""SGLang's EAGLE-3 layout (``LlamaForCausalLMEagle3``): key table, config table, gates, and a reader with its rules.

The target's embeddings are not exported: SGLang puts the target's own in place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyrie.drafters.eagle3 import Eagle3, Eagle3Config
from eyrie.errors import EyrieError
from eyrie.export.base import AGAIN, TensorSpec, check_config, check_tensors, check_vocabulary
from eyrie.targets.card import TargetCard

CONVENTION = "boundary: id k is the residual stream entering decoder layer k, hidden_states[k] of transformers"

# the drafter's name -> SGLang's name
NAMES = {
    "fc.weight": "fc.weight",
    "midlayer.hidden_norm.weight": "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight": "midlayer.input_layernorm.weight",
    "midlayer.self_attn.q_proj.weight": "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight": "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight": "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight": "midlayer.self_attn.o_proj.weight",
    "midlayer.post_attention_layernorm.weight": "midlayer.post_attention_layernorm.weight",
    "midlayer.mlp.gate_proj.weight": "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight": "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight": "midlayer.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "d2t": "d2t",
    "t2d": "t2d",
}

# targets whose SGLang class adds 1 to the ids only when the first of them is 1
SHIFT_ONLY_FROM_ONE = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "kimi_k25"}
# targets whose rule changed between SGLang's versions; ids that begin with 1 mean the same in all of them
UNSETTLED = {"gpt_oss"}


def to_tensors(drafter: Eagle3) -> dict[str, Tensor]:
    """SGLang's tensors: floats as bfloat16, ``d2t`` int64 offsets, ``t2d`` bool. Nothing left over, nothing missing."""
    state = drafter.state_dict()
    if set(state) != set(NAMES):
        raise RuntimeError(f"the drafter's tensors and the key table differ: {sorted(set(state) ^ set(NAMES))}")
    return {
        NAMES[name]: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in state.items()
    }


def tensor_specs(c: Eagle3Config) -> dict[str, TensorSpec]:
    """What ``model.safetensors`` must hold."""
    H, I, Dv = c.hidden_size, c.intermediate_size, c.draft_vocab_size  # noqa: E741 (the letter of the paper's shapes)
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes = {
        "fc.weight": (H, 3 * H),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * H),
        "midlayer.self_attn.k_proj.weight": (key, 2 * H),
        "midlayer.self_attn.v_proj.weight": (key, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, query),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (I, H),
        "midlayer.mlp.up_proj.weight": (I, H),
        "midlayer.mlp.down_proj.weight": (H, I),
        "norm.weight": (H,),
        "lm_head.weight": (Dv, H),
    }
    floats = {name: TensorSpec(shape, torch.bfloat16) for name, shape in shapes.items()}
    return {
        **floats,
        "d2t": TensorSpec((Dv,), torch.int64),
        "t2d": TensorSpec((c.vocab_size,), torch.bool),
    }


def to_config(drafter: Eagle3, card: TargetCard) -> dict[str, Any]:
    """SGLang's ``config.json``; its ``eyrie`` block says where the drafter comes from."""
    return config_table(drafter.config, card.model_type, card.num_layers)


def config_table(c: Eagle3Config, target_model_type: str, target_num_layers: int) -> dict[str, Any]:
    """Every key and its value. Raises :class:`EyrieError` when the layers cannot be expressed for this target."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_position_embeddings,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "num_aux_hidden_states": 3,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": engine_layer_ids(c.layers, target_model_type),
        },
        # not SGLang's: vLLM reads boundary ids, and reads them here
        "eagle_aux_hidden_state_layer_ids": list(c.layers),
        "eyrie": {
            "algorithm": c.algorithm,
            "layers": list(c.layers),
            "layer_convention": CONVENTION,
            "ttt_steps": c.ttt_steps,
            "target": c.target_sha,
            "target_model_type": target_model_type,
            "target_num_layers": target_num_layers,
        },
    }


def engine_layer_ids(layers: tuple[int, ...], model_type: str) -> list[int]:
    """Boundary ids in the numbers that SGLang expects for this family of targets.

    SGLang counts layer outputs, so most families get ``k - 1``. Where :func:`captured_layers` of the result would not
    give ``layers`` again, there is no way to ask for them:

    Raises:
        EyrieError: the embeddings (boundary 0), or ids that the family's rule cannot express.
    """
    shifted = [layer - 1 for layer in layers]
    candidates = [shifted, list(layers)] if model_type in SHIFT_ONLY_FROM_ONE else [shifted]
    for ids in candidates:
        if min(ids) >= 0 and captured_layers(ids, model_type) == tuple(layers):
            return ids
    raise EyrieError(
        f"hidden.layers: SGLang cannot capture {list(layers)} of a {model_type} target; "
        "choose others, such as the default (the first of them 2)"
    )


def captured_layers(ids: list[int], model_type: str) -> tuple[int, ...]:
    """Boundary ids that SGLang captures when the config says ``ids``; empty when its versions disagree."""
    if model_type in UNSETTLED and ids[0] != 1:
        return ()
    if model_type in SHIFT_ONLY_FROM_ONE and ids[0] != 1:
        return tuple(ids)
    return tuple(layer + 1 for layer in ids)


def gate(folder: Path) -> None:
    """Check an exported folder against both tables.

    Raises:
        EyrieError: a tensor or key is missing, left over or misspelt, has another shape, dtype or value, is not
            finite, the token map is no map of offsets, or the layer ids are not those the drafter was trained on.
    """
    config, tensors = _load(folder)
    where = folder / "config.json"
    block = config.get("eyrie")
    if not isinstance(block, dict) or block.get("layer_convention") != CONVENTION:
        raise EyrieError(f"{where}: lacks the 'eyrie' block with its layer convention; {AGAIN}")
    count = block.get("target_num_layers")
    if not isinstance(count, int):
        raise EyrieError(f"{where}: 'eyrie.target_num_layers' is {count!r}, expected a number; {AGAIN}")
    c = _drafter_config(config, where)
    check_config(config, config_table(c, str(block.get("target_model_type")), count), where)
    if c.layers[-1] >= count:
        raise EyrieError(f"{where}: layer {c.layers[-1]} lies beyond the target's last, {count - 1}; {AGAIN}")
    check_tensors(tensors, tensor_specs(c), folder / "model.safetensors")
    check_vocabulary(tensors["d2t"], tensors["t2d"], folder / "model.safetensors")


def read_back(folder: Path) -> Eagle3:
    """Gate ``folder``, then load it by SGLang's rules: what this returns is what SGLang would run.

    Raises:
        EyrieError: the folder fails a gate.
    """
    gate(folder)
    return load_as_engine(folder)


def load_as_engine(folder: Path) -> Eagle3:
    """Load as SGLang's loader does, its silences included.

    ``layers.0`` is another name of ``midlayer``, ``d2t`` is added to the draft ids, ``t2d`` is ignored, a name that is
    no parameter is dropped, a parameter that no name fills keeps what it had (NaN here, so that it shows), and layer
    ids come from ``eagle_config`` alone, else from SGLang's own default.
    """
    config, tensors = _load(folder)
    block = config["eyrie"]
    nested = config.get("eagle_config") or {}
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    count = block["target_num_layers"]
    layers = (2, count // 2, count - 3) if ids is None else captured_layers(ids, block["target_model_type"])
    drafter = Eagle3(_drafter_config({**config, "eyrie": {**block, "layers": layers}}, folder / "config.json"))
    parameters = dict(drafter.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(float("nan"))
        for name, tensor in tensors.items():
            if "d2t" in name:
                hot_token_ids = tensor + torch.arange(len(tensor))
                drafter.d2t.copy_(hot_token_ids - torch.arange(len(tensor)))
                drafter.t2d[hot_token_ids.clamp(0, len(drafter.t2d) - 1)] = True
                continue
            name = name.replace("layers.0.", "midlayer.")
            if name in parameters:
                parameters[name].copy_(tensor)
    return drafter


def _drafter_config(config: Mapping[str, Any], where: Path) -> Eagle3Config:
    """The drafter that a config describes, by the keys that SGLang reads."""
    block = config["eyrie"]
    try:
        return Eagle3Config(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            max_position_embeddings=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["draft_vocab_size"],
            algorithm=block["algorithm"],
            layers=block["layers"],
            ttt_steps=block["ttt_steps"],
            target_sha=block["target"],
        )
    except KeyError as error:
        raise EyrieError(f"{where}: lacks {error.args[0]!r}; {AGAIN}") from error
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:160]
        raise EyrieError(f"{where}: describes no drafter ({why}); {AGAIN}") from error


def _load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise EyrieError(f"{error.filename or folder / 'model.safetensors'}: missing; {AGAIN}") from None
    except (ValueError, SafetensorError) as error:
        raise EyrieError(f"{folder}: truncated or no export ({error}); {AGAIN}") from error
