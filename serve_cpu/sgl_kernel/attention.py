"""Attention over the paged key-value pool, request by request, so that no answer depends on its company.

Shapes: q ``[tokens, heads, D]``, key and value buffers ``[slots, kv_heads, D]``, ``req_to_token`` as in ``slots``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_DECODE = (
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, "
    "Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float scale, float logit_cap, bool cross, int window, "
    "Tensor? encoder_lens=None, Tensor? sinks=None) -> ()"
)
_EXTEND = (
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_extend, float scale, float logit_cap, bool cross, "
    "int window, Tensor? encoder_lens=None, Tensor? sinks=None, Tensor? tree_mask=None, bool causal=True) -> ()"
)
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register both operators under ``torch.ops.sgl_kernel``, once."""
    if _libraries:
        return
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define(_DECODE)
    library.define(_EXTEND)
    library.impl("decode_attention_cpu", decode_attention, "CPU")
    library.impl("extend_attention_cpu", extend_attention, "CPU")
    _libraries.append(library)  # dropping it would take the operators back


def decode_attention(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float, v_scale: float, o: Tensor, k: Tensor | None,
    v: Tensor | None, loc: Tensor, attn_logits: Tensor, req_to_token: Tensor, req_pool_indices: Tensor,
    seq_lens: Tensor, scale: float, logit_cap: float, cross: bool, window: int,
    encoder_lens: Tensor | None = None, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """One query per request. ``k`` and ``v``, when given, are written to ``loc`` first."""
    _refuse(cross, sinks)
    if k is not None and v is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - window) if window > 0 else 0
        slots = req_to_token[row, first:length].long()
        keys, values = _read(k_buffer, slots, k_scale, q.dtype), _read(v_buffer, slots, v_scale, q.dtype)
        o[b : b + 1] = _attend(q[b : b + 1], keys, values, None, scale, logit_cap)


def extend_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, o: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float,
    v_scale: float, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, extend_seq_lens: Tensor,
    extend_start_loc: Tensor, max_extend: int, scale: float, logit_cap: float, cross: bool, window: int,
    encoder_lens: Tensor | None = None, sinks: Tensor | None = None, tree_mask: Tensor | None = None,
    causal: bool = True,
) -> None:  # fmt: skip
    """The last ``extend_seq_lens`` tokens of each request (already in the pool) over all of it.

    Args:
        tree_mask: flat bool ``[B, n, n]``; n drafts per request that see the prefix and these of each other.
    """
    _refuse(cross, sinks)
    done = 0
    requests = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True
    )
    for row, length, count, start in requests:
        if count == 0:
            continue
        mask = torch.ones(count, length, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, length - count :] = tree_mask.view(-1)[done : done + count * count].view(count, count).bool()
            done += count * count
        elif causal:
            mask = mask.tril(length - count)
        if window > 0:
            at = torch.arange(length - count, length).view(-1, 1)
            mask &= torch.arange(length).view(1, -1) > at - window
        slots = req_to_token[row, :length].long()
        keys, values = _read(k_buffer, slots, k_scale, q.dtype), _read(v_buffer, slots, v_scale, q.dtype)
        o[start : start + count] = _attend(q[start : start + count], keys, values, mask, scale, logit_cap)


def _refuse(cross: bool, sinks: Tensor | None) -> None:
    if cross or sinks is not None:
        what = "cross-attention" if cross else "attention sinks"
        raise NotImplementedError(f"serve_cpu's sgl_kernel has no {what}; serve this model on a GPU")


def _read(buffer: Tensor, slots: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    chosen = buffer[slots].to(dtype)
    return chosen if scale == 1.0 else chosen * scale


def _attend(
    q_TND: Tensor, k_SKD: Tensor, v_SKE: Tensor, mask_TS: Tensor | None, scale: float, logit_cap: float
) -> Tensor:
    """``[T, N, E]``; N query heads share K key heads in groups of N // K."""
    q, k, v = q_TND.transpose(0, 1), k_SKD.transpose(0, 1), v_SKE.transpose(0, 1)
    if logit_cap <= 0:
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], mask_TS, scale=scale, enable_gqa=True)[0]
        return mixed.transpose(0, 1)
    group = len(q) // len(k)
    logits = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
    logits = logit_cap * torch.tanh(logits / logit_cap)
    if mask_TS is not None:
        logits = logits.masked_fill(~mask_TS, -torch.inf)
    return (logits.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1)
