"""Draft trees: their shape, the slots their branches read, and greedy verification.

A tree of n tokens is a row of n places: place 0 is the root (the last emitted token), places 1 to n - 1 are drafts in
the order in which the drafter's candidates are listed. Candidates of step 0 are numbered 0 to topk - 1; each later step
lists topk candidates for every one of its topk parents.
"""

from __future__ import annotations

import torch
from torch import Tensor

QLEN_ONLY = 1
"""SGLang's mask mode on a CPU: n x n per request, drafts only; the prefix is always seen."""


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_verify: int,
    mask_mode: int,
) -> None:
    """Lay out the tree of each request.

    Args:
        parent_list: ``[B, 1 + topk * (steps - 1)]``: candidate numbers of the parents that later steps expand.
        selected_index: ``[B, n - 1]`` ascending candidate numbers of the drafts that are verified.
        tree_mask: bool, filled as ``[B, n, n]``: place i sees place j, its ancestors and itself.
        positions: filled with ``seq_len + depth of the place``.
        retrieve_index: ``[B, n]`` filled with the place's number in the flat batch.
        retrieve_next_token, retrieve_next_sibling: ``[B, n]``, -1 on entry: first child and next sibling.

    Raises:
        NotImplementedError: another mask mode.
    """
    if int(mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"serve_cpu's sgl_kernel builds QLEN_ONLY tree masks, not mode {int(mask_mode)}")
    B, n = len(seq_lens), num_verify
    mask_Bnn = torch.zeros(B, n, n, dtype=torch.bool)
    depth_Bn = torch.zeros(B, n, dtype=torch.int64)
    for b in range(B):
        parents = _parents(parent_list[b].tolist(), selected_index[b].tolist(), topk)
        mask_Bnn[b, 0, 0] = True
        for place, parent in enumerate(parents, start=1):
            mask_Bnn[b, place] = mask_Bnn[b, parent]
            mask_Bnn[b, place, place] = True
            depth_Bn[b, place] = depth_Bn[b, parent] + 1
        for place in range(n - 1, 0, -1):  # backwards, so that the first child in order ends up in front
            parent = parents[place - 1]
            retrieve_next_sibling[b, place] = retrieve_next_token[b, parent]
            retrieve_next_token[b, parent] = place
    tree_mask.view(-1)[: B * n * n] = mask_Bnn.reshape(-1).to(tree_mask.dtype)
    positions.view(B, n).copy_(seq_lens.view(B, 1) + depth_Bn)
    retrieve_index.copy_(torch.arange(B * n).view(B, n))


def _parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """Place of the parent of places 1, 2, ...: ancestors come first, so it is always an earlier one."""
    if topk == 1:  # a chain, for which SGLang may leave the parents out
        return list(range(len(selected)))
    place_of = {candidate: place for place, candidate in enumerate(selected, start=1)}
    return [0 if number < topk else place_of[parent_list[number // topk]] for number in selected]


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """Slots that each branch reads while drafting, ``[B * topk, pool_len]``.

    Row ``b * topk + k``: the prefix of request b, then the ``num_steps`` slots of branch k. The drafts of request b
    stand behind its prefix, branch by branch.
    """
    rows = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    if topk == 1:
        return rows
    for b, length in enumerate(seq_lens.tolist()):
        for k in range(1, topk):
            first = length + k * num_steps
            slots = rows[b * topk, first : first + num_steps].clone()
            rows[b * topk + k, length : length + len(slots)] = slots
    return rows


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk from the root to the child that holds the target's own choice, as long as there is one.

    Args:
        predicts: flat over the batch; filled with the target's choice at each accepted place.
        accept_index: ``[B, depth]``, filled with the flat numbers of the root and the accepted places.
        accept_token_num: ``[B]``, filled with the count of accepted drafts (root not counted).
        candidates: ``[B, n]`` tokens of the places.
        target_predict: ``[B, n]`` the target's choice behind each place.
    """
    target = target_predict.view(candidates.shape)
    for b in range(len(candidates)):
        place, accepted = 0, 0
        accept_index[b, 0] = retrive_index[b, 0]
        while True:
            wanted = int(target[b, place])
            predicts[int(retrive_index[b, place])] = wanted
            child = int(retrive_next_token[b, place]) if accepted + 1 < accept_index.shape[1] else -1
            while child != -1 and int(candidates[b, child]) != wanted:
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            accepted += 1
            accept_index[b, accepted] = retrive_index[b, child]
            place = child
        accept_token_num[b] = accepted
