"""The reference decoder is lossless whoever drafts, and drafting is what training rehearsed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from eyrie.config import Drafter
from eyrie.drafters.decode import Eagle3Decoder
from eyrie.drafters.eagle3 import Eagle3, Eagle3Config, start_at_random
from eyrie.llama.sequence import SequenceDecoder
from eyrie.llama.weights import LlamaWeights, rotary
from eyrie.speculate import Eagle3Proposer, Plain, Prefilled, PromptLookup, Proposer, Trace, decode, prefill, replay
from eyrie.train.data import Row, collate
from eyrie.train.loop import Trainer
from eyrie.train.loss import StepSums, Teacher, ttt_loss

LAYERS, V, DV, H = (2, 3, 4), 600, 500, 64
CAPACITY = 128
NEW, K = 40, 3
NO_STOP: frozenset[int] = frozenset()
PROMPTS = [
    torch.randint(3, V, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 6, 17, 30)
]


@pytest.fixture(scope="module")
def weights(tiny_target: Path) -> LlamaWeights:
    torch.set_num_threads(1)
    return LlamaWeights.load(tiny_target)


@pytest.fixture
def target(weights: LlamaWeights) -> SequenceDecoder:
    return SequenceDecoder(weights, LAYERS, CAPACITY)


@pytest.fixture(scope="module")
def plain(weights: LlamaWeights) -> list[list[int]]:
    target = SequenceDecoder(weights, LAYERS, CAPACITY)
    return [decode(target, prefill(target, ids), Plain(), NO_STOP, NEW, K).output_ids for ids in PROMPTS]


def new_drafter(seed: int = 0) -> Eagle3:
    config = Eagle3Config(
        hidden_size=H, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        rms_norm_eps=1e-5, rope_theta=10_000.0, max_position_embeddings=1024, vocab_size=V, draft_vocab_size=DV,
        layers=LAYERS, ttt_steps=K, target_sha="x",
    )  # fmt: skip
    drafter = Eagle3(config)
    g = torch.Generator().manual_seed(seed)
    start_at_random(drafter, g)
    kept = torch.randperm(V, generator=g)[:DV].sort().values
    drafter.d2t.copy_(kept - torch.arange(DV))
    drafter.t2d[kept] = True
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return rounded(drafter)


def rounded(drafter: Eagle3) -> Eagle3:
    """Weights as an export holds them, so that training code and serving code compute with the same."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    return drafter


class Scripted:
    """Drafts by a rule on the right continuation."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def start(self, prompt_ids: Sequence[int], aux_TAH: np.ndarray) -> None:
        assert aux_TAH.shape == (len(prompt_ids), 3, H)

    def propose(self, emitted: Sequence[int], aux_MAH: np.ndarray, count: int) -> list[int]:
        assert list(emitted) == self.answer[: len(emitted)]
        return self.draft(len(emitted), self.answer[len(emitted) : len(emitted) + count])

    def draft(self, done: int, right: list[int]) -> list[int]:
        raise NotImplementedError


class Oracle(Scripted):
    def draft(self, done: int, right: list[int]) -> list[int]:
        return right


class Wrong(Scripted):
    """The first draft is always wrong, all after it right: nothing may be accepted."""

    def draft(self, done: int, right: list[int]) -> list[int]:
        return [(right[0] + 1) % V, *right[1:]]


class Erratic(Scripted):
    """Any number of drafts, each right or wrong by chance; what it drew is kept to be held against the trace."""

    def __init__(self, answer: list[int], seed: int) -> None:
        super().__init__(answer)
        self.random = np.random.default_rng(seed)
        self.drawn: list[tuple[int, int]] = []

    def draft(self, done: int, right: list[int]) -> list[int]:
        right = right[: self.random.integers(0, len(right) + 1)]
        wrong = self.random.random(len(right)) < 0.35
        self.drawn.append((len(right), int(wrong.argmax()) if wrong.any() else len(right)))
        return [(token + 1) % V if bad else token for token, bad in zip(right, wrong, strict=True)]


class NoStates:
    """A proposer that reads tokens alone, as :func:`replay` drives it: it is given no hidden states."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner

    def start(self, prompt_ids: Sequence[int], aux_TAH: np.ndarray) -> None:
        assert aux_TAH.size == 0
        self.inner.start(prompt_ids, np.empty((len(prompt_ids), 3, H), np.float32))

    def propose(self, emitted: Sequence[int], aux_MAH: np.ndarray, count: int) -> list[int]:
        assert aux_MAH.size == 0
        return self.inner.propose(emitted, aux_MAH, count)


def run(target: SequenceDecoder, ids: list[int], proposer: Proposer, count: int = K, new: int = NEW) -> Trace:
    return decode(target, prefill(target, ids), proposer, NO_STOP, new, count)


def check(trace: Trace) -> None:
    """What holds of every trace."""
    assert 1 + sum(trace.emitted) == len(trace.output_ids)
    assert trace.verifies == len(trace.drafted) == len(trace.accepted)
    for drafted, accepted, emitted in zip(trace.drafted, trace.accepted, trace.emitted, strict=True):
        assert 0 <= accepted <= drafted
        assert emitted == accepted + 1


def test_plain_decoding_equals_the_library(plain: list[list[int]], tiny_library) -> None:  # type: ignore[no-untyped-def]
    for ids, found in zip(PROMPTS, plain, strict=True):
        tokens = torch.tensor([ids])
        made = tiny_library.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        assert made[0, len(ids) :].tolist() == found


@pytest.mark.parametrize("count", [1, 3, 7])
def test_an_oracle_reaches_the_ceiling(target: SequenceDecoder, plain: list[list[int]], count: int) -> None:
    new = 1 + 4 * (count + 1)
    for ids, answer in zip(PROMPTS, plain, strict=True):
        trace = run(target, ids, Oracle(answer), count, new)
        check(trace)
        assert trace.output_ids == answer[:new]
        assert trace.accepted == [count] * 4
        assert trace.acceptance_length == count + 1


def test_always_wrong_drafts_cost_nothing_but_time(target: SequenceDecoder, plain: list[list[int]]) -> None:
    for ids, answer in zip(PROMPTS, plain, strict=True):
        trace = run(target, ids, Wrong(answer))
        check(trace)
        assert trace.output_ids == answer
        assert trace.acceptance_length == 1.0
        assert trace.verifies == NEW - 1


@pytest.mark.parametrize("seed", range(4))
def test_erratic_drafts_are_lossless_and_counted(target: SequenceDecoder, plain: list[list[int]], seed: int) -> None:
    for ids, answer in zip(PROMPTS, plain, strict=True):
        proposer = Erratic(answer, seed)
        trace = run(target, ids, proposer, count=5)
        check(trace)
        assert trace.output_ids == answer
        verified = len(proposer.drawn)  # the last verify has room for the bonus token alone, and is not asked for
        assert trace.verifies - verified in (0, 1)
        assert list(zip(trace.drafted, trace.accepted, strict=True))[:verified] == proposer.drawn


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_random_drafter_and_prompt_lookup_are_lossless(
    target: SequenceDecoder, plain: list[list[int]], count: int
) -> None:
    eagle = Eagle3Proposer(Eagle3Decoder(new_drafter(), CAPACITY), target)
    for ids, answer in zip(PROMPTS, plain, strict=True):
        for proposer in (eagle, PromptLookup(3)):
            trace = run(target, ids, proposer, count)
            check(trace)
            assert trace.output_ids == answer


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 11])
def test_max_tokens_is_respected(target: SequenceDecoder, plain: list[list[int]], new: int) -> None:
    eagle = Eagle3Proposer(Eagle3Decoder(new_drafter(), CAPACITY), target)
    for ids, answer in zip(PROMPTS, plain, strict=True):
        for proposer in (Oracle(answer), eagle, PromptLookup(3), Plain()):
            trace = run(target, ids, proposer, new=new)
            assert trace.output_ids == answer[:new]
            assert target.length <= len(ids) + new


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_ends_the_answer_inside_accepted_drafts(
    target: SequenceDecoder, plain: list[list[int]], place: int
) -> None:
    """Wherever in a verify the stop token falls, nothing after it comes out, and what comes out ends with it."""
    ids, answer = PROMPTS[2], plain[2]
    stop = answer[place]
    first = answer.index(stop)
    for proposer in (Oracle(answer), Wrong(answer), Plain()):
        trace = decode(target, prefill(target, ids), proposer, frozenset({stop}), NEW, 4)
        assert trace.output_ids == answer[: first + 1]
        assert 1 + sum(trace.emitted) == len(trace.output_ids)


def test_one_prefill_serves_every_proposer(target: SequenceDecoder, plain: list[list[int]]) -> None:
    """Decoding rewinds to the prompt, so the next proposer starts from the same cache."""
    ids, answer = PROMPTS[3], plain[3]
    start = prefill(target, ids)
    eagle = Eagle3Proposer(Eagle3Decoder(new_drafter(), CAPACITY), target)
    traces = [decode(target, start, p, NO_STOP, NEW, K) for p in (eagle, Oracle(answer), Wrong(answer), eagle, Plain())]
    assert all(trace.output_ids == answer for trace in traces)
    assert traces[0].accepted == traces[3].accepted


def test_rewind_leaves_the_cache_of_the_emitted_tokens_only(target: SequenceDecoder, plain: list[list[int]]) -> None:
    """After many wrong drafts the cache continues as a fresh one does."""
    ids, answer = PROMPTS[2], plain[2]
    run(target, ids, Wrong(answer), count=5)
    assert target.length == len(ids) + NEW - 1
    used, _ = target.extend(answer[-1:])
    target.rewind(0)
    fresh, _ = target.extend([*ids, *answer], logits_from=len(ids) + NEW - 1)
    np.testing.assert_allclose(used, fresh, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([5, 3, 7, 1, 3, 8, 1, 3], [8, 1, 3]),  # the latest of two occurrences of "1 3" or "3"
        ([1, 3, 7, 5, 3, 8, 1, 3], [7, 5, 3]),  # a longer match beats a later one
        ([4, 4, 4], [4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup(ids: list[int], expected: list[int]) -> None:
    for split in range(len(ids)):
        proposer = PromptLookup(3)
        proposer.start(ids[:split], np.empty(0))
        assert proposer.propose(ids[split:], np.empty(0), 3) == expected
    proposer = PromptLookup(3)
    proposer.start([], np.empty(0))
    for end in range(1, len(ids)):
        proposer.propose(ids[:end], np.empty(0), 3)
    assert proposer.propose(ids, np.empty(0), 3) == expected


def test_replay_leaves_the_trace_of_decoding(target: SequenceDecoder, plain: list[list[int]]) -> None:
    for ids, answer in zip(PROMPTS, plain, strict=True):
        for new in (1, 2, 9, NEW):
            pairs: list[tuple[Proposer, Proposer]] = [(PromptLookup(2), PromptLookup(2)), (Plain(), Plain())]
            pairs += [(Erratic(answer, seed), Erratic(answer, seed)) for seed in range(3)]
            for one, other in pairs:
                real = run(target, ids, one, 5, new)
                found = replay(ids, real.output_ids, NoStates(other), new, 5)
                real.seconds = 0.0
                assert found == real


def test_replay_ends_with_the_stop_token(target: SequenceDecoder, plain: list[list[int]]) -> None:
    ids, answer = PROMPTS[2], plain[2]
    for place in range(1, 8):
        stop = frozenset({answer[place]})
        real = decode(target, prefill(target, ids), Oracle(answer), stop, NEW, 4)
        found = replay(ids, real.output_ids, NoStates(Oracle(answer)), NEW, 4)
        assert (found.output_ids, found.drafted, found.emitted) == (real.output_ids, real.drafted, real.emitted)


# Training and serving are two programs that must compute one thing.


class Greedy:
    """A greedy answer with all that training and serving read of it."""

    def __init__(self, weights: LlamaWeights, prompt: list[int], answer: list[int]) -> None:
        self.target = SequenceDecoder(weights, LAYERS, CAPACITY)
        self.prompt, self.ids = len(prompt), [*prompt, *answer]
        _, self.aux_TAH = self.target.extend(self.ids)
        self.embed_VH = weights.embed_VH.float()

    def row(self, ids: list[int], start: int) -> Row:
        """``ids`` with the span from ``start`` on; states beyond the answer are noise that nothing may read."""
        aux = torch.full((len(ids), 3 * H), 1e3)
        known = min(len(ids), len(self.ids))
        aux[:known] = torch.from_numpy(self.aux_TAH).flatten(1)[:known]
        return Row(torch.tensor(ids), ((start, len(ids)),), aux, torch.zeros(len(ids) - start, H), 1.0, True)

    def unroll(self, drafter: Eagle3, rows: list[Row]) -> list[StepSums]:
        ids = drafter.target_ids()
        teacher = Teacher(torch.zeros(DV, H), ids, V)
        cos, sin = rotary(CAPACITY, 16, 10_000.0)
        with torch.no_grad():
            return ttt_loss(drafter, collate(rows), self.embed_VH, teacher, cos, sin, K, 0.8)[1]

    def chain(self, drafter: Eagle3, column: int) -> list[int]:
        """Drafts of the serving code when the target has verified up to ``column``."""
        proposer = Eagle3Proposer(Eagle3Decoder(drafter, CAPACITY), self.target)
        proposer.start(self.ids[: self.prompt], self.aux_TAH[: self.prompt])
        emitted = self.ids[self.prompt :]
        drafts = proposer.propose(emitted[:1], self.aux_TAH[:0], K)
        done = self.prompt
        while done <= column:  # verifies of several widths lead there
            width = min(1 + done % 3, column + 1 - done)
            done += width
            drafts = proposer.propose(emitted[: done - self.prompt + 1], self.aux_TAH[done - width : done], K)
        return drafts

    def right(self, drafter: Eagle3, column: int) -> int:
        """How many teacher-forced steps in a row are right at ``column``, up to K, within the answer."""
        for n in range(1, K + 1):
            end = column + 2 + n
            if end > len(self.ids):
                return n - 1
            last = self.unroll(drafter, [self.row(self.ids[:end], column + 1)])[n - 1]
            assert last.labels == 1  # a span of n + 1 tokens has one column with n labels: its first
            if not last.run:
                return n - 1
        return K


@pytest.fixture(scope="module")
def greedy(weights: LlamaWeights, plain: list[list[int]]) -> Greedy:
    return Greedy(weights, PROMPTS[1], plain[1])


@pytest.fixture(scope="module")
def learnt(greedy: Greedy) -> Eagle3:
    """A drafter that has half learnt the one answer, so that some drafts are right and some are not."""
    drafter = new_drafter(seed=3)
    embed = greedy.embed_VH
    # the teacher points at the next token itself: a final state is the label's own embedding, made sharp
    row = greedy.row(greedy.ids, greedy.prompt)
    final = 40 * torch.nn.functional.normalize(embed[row.ids_T[greedy.prompt :]], dim=-1)
    row = Row(row.ids_T, row.spans, row.aux_TA, final, 1.0, True)
    options = Drafter(
        ttt_steps=K, epochs=14, batch_tokens=64, learning_rate=2e-2, muon_learning_rate=2e-2, evaluate_every=14
    )
    ids = drafter.target_ids()
    head = torch.nn.functional.normalize(embed[ids], dim=-1)
    Trainer(drafter, embed, Teacher(head, ids, V), [row], [row], options).run()
    return rounded(drafter)


@pytest.mark.parametrize("seed", [0, 1])
def test_serving_drafts_what_training_rehearses(greedy: Greedy, seed: int) -> None:
    """From every column of the answer: the chain drafted by serving is the argmax of the training unroll.

    The row of a column is the answer up to it and then the chain itself, so the unroll is teacher forced with the
    chain's own tokens; all K steps are right exactly when its argmax is the chain.
    """
    drafter = new_drafter(seed)
    columns = range(greedy.prompt - 1, len(greedy.ids) - 1)
    chains = {t: greedy.chain(drafter, t) for t in columns}
    assert len({tuple(chain) for chain in chains.values()}) > len(columns) // 2
    rows = [greedy.row([*greedy.ids[: t + 2], *chains[t]], t + 1) for t in columns]
    sums = greedy.unroll(drafter, rows)
    assert sums[K - 1].labels == len(columns)
    assert sums[K - 1].run == len(columns)

    # and a chain that differs in one place is not: the check above can fail
    for step in range(K):
        wrong = [list(chains[t]) for t in columns]
        for chain in wrong:
            chain[step] = next(i for i in drafter.target_ids().tolist() if i != chain[step])
        rows = [greedy.row([*greedy.ids[: t + 2], *chain], t + 1) for t, chain in zip(columns, wrong, strict=True)]
        assert greedy.unroll(drafter, rows)[K - 1].run == 0


def test_acceptance_is_what_the_training_metrics_predict(greedy: Greedy, learnt: Eagle3) -> None:
    """Walking the teacher-forced runs by hand gives, verify by verify, what decoding accepts."""
    last = len(greedy.ids) - 2
    right = {t: greedy.right(learnt, t) for t in range(greedy.prompt - 1, last + 1)}
    assert len(set(right.values())) > 2  # some columns miss at once, some run to the end

    predicted, column = [], greedy.prompt - 1
    while column < last:
        predicted.append(min(right[column], max(0, last - column - 1)))  # the last token is always the bonus
        column += predicted[-1] + 1
    start = Prefilled(greedy.ids[: greedy.prompt], greedy.aux_TAH[: greedy.prompt], greedy.ids[greedy.prompt])
    target = greedy.target
    trace = decode(target, start, Eagle3Proposer(Eagle3Decoder(learnt, CAPACITY), target), NO_STOP, NEW, K)
    assert trace.output_ids == greedy.ids[greedy.prompt :]
    assert trace.accepted == predicted

    # the sums of the whole row count the same runs
    sums = greedy.unroll(learnt, [greedy.row(greedy.ids, greedy.prompt)])
    assert [step.run for step in sums] == [sum(n > k for n in right.values()) for k in range(K)]
    assert [step.labels for step in sums] == [NEW - 1 - k for k in range(K)]
