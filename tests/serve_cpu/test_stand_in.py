"""The stand-in for sgl_kernel: attention against a plain softmax, trees against their definition, slots by hand."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

FOLDER = Path(__file__).parents[2] / "serve_cpu"


@pytest.fixture(scope="module")
def kernel() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("sgl_kernel")
    finally:
        sys.path.remove(str(FOLDER))


# ---- trees ----
def random_tree(rng: random.Random, topk: int, steps: int, count: int) -> tuple[list[int], list[int], dict[int, int]]:
    """What SGLang hands over for one request, and the parent candidate of each candidate (-1: the root).

    Step 0 lists topk candidates; each later step expands topk of the last step's, and lists topk for each of them.
    """
    parent_of = dict.fromkeys(range(topk), -1)
    parent_list = [-1, *range(topk)]
    beam, offset = list(range(topk)), topk
    for _ in range(1, steps):
        listed = list(range(offset, offset + topk * topk))
        for number in listed:
            parent_of[number] = beam[(number - offset) // topk]
        beam = sorted(rng.sample(listed, topk))
        offset += topk * topk
        parent_list += beam
    # verified drafts: ancestors of a chosen one are always chosen too
    chosen: set[int] = set()
    while len(chosen) < count - 1:
        open_ones = [n for n, parent in parent_of.items() if n not in chosen and (parent == -1 or parent in chosen)]
        chosen.add(rng.choice(open_ones))
    return parent_list[: 1 + topk * (steps - 1)], sorted(chosen), parent_of


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), topk=st.integers(1, 4), steps=st.integers(2, 4), batch=st.integers(1, 3))
def test_a_tree_has_the_shape_that_its_candidates_define(
    kernel: Any, seed: int, topk: int, steps: int, batch: int
) -> None:
    rng = random.Random(seed)
    n = steps + 1 if topk == 1 else rng.randint(2, topk + (steps - 1) * topk)
    trees = [random_tree(rng, topk, steps, n) for _ in range(batch)]
    lengths = [rng.randint(3, 40) for _ in range(batch)]
    mask, positions, index, child, sibling = build(kernel, trees, lengths, topk, steps, n)

    for b, (_, selected, parent_of) in enumerate(trees):
        place = {number: at for at, number in enumerate(selected, start=1)}
        parents = [place.get(parent_of[number], 0) for number in selected]
        for at in range(n):
            ancestors = {at}
            while at > 0 and min(ancestors) > 0:
                ancestors.add(parents[min(ancestors) - 1])
            assert set(mask[b, at].nonzero()[:, 0].tolist()) == ancestors
            assert int(positions[b, at]) == lengths[b] + len(ancestors) - 1
            children = []
            step = int(child[b, at])
            while step != -1:
                children.append(step)
                step = int(sibling[b, step])
            assert children == [p for p, parent in enumerate(parents, start=1) if parent == at]
        assert index[b].tolist() == list(range(b * n, b * n + n))


def build(kernel: Any, trees: list[Any], lengths: list[int], topk: int, steps: int, n: int) -> tuple[Any, ...]:
    B = len(trees)
    mask = torch.ones(B * n * n, dtype=torch.bool)
    positions = torch.empty(B * n, dtype=torch.int64)
    index, child, sibling = torch.full((3, B, n), -1)
    kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([tree[0] for tree in trees]), torch.tensor([tree[1] for tree in trees]), torch.tensor(lengths),
        mask, positions, index, child, sibling, topk, steps, n, 1,
    )  # fmt: skip
    return mask.view(B, n, n), positions.view(B, n), index, child, sibling


def test_other_mask_modes_are_refused_by_name(kernel: Any) -> None:
    with pytest.raises(NotImplementedError, match="QLEN_ONLY"):
        kernel.build_tree_kernel_efficient_cpu(*[torch.zeros(1, 1)] * 8, 1, 1, 1, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), topk=st.integers(1, 3), batch=st.integers(1, 3))
def test_verification_accepts_the_longest_path_that_the_target_agrees_with(
    kernel: Any, seed: int, topk: int, batch: int
) -> None:
    rng, steps = random.Random(seed), 3
    n = steps + 1 if topk == 1 else rng.randint(3, topk + 2 * topk)
    trees = [random_tree(rng, topk, steps, n) for _ in range(batch)]
    _, _, index, child, sibling = build(kernel, trees, [5] * batch, topk, steps, n)
    candidates = torch.tensor([[rng.randint(0, 3) for _ in range(n)] for _ in range(batch)])
    target = torch.tensor([[rng.randint(0, 3) for _ in range(n)] for _ in range(batch)])
    predicts = torch.full((batch * n,), -9)
    accept_index = torch.full((batch, steps + 1), -1)
    accepted = torch.zeros(batch, dtype=torch.int64)
    kernel.verify_tree_greedy_cpu(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted, candidates=candidates,
        retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling, target_predict=target,
    )  # fmt: skip
    for b, (_, selected, parent_of) in enumerate(trees):
        place = {number: at for at, number in enumerate(selected, start=1)}
        parents = [place.get(parent_of[number], 0) for number in selected]
        path = [0]
        while True:
            wanted = int(target[b, path[-1]])
            fitting = [at for at in range(1, n) if parents[at - 1] == path[-1] and int(candidates[b, at]) == wanted]
            if not fitting:
                break
            path.append(fitting[0])
        assert accept_index[b, : len(path)].tolist() == [b * n + at for at in path]
        assert (accept_index[b, len(path) :] == -1).all()
        assert int(accepted[b]) == len(path) - 1
        assert [int(predicts[b * n + at]) for at in path] == [int(target[b, at]) for at in path]


def test_each_branch_reads_the_prefix_and_its_own_slots(kernel: Any) -> None:
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    rows = kernel.build_draft_decode_metadata_cpu(table, torch.tensor([1, 0]), torch.tensor([4, 2]), 3, 2, 20)
    assert rows.shape == (6, 20)
    for (b, first, length), k in itertools.product([(0, 20, 4), (1, 0, 2)], range(3)):
        row = rows[b * 3 + k].tolist()
        assert row[:length] == list(range(first, first + length))
        assert row[length : length + 2] == [first + length + 2 * k, first + length + 2 * k + 1]
    assert table.tolist() == torch.arange(40).view(2, 20).tolist()


# ---- attention ----
def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, cap: float = 0.0) -> Any:
    """Softmax attention of one request, head by head."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2])
    for head in range(q.shape[1]):
        shared = head * k.shape[1] // q.shape[1]
        logits = q[:, head] @ k[:, shared].T * scale
        logits = cap * torch.tanh(logits / cap) if cap else logits
        out[:, head] = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, shared]
    return out


class Pool:
    """Two requests whose slots lie scattered in one pool."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.k, self.v = torch.randn(50, 2, 8), torch.randn(50, 2, 8)
        self.table = torch.randperm(50)[:40].view(2, 20).to(torch.int32)
        self.rows, self.lengths = torch.tensor([1, 0]), torch.tensor([11, 6])

    def of(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.table[self.rows[b], : self.lengths[b]].long()
        return self.k[slots], self.v[slots]


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 4])
def test_decode_attention_equals_a_plain_softmax(kernel: Any, window: int, cap: float) -> None:
    pool = Pool()
    q, o = torch.randn(2, 4, 8), torch.zeros(2, 4, 8)
    new_k, new_v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    slots = torch.tensor([pool.table[row, length - 1] for row, length in zip(pool.rows, pool.lengths, strict=True)])
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, pool.k, pool.v, 1.0, 1.0, o, new_k, new_v, slots.long(), torch.empty(0), pool.table, pool.rows,
        pool.lengths, 0.3, cap, False, window,
    )  # fmt: skip
    assert torch.equal(pool.k[slots.long()], new_k)
    for b in range(2):
        keys, values = pool.of(b)
        seen = torch.arange(len(keys)) >= (len(keys) - window if window else 0)
        torch.testing.assert_close(o[b : b + 1], plain(q[b : b + 1], keys, values, seen[None], 0.3, cap))


@pytest.mark.parametrize("mode", ["causal", "all", "tree", "window"])
def test_extend_attention_equals_a_plain_softmax(kernel: Any, mode: str) -> None:
    pool = Pool()
    counts = torch.tensor([3, 3])
    q, o = torch.randn(6, 4, 8), torch.zeros(6, 4, 8)
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]], dtype=torch.bool)
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, None, None, o, pool.k, pool.v, 1.0, 1.0, pool.table, pool.rows, pool.lengths, counts,
        torch.tensor([0, 3]), 3, 0.3, 0.0, False, 2 if mode == "window" else 0, None, None,
        tree.reshape(-1) if mode == "tree" else None, mode != "all",
    )  # fmt: skip
    for b in range(2):
        keys, values = pool.of(b)
        mask = torch.ones(3, len(keys), dtype=torch.bool)
        if mode == "tree":
            mask[:, -3:] = tree[b]
        elif mode != "all":
            mask = mask.tril(len(keys) - 3)
        if mode == "window":
            mask = mask.triu(len(keys) - 3 - 1)
        torch.testing.assert_close(o[3 * b : 3 * b + 3], plain(q[3 * b : 3 * b + 3], keys, values, mask, 0.3))


@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (0.5, 0.25)])
def test_an_fp8_cache_is_read_as_what_it_stands_for(kernel: Any, k_scale: float, v_scale: float) -> None:
    pool = Pool()
    stored_k, stored_v = (pool.k / k_scale).to(torch.float8_e4m3fn), (pool.v / v_scale).to(torch.float8_e4m3fn)
    pool.k, pool.v = stored_k.float() * k_scale, stored_v.float() * v_scale
    q, o = torch.randn(2, 4, 8), torch.zeros(2, 4, 8)
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, stored_k, stored_v, k_scale, v_scale, o, None, None, torch.empty(0), torch.empty(0), pool.table, pool.rows,
        pool.lengths, 0.3, 0.0, False, 0,
    )  # fmt: skip
    extended = torch.zeros(2, 4, 8)
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, None, None, extended, stored_k, stored_v, k_scale, v_scale, pool.table, pool.rows, pool.lengths,
        torch.tensor([1, 1]), torch.tensor([0, 1]), 1, 0.3, 0.0, False, 0,
    )  # fmt: skip
    for b in range(2):
        keys, values = pool.of(b)
        right = plain(q[b : b + 1], keys, values, torch.ones(1, len(keys), dtype=torch.bool), 0.3)
        torch.testing.assert_close(o[b : b + 1], right)
        torch.testing.assert_close(extended[b : b + 1], right)


def test_what_it_does_not_have_is_refused_by_name(kernel: Any) -> None:
    pool = Pool()
    with pytest.raises(NotImplementedError, match="attention sinks"):
        torch.ops.sgl_kernel.decode_attention_cpu(
            torch.randn(2, 4, 8), pool.k, pool.v, 1.0, 1.0, torch.zeros(2, 4, 8), None, None, torch.empty(0),
            torch.empty(0), pool.table, pool.rows, pool.lengths, 0.3, 0.0, False, 0, None, torch.ones(4),
        )  # fmt: skip
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed"), "SGLang would take this for AMX kernels"


# ---- slots ----
def test_slots_are_written_and_read_row_by_row(kernel: Any) -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([4, 2])
    kernel.assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([10, 11, 12, 20, 21]), 8)
    assert table.tolist() == [[20, 21, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 10, 11, 12, 0, 0, 0, 0]]
    out = torch.zeros(5, dtype=torch.int64)
    kernel.assign_extend_cache_locs_cpu(rows, table, start, end, out, 8)
    assert out.tolist() == [10, 11, 12, 20, 21]
    drafts = torch.zeros(4, dtype=torch.int64)
    kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, torch.tensor([1, 0]), drafts, 8, 2, 1)
    assert drafts.tolist() == [10, 11, 20, 21]


def test_moved_slots_may_overlap(kernel: Any) -> None:
    keys, values = torch.arange(12.0).view(6, 2), torch.arange(6.0).view(6, 1) + 100
    pointers = torch.tensor([keys.data_ptr(), values.data_ptr()])
    kernel.copy_all_layer_kv_cache_cpu(pointers, torch.tensor([8, 4]), torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert keys.tolist() == [[0, 1], [4, 5], [2, 3], [6, 7], [8, 9], [10, 11]]
    assert values.flatten().tolist() == [100, 102, 101, 103, 104, 105]


def test_accepted_slots_bonus_tokens_and_rotation(kernel: Any) -> None:
    out = torch.zeros(3, dtype=torch.int64)
    kernel.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [4, -1, -1]]), torch.arange(50, 56), out)
    assert out.tolist() == [50, 52, 54]
    bonus = torch.zeros(2, dtype=torch.int32)
    kernel.fill_bonus_tokens_cpu(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [3, 4]
    ids = torch.tensor([1, 2, 3, 4, 5])
    kernel.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[8], [9]]))
    assert ids.tolist() == [2, 3, 8, 5, 9]
    kernel.rotate_input_ids_cpu(ids, torch.tensor([0]), torch.tensor([3]), torch.tensor([7]), torch.tensor([1]))
    assert ids.tolist() == [3, 7, 8, 5, 9]
