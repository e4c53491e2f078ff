"""The batched decoder gives the library's logits, and the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie.llama.batch import GROW, BatchDecoder, row_quantum
from eyrie.llama.weights import LlamaWeights


@pytest.fixture(scope="module")
def weights(tiny_target: Path) -> LlamaWeights:
    torch.set_num_threads(1)
    return LlamaWeights.load(tiny_target)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 600, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


@torch.inference_mode()
def test_equals_the_library_in_slots_of_different_lengths(weights: LlamaWeights, tiny_library) -> None:  # type: ignore[no-untyped-def]
    prompts = {3: prompt(1), 0: prompt(7), 4: prompt(8), 1: prompt(33)}
    steps = 5
    tails = {slot: prompt(steps, seed=slot + 1) for slot in prompts}
    decoder = BatchDecoder(weights, slots=5)
    decoder.reserve(40)
    found: dict[int, list[Tensor]] = {slot: [decoder.prefill(slot, ids)] for slot, ids in prompts.items()}
    slots = list(prompts)
    for step in range(steps):
        logits = decoder.step(slots, [tails[slot][step] for slot in slots])
        for row, slot in enumerate(slots):
            found[slot].append(logits[row])
    for slot, ids in prompts.items():
        expected = tiny_library(torch.tensor([ids + tails[slot]])).logits[0, len(ids) - 1 :]
        assert torch.allclose(torch.stack(found[slot]), expected, atol=2e-4, rtol=1e-4), slot
    assert decoder.lengths_S.tolist() == [12, 38, 0, 6, 13]


@torch.inference_mode()
def test_growth_keeps_the_caches(weights: LlamaWeights) -> None:
    ids, slots = prompt(20), [1]
    grown, roomy = BatchDecoder(weights, slots=2), BatchDecoder(weights, slots=2)
    grown.reserve(21)
    roomy.reserve(3 * GROW)
    assert grown.capacity == GROW
    for decoder in (grown, roomy):
        decoder.prefill(1, ids)
        decoder.step(slots, [5])
    grown.reserve(GROW + 1)
    assert grown.capacity == 2 * GROW
    grown.reserve(3)
    assert grown.capacity == 2 * GROW
    for token in (9, 11):
        assert torch.equal(grown.step(slots, [token]), roomy.step(slots, [token]))


@torch.inference_mode()
def test_a_shared_beginning_is_computed_once_and_changes_no_bit(
    weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, asks = prompt(30), [prompt(9, seed=1), prompt(17, seed=2), prompt(1, seed=3)]
    decoder = BatchDecoder(weights, slots=2)
    decoder.reserve(64)
    ran: list[int] = []
    run = decoder.layers.run
    monkeypatch.setattr(decoder.layers, "run", lambda x, *rest: (ran.append(len(x)), run(x, *rest))[1])
    for slot, ask in zip((0, 1, 0), asks, strict=True):  # the last one overwrites what it shares with
        fresh = BatchDecoder(weights, slots=2)
        fresh.reserve(64)
        assert torch.equal(solo_run(decoder, slot, system + ask, [7, 8]), solo_run(fresh, 1, system + ask, [7, 8]))
    assert [rows for rows in ran if rows > 1] == [39, 17]
    again = decoder.prefill(1, system + asks[2])  # the very same prompt: its last token is asked for again
    assert torch.equal(again, fresh.prefill(0, system + asks[2]))
    assert decoder.lengths_S.tolist() == [33, 31]


def solo_run(decoder: BatchDecoder, slot: int, ids: list[int], tail: list[int]) -> Tensor:
    rows = [decoder.prefill(slot, ids)]
    rows += [decoder.step([slot], [token])[0] for token in tail]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["own", "library"])
@pytest.mark.parametrize("slots", [4, 6, 11, 24])
@torch.inference_mode()
def test_logits_are_bitwise_the_same_in_any_company_and_slot(
    weights: LlamaWeights, slots: int, dtype: torch.dtype
) -> None:
    """The prompt of interest runs alone, then in every slot with all the others running beside it."""
    ids, tail = prompt(13), prompt(3, seed=7)
    decoder = BatchDecoder(weights, slots, dtype)
    decoder.reserve(64)
    alone = solo_run(decoder, 0, ids, tail)
    for company in sorted({2, 3, 4, slots // 2, slots - 1, slots}):
        mine = (company * 5) % company
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(company))[:company]
        place = company - 1 - mine
        for row, slot in enumerate(order.tolist()):
            first = decoder.prefill(slot, ids if row == place else prompt(2 + row, seed=company))
            if row == place:
                assert torch.equal(first, alone[0])
        for step, token in enumerate(tail):
            tokens = torch.randint(3, 600, (company,), generator=torch.Generator().manual_seed(step))
            tokens[place] = token
            assert torch.equal(decoder.step(order.tolist(), tokens.tolist())[place], alone[step + 1]), (company, step)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 6, 8, 13, 24, 37])
def test_row_quantum_gives_every_row_its_own_bits(rows: int) -> None:
    """Any number of rows up to the full batch, padded to the quantum, at any place: the same bits."""
    generator = torch.Generator().manual_seed(rows)
    weights = [torch.randn(n, k, generator=generator) for n, k in ((128, 64), (64, 128), (600, 64))]
    quantum = row_quantum(weights, rows)
    assert quantum == rows or (quantum < rows and quantum in (4, 8, 16, 32))
    full = -(-rows // quantum) * quantum
    for weight in weights:
        x = torch.randn(full, weight.shape[1], generator=generator)
        y = F.linear(x, weight)
        for count in range(quantum, full + 1, quantum):
            for start in range(0, full - count + 1, quantum):
                part = slice(start, start + count)
                assert torch.equal(F.linear(x[part].clone(), weight), y[part]), (count, start)


def test_row_quantum_falls_back_to_the_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose bits depend on the number of rows leaves only one size to use."""
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: linear(x, w) + len(x) * 1e-3)
    assert row_quantum([torch.ones(8, 8)], 24) == 24


def test_row_quantum_is_the_smallest_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: linear(x, w) + (1e-3 if len(x) % 8 else 0.0))
    assert row_quantum([torch.ones(8, 8)], 24) == 8


def test_row_quantum_sees_the_padded_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows are padded to eight: those eight must have the bits of four, or four will not do."""
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: linear(x, w) + (1e-3 if len(x) == 8 else 0.0))
    assert row_quantum([torch.ones(8, 8)], 6) == 6
