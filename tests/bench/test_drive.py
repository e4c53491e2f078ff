"""Driving a suite: every mode on the same prompts, and what is made of the traces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyrie.bench.drive import MODES, Driver, near_ties, spread_over
from eyrie.bench.stage import summarise
from eyrie.bench.suites import Prompt
from eyrie.config import Suite
from eyrie.drafters.eagle3 import Eagle3, Eagle3Config, start_at_random
from eyrie.llama.weights import LlamaWeights
from eyrie.speculate import Trace

SUITE = Suite(prompts_per_dataset=3, max_tokens=9, draft_tokens=2, timed_prompts=3, repeats=2)


def prompts() -> list[Prompt]:
    g = torch.Generator().manual_seed(2)
    return [
        Prompt(dataset, f"{dataset}-{i}", torch.randint(3, 600, (3 + 4 * i,), generator=g).tolist())
        for dataset, count in (("code", 3), ("chat", 2))
        for i in range(count)
    ]


@pytest.fixture
def driver(tiny_target: Path) -> Driver:
    torch.set_num_threads(1)
    config = Eagle3Config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        rms_norm_eps=1e-5, rope_theta=10_000.0, max_position_embeddings=1024, vocab_size=600, draft_vocab_size=500,
        layers=(2, 3, 4), ttt_steps=3, target_sha="x",
    )  # fmt: skip
    drafter = Eagle3(config)
    start_at_random(drafter, torch.Generator().manual_seed(0))
    drafter.t2d[:500] = True
    longest = max(len(prompt.ids) for prompt in prompts())
    return Driver(LlamaWeights.load(tiny_target), drafter, SUITE, frozenset({2}), longest)


def test_every_mode_decodes_every_prompt_to_the_same_tokens(driver: Driver) -> None:
    runs = driver.run(prompts())
    assert runs.differing == []
    for mode in MODES:
        assert len(runs.traces[mode]) == 5
        assert [t.output_ids for t in runs.traces[mode]] == [t.output_ids for t in runs.traces["plain"]]
        assert all(1 <= len(t.output_ids) <= 9 for t in runs.traces[mode])
        assert [len(repeat) for repeat in runs.repeats[mode]] == [3, 3]
        assert all(t.seconds > 0 for repeat in runs.repeats[mode] for t in repeat if t.verifies)
    assert all(t.drafted == [0] * t.verifies for t in runs.traces["plain"])
    assert any(sum(t.drafted) for t in runs.traces["drafter"])

    figures = summarise(prompts(), runs, SUITE)
    assert figures["lossless_float32"] is True
    assert figures["prompts"] == 5
    assert figures["tokens"] == sum(len(t.output_ids) for t in runs.traces["plain"])
    assert [d["name"] for d in figures["datasets"]] == ["code", "chat"]
    assert [d["prompts"] for d in figures["datasets"]] == [3, 2]
    assert sum(d["tokens"] for d in figures["datasets"]) == figures["tokens"]
    assert [r["id"] for r in figures["per_request"]] == [p.id for p in prompts()]
    assert len(figures["per_position"]) == len(figures["conditional"]) == SUITE.draft_tokens
    assert figures["acceptance_length"] >= 1.0
    speed = figures["speedup"]
    assert speed["low"] <= speed["median"] <= speed["high"]
    assert figures["break_even"] == figures["step_cost_ratio"]["median"] > 0


def test_a_mode_that_changes_the_output_is_named(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = driver.decode

    def faulty(mode: str, start) -> Trace:  # type: ignore[no-untyped-def]
        trace = decode(mode, start)
        if mode == "drafter" and len(start.prompt_ids) == 7:
            trace.output_ids[-1] ^= 1
        return trace

    monkeypatch.setattr(driver, "decode", faulty)
    runs = driver.run(prompts())
    assert runs.differing == ["code-1", "chat-1"]
    assert summarise(prompts(), runs, SUITE)["lossless_float32"] is False


def test_who_goes_first_rotates(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    decode = driver.decode

    def watching(mode: str, start) -> Trace:  # type: ignore[no-untyped-def]
        order.append(mode)
        return decode(mode, start)

    monkeypatch.setattr(driver, "decode", watching)
    driver.run(prompts())
    left = iter(order[1:])  # the first one warms
    rounds = []
    timed = spread_over(prompts(), driver.suite.timed_prompts)
    for index in range(len(prompts())):
        if index in timed:
            rounds += [[next(left) for _ in MODES] for _ in range(driver.suite.repeats)]
        else:  # prompt lookup is replayed, not run
            assert [next(left), next(left)] == ["plain", "drafter"]
    assert next(left, None) is None
    assert len(rounds) == len(timed) * driver.suite.repeats > 0
    assert all(sorted(turn) == sorted(MODES) for turn in rounds)
    assert {turn[0] for turn in rounds} == set(MODES)


def test_timed_prompts_are_spread_over_the_datasets() -> None:
    chosen = [Prompt(name, str(i), [1]) for i, name in enumerate("aaaabbc")]
    assert spread_over(chosen, 3) == [0, 4, 6]
    assert spread_over(chosen, 5) == [0, 1, 4, 5, 6]
    assert spread_over(chosen, 100) == list(range(7))


def test_near_ties_counts_where_bfloat16_chooses_otherwise(tiny_target: Path, driver: Driver) -> None:
    from transformers import AutoModelForCausalLM

    runs = driver.run(prompts())
    plain = runs.traces["plain"]
    found = near_ties(str(tiny_target), prompts(), plain, limit=10_000)
    assert found.tokens == sum(len(t.output_ids) for t in plain)
    rough = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.bfloat16).eval()
    differing = 0
    with torch.inference_mode():
        for prompt, trace in zip(prompts(), plain, strict=True):
            row = [*prompt.ids, *trace.output_ids]
            best = rough(torch.tensor([row])).logits[0].argmax(-1).tolist()
            differing += sum(best[i - 1] != row[i] for i in range(len(prompt.ids), len(row)))
    assert found.differing == differing
    assert (found.largest_gap > 0) == (differing > 0)

    short = near_ties(str(tiny_target), prompts(), plain, limit=1)
    assert short.tokens == len(plain[0].output_ids)
