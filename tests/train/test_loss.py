"""The packed training-time-test loss against a slow oracle that unrolls one column at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.drafters.eagle3 import Eagle3, Eagle3Config, start_at_random
from eyrie.llama.weights import rotary
from eyrie.train.data import Row, collate
from eyrie.train.loss import TILE, Queries, Teacher, in_tiles, ttt_loss

H, V, DV, HEADS, D = 16, 40, 24, 4, 8


def make_drafter(kv_heads: int = 2, seed: int = 0) -> Eagle3:
    config = Eagle3Config(
        hidden_size=H, intermediate_size=24, num_attention_heads=HEADS, num_key_value_heads=kv_heads, head_dim=D,
        rms_norm_eps=1e-5, rope_theta=10_000.0, max_position_embeddings=64, vocab_size=V, draft_vocab_size=DV,
        layers=(2, 3, 4), ttt_steps=3, target_sha="x",
    )  # fmt: skip
    drafter = Eagle3(config)
    start_at_random(drafter, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    kept = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:DV].sort().values
    drafter.d2t.copy_(kept - torch.arange(DV))
    drafter.t2d[kept] = True
    return drafter


def make_row(
    length: int, start: int, end: int, seed: int, weight: float = 1.0, answered: bool = True, prompt_weight: float = 0.0
) -> Row:
    g = torch.Generator().manual_seed(seed)
    whole = prompt_weight > 0
    return Row(
        ids_T=torch.randint(V, (length,), generator=g),
        spans=((start, end),),
        aux_TA=torch.randn(length, 3 * H, generator=g),
        final_FH=torch.randn(length - 1 if whole else end - start, H, generator=g),
        weight=weight,
        answered=answered,
        whole=whole,
        prompt_weight=prompt_weight,
    )


def oracle(drafter: Eagle3, rows: list[Row], embed_VH, head_VH, steps: int, decay: float):  # type: ignore[no-untyped-def]
    """Each draft chain by itself: plain attention over an explicit list of keys, no packing, no fusing."""
    kept = drafter.target_ids().tolist()
    attention = drafter.midlayer.self_attn
    group = HEADS // drafter.config.num_key_value_heads
    cos, sin = rotary(64, D, 10_000.0)

    def rope(x, place):  # type: ignore[no-untyped-def]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos[place] - b * sin[place], b * cos[place] + a * sin[place]], -1)

    losses = [[] for _ in range(steps)]
    weights = [[] for _ in range(steps)]
    right = [0] * steps
    for row in rows:
        (start, end), ids = row.spans[0], row.ids_T
        feature_TH = drafter.fc(row.aux_TA)
        for t in range(0 if row.prompt_weight else start - 1, end - 2):
            in_answer = t >= start - 1
            weight = row.weight * (1.0 if in_answer else row.prompt_weight)
            feature, own = feature_TH[t], []
            for k in range(steps):
                label = t + 2 + k
                if label >= end:
                    break
                wide = drafter.attention_input(embed_VH[ids[t + 1 + k]][None], feature[None])
                if k:
                    own.append((rope(attention.k_proj(wide).view(-1, D), t + k), attention.v_proj(wide).view(-1, D)))
                past = drafter.attention_input(embed_VH[ids[1 : t + 2]], feature_TH[: t + 1])
                keys = [rope(x.view(-1, D), j) for j, x in enumerate(attention.k_proj(past))] + [key for key, _ in own]
                values = [x.view(-1, D) for x in attention.v_proj(past)] + [value for _, value in own]
                query = rope(attention.q_proj(wide).view(HEADS, D), t + k)
                mixed = []
                for head in range(HEADS):
                    scores = torch.stack([query[head] @ key[head // group] for key in keys]) / math.sqrt(D)
                    mixed.append(scores.softmax(0) @ torch.stack([value[head // group] for value in values]))
                feature = drafter.finish(feature[None], torch.cat(mixed)[None])[0]
                logits = drafter.logits(feature[None])[0]
                teacher = (head_VH[kept] @ row.final_FH[label - (1 if row.whole else start)]).softmax(0)
                token = int(ids[label])
                if token in kept:
                    losses[k].append(-(teacher * logits.log_softmax(0)).sum() * weight)
                    weights[k].append(weight)
                right[k] += kept[int(logits.argmax())] == token and row.answered and in_answer
    total = sum(decay**k * sum(losses[k]) / max(sum(weights[k]), 1e-6) for k in range(steps))
    return total, right


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_equals_the_oracle_with_gradients(kv_heads: int) -> None:
    rows = [
        make_row(11, 4, 9, 1),
        make_row(7, 2, 7, 2, weight=0.5),
        make_row(14, 6, 8, 3, answered=False),
        make_row(12, 5, 10, 4, weight=0.5, prompt_weight=0.25),
    ]
    g = torch.Generator().manual_seed(9)
    embed, head = torch.randn(V, H, generator=g), torch.randn(V, H, generator=g)
    drafter = make_drafter(kv_heads)
    cos, sin = rotary(64, D, 10_000.0)
    loss, sums = ttt_loss(
        drafter, collate(rows), embed, Teacher(head[drafter.target_ids()], drafter.target_ids(), V), cos, sin, 3, 0.8
    )
    loss.backward()
    found = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    expected, right = oracle(drafter, rows, embed, head, 3, 0.8)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert [s.correct for s in sums] == right
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=2e-3, atol=1e-5), name


def test_bfloat16_products_stay_close_to_float32() -> None:
    """Parameters, gradients and the loss stay float32; only the products are rounded."""
    rows = [make_row(11, 4, 9, 1), make_row(14, 3, 12, 2, prompt_weight=0.5)]
    g = torch.Generator().manual_seed(9)
    embed, head = torch.randn(V, H, generator=g), torch.randn(V, H, generator=g)
    cos, sin = rotary(64, D, 10_000.0)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        drafter = make_drafter().compute_in(dtype)
        ids = drafter.target_ids()
        loss, _ = ttt_loss(drafter, collate(rows), embed, Teacher(head[ids].to(dtype), ids, V), cos, sin, 3, 0.8)
        loss.backward()
        found[dtype] = loss.item(), {name: p.grad for name, p in drafter.named_parameters()}
    (exact, gradients), (rounded, others) = found[torch.float32], found[torch.bfloat16]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    for name, gradient in gradients.items():
        assert others[name].dtype == torch.float32
        assert F.cosine_similarity(gradient.flatten(), others[name].flatten(), dim=0) > 0.97, name


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40, unique=True).map(sorted))
def test_tiles_are_filled_with_columns_that_count_for_nothing(chosen: list[int]) -> None:
    everyone = Queries(*(torch.arange(100) + n for n in range(4)), torch.rand(100) + 0.1, torch.ones(100) > 0)
    index = in_tiles(torch.tensor(chosen))
    some = everyone.chosen(index)
    count = len(chosen)
    assert len(index) % TILE == 0
    assert len(index) - count < TILE
    assert some.row_Q.tolist() == [*chosen, *[chosen[-1]] * (len(index) - count)]
    assert torch.equal(some.left_Q[:count], torch.tensor(chosen) + 2)
    assert torch.equal(some.weight_Q[:count], everyone.weight_Q[chosen])
    assert some.answered_Q[:count].all()
    assert not some.left_Q[count:].any()
    assert not some.weight_Q[count:].any()
    assert not some.answered_Q[count:].any()
    assert len(in_tiles(torch.tensor([], dtype=torch.int64))) == 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(0, 3)), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_padding_and_company_do_not_matter(shapes: list[tuple[int, int, int]]) -> None:
    """The loss of a batch is the weighted mean of the losses of its rows: nothing leaks between or into rows."""
    rows = [make_row(s + n + tail, s, s + n, i) for i, (s, n, tail) in enumerate(shapes)]
    rows = [row for row in rows if row.labels]
    if not rows:
        return
    g = torch.Generator().manual_seed(9)
    embed, head = torch.randn(V, H, generator=g), torch.randn(V, H, generator=g)
    drafter = make_drafter()
    teacher = Teacher(head[drafter.target_ids()], drafter.target_ids(), V)
    cos, sin = rotary(64, D, 10_000.0)
    with torch.no_grad():
        _, together = ttt_loss(drafter, collate(rows), embed, teacher, cos, sin, 2, 0.8)
        alone = [ttt_loss(drafter, collate([row]), embed, teacher, cos, sin, 2, 0.8)[1] for row in rows]
    for k, step in enumerate(together):
        parts = [sums[k] for sums in alone if k < len(sums)]
        assert step.loss == pytest.approx(sum(p.loss for p in parts), rel=1e-4, abs=1e-4)
        assert step.weight == pytest.approx(sum(p.weight for p in parts))
        assert step.labels == sum(p.labels for p in parts)


def test_labels_outside_the_draft_vocabulary_carry_no_loss_but_count_as_wrong() -> None:
    drafter = make_drafter()
    outside = next(i for i in range(V) if not drafter.t2d[i])
    row = make_row(9, 3, 9, 5)
    row.ids_T[4:9] = outside
    g = torch.Generator().manual_seed(9)
    embed, head = torch.randn(V, H, generator=g), torch.randn(V, H, generator=g)
    cos, sin = rotary(64, D, 10_000.0)
    loss, sums = ttt_loss(
        drafter, collate([row]), embed, Teacher(head[drafter.target_ids()], drafter.target_ids(), V), cos, sin, 2, 0.8
    )
    assert loss.item() == 0.0
    assert sums[0].labels == 5
    assert sums[0].correct == 0


def test_teacher_is_the_softmax_over_kept_rows() -> None:
    g = torch.Generator().manual_seed(3)
    head, final = torch.randn(V, H, generator=g), torch.randn(700, H, generator=g)
    kept = torch.arange(0, V, 2)
    found = Teacher(head[kept], kept, V).probabilities(final)
    assert torch.allclose(found, F.linear(final, head)[:, kept].softmax(-1), atol=1e-6)
