"""Bookkeeping of key-value slots and tokens: which slot of the pool holds which token of which request.

``req_to_token`` is int32 ``[requests, longest]``: row r holds the slots of request r in order. All functions write
into a tensor of the caller and return nothing.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write the new slots ``out_cache_loc`` (all requests behind one another) into columns [start, end) of each row."""
    done = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[done : done + last - first].to(req_to_token.dtype)
        done += last - first


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read columns [start, end) of each row into ``out_cache_loc``, all requests behind one another."""
    done = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[done : done + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        done += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Read the ``topk * num_cols`` slots behind each sequence, where its drafts will be written."""
    count = topk * num_cols
    for place, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, length : length + count]
        out_cache_loc[place * count : (place + 1) * count] = slots.to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move slots ``src_loc`` to ``tgt_loc`` in every buffer.

    Args:
        data_ptrs: addresses of the buffers (keys and values of each layer).
        strides: bytes per slot of each buffer.
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, width in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # all are read before one is written: a target may be a source as well
        rows = [ctypes.string_at(base + source * width, width) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * width, row, width)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Slots of the accepted tokens (``accept_index`` >= 0), packed to the front."""
    chosen = accept_index.reshape(-1)
    chosen = chosen[chosen >= 0].long()
    accept_out_cache_loc[: len(chosen)] = out_cache_loc[chosen].to(accept_out_cache_loc.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    """The last accepted token of each request; ``accept_lens`` counts it."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype))


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens one to the left and put its newest token at ``select_index`` (default: the end)."""
    newest = topk_index.reshape(len(extend_seq_lens), -1)[:, 0].tolist() if len(extend_seq_lens) else []
    for place, (first, count) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if count == 0:
            continue
        input_ids[first : first + count - 1] = input_ids[first + 1 : first + count].clone()
        input_ids[int(select_index[place]) if select_index is not None else first + count - 1] = newest[place]
