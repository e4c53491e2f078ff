"""The EAGLE-3 drafter (arXiv 2503.01840) exactly as SGLang serves it.

At column ``t`` the drafter reads the embedding of token ``x[t+1]`` and a feature ``f[t]`` of width H, and proposes
``x[t+2]``. The feature of the first draft step is ``fc`` of the target's three auxiliary hidden states at ``t``; later
steps feed the drafter's own un-normed output back. The residual is the un-normed feature.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from eyrie.targets.ends import TargetEnds


class Eagle3Config(BaseModel):
    """Shape and provenance of a drafter; ``config.json`` beside its weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: Literal["eagle3"] = "eagle3"
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, int, int]
    ttt_steps: int
    target_sha: str


class Linear(nn.Linear):
    """A matrix without bias, float32, whose products run in ``compute``; what comes in and goes out is float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.compute = torch.float32

    def forward(self, x_NK: Tensor) -> Tensor:
        return F.linear(x_NK.to(self.compute), self.weight.to(self.compute)).float()


class Attention(nn.Module):
    """Projections of the draft layer's attention; its input is ``[embedding ; feature]``, 2H wide."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        wide = 2 * c.hidden_size
        self.q_proj = Linear(wide, c.num_attention_heads * c.head_dim)
        self.k_proj = Linear(wide, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(wide, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)


class MLP(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x_NH: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_NH)) * self.up_proj(x_NH))


class DraftLayer(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.hidden_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class Eagle3(nn.Module):
    """The trainable part; embeddings are the target's and are not held here.

    Parameter names are the on-disk names: ``fc``, ``midlayer.*``, ``norm``, ``lm_head``; ``d2t`` (int64 offsets
    ``[Dv]``) and ``t2d`` (bool ``[V]``) are buffers.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        H = config.hidden_size
        self.fc = Linear(3 * H, H)
        self.midlayer = DraftLayer(config)
        self.norm = nn.RMSNorm(H, eps=config.rms_norm_eps)
        self.lm_head = Linear(H, config.draft_vocab_size)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def compute_in(self, dtype: torch.dtype) -> Eagle3:
        """Run matrix products in ``dtype``; parameters, norms and the residual stay float32."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.compute = dtype
        return self

    @property
    def compute(self) -> torch.dtype:
        """The dtype of its matrix products."""
        return self.fc.compute

    def target_ids(self) -> Tensor:
        """Target token id of every draft id, int64 ``[Dv]``."""
        return self.d2t + torch.arange(self.config.draft_vocab_size)

    def attention_input(self, embedding_NH: Tensor, feature_NH: Tensor) -> Tensor:
        """``[N, 2H]``: normed embedding first, normed feature second."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embedding_NH), layer.hidden_norm(feature_NH)], dim=-1)

    def finish(self, feature_NH: Tensor, mixed_NA: Tensor) -> Tensor:
        """Residual, output projection and MLP after attention; the un-normed output ``[N, H]``."""
        layer = self.midlayer
        x_NH = feature_NH + layer.self_attn.o_proj(mixed_NA)
        return x_NH + layer.mlp(layer.post_attention_layernorm(x_NH))

    def logits(self, output_NH: Tensor) -> Tensor:
        """Draft logits ``[N, Dv]`` of un-normed outputs."""
        return self.lm_head(self.norm(output_NH))


def start_from_target(drafter: Eagle3, ends: TargetEnds, generator: torch.Generator) -> None:
    """Initialise from the target's last layer and head rows.

    The draft layer then begins as the target's own last step: ``fc`` passes the highest auxiliary state through, the
    feature half of the attention input sees the last layer's projections, and the embedding half, which has no
    counterpart in the target, starts small and random. A target whose last layer has other parts gives its head and
    final norm alone.
    """
    start_at_random(drafter, generator)
    H = drafter.config.hidden_size
    layer, last = drafter.midlayer, ends.last_layer
    with torch.no_grad():
        drafter.norm.weight.copy_(ends.final_norm_H)
        drafter.lm_head.weight.copy_(ends.head_VH[drafter.target_ids()])
        if not last:
            return
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, 2 * H :] = torch.eye(H)
        attention, mlp = layer.self_attn, layer.mlp
        attention.q_proj.weight[:, H:] = last["self_attn.q_proj.weight"].float()
        attention.k_proj.weight[:, H:] = last["self_attn.k_proj.weight"].float()
        attention.v_proj.weight[:, H:] = last["self_attn.v_proj.weight"].float()
        attention.o_proj.weight.copy_(last["self_attn.o_proj.weight"])
        mlp.gate_proj.weight.copy_(last["mlp.gate_proj.weight"])
        mlp.up_proj.weight.copy_(last["mlp.up_proj.weight"])
        mlp.down_proj.weight.copy_(last["mlp.down_proj.weight"])
        layer.hidden_norm.weight.copy_(last["input_layernorm.weight"])
        layer.post_attention_layernorm.weight.copy_(last["post_attention_layernorm.weight"])


def start_at_random(drafter: Eagle3, generator: torch.Generator) -> None:
    """Normal(0, 0.02) matrices, norms at one."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
