"""The in-process engine: right answers, whoever else is being answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from eyrie.config import Sampling
from eyrie.engines.base import Answer, Request
from eyrie.engines.transformers import TransformersEngine, answer_seed, picker

NEW = 12


def prompts(count: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 30, (count,), generator=g).tolist()
    return [torch.randint(3, 600, (length,), generator=g).tolist() for length in lengths]


PROMPTS = prompts(11)


def requests(sampling: Sampling, seed: int = 0, order: Sequence[int] | None = None) -> Iterator[Request]:
    for i in order or range(len(PROMPTS)):
        yield Request(i, PROMPTS[i], sampling, seed)


def run(
    model: Path, stream: Iterator[Request | None], stop: Sequence[int] = (599,), batch: int = 4
) -> dict[int, Answer]:
    torch.set_num_threads(1)
    answers: dict[int, Answer] = {}

    def finished(request: Request, answer: Answer) -> None:
        assert request.position not in answers
        assert request.prompt_ids == PROMPTS[request.position]
        answers[request.position] = answer

    TransformersEngine(model, frozenset(stop), torch.float32, batch, "cpu").answer(stream, finished)
    return answers


@pytest.fixture(scope="module")
def expected(tiny_library) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """The library's own greedy continuations, no stop token."""
    out = []
    for ids in PROMPTS:
        tokens = torch.tensor([ids])
        made = tiny_library.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        out.append(made[0, len(ids) :].tolist())
    return out


def cut(ids: list[int], stop: Sequence[int], limit: int) -> Answer:
    for place, token in enumerate(ids[:limit]):
        if token in stop:
            return Answer(ids[: place + 1], "stop")
    return Answer(ids[:limit], "length")


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_greedy_answers_are_the_library_s(tiny_target: Path, expected: list[list[int]], batch: int) -> None:
    answers = run(tiny_target, requests(Sampling(max_tokens=NEW)), batch=batch)
    assert answers == {i: Answer(ids, "length") for i, ids in enumerate(expected)}


def test_stop_tokens_end_an_answer_and_are_part_of_it(tiny_target: Path, expected: list[list[int]]) -> None:
    stop = (expected[0][4], expected[1][0], expected[2][NEW - 1])
    answers = run(tiny_target, requests(Sampling(max_tokens=NEW)), stop=stop)
    assert answers == {i: cut(ids, stop, NEW) for i, ids in enumerate(expected)}
    assert answers[0].finish_reason == answers[1].finish_reason == answers[2].finish_reason == "stop"
    assert answers[1].output_ids == [expected[1][0]]


def test_max_tokens_bounds_each_request_by_itself(tiny_target: Path, expected: list[list[int]]) -> None:
    stream = (Request(i, ids, Sampling(max_tokens=1 + i), 0) for i, ids in enumerate(PROMPTS))
    answers = run(tiny_target, stream)
    assert answers == {i: Answer(ids[: 1 + i], "length") for i, ids in enumerate(expected)}


def test_order_does_not_matter(tiny_target: Path, expected: list[list[int]]) -> None:
    answers = run(tiny_target, requests(Sampling(max_tokens=NEW), order=[7, 2, 10, 0, 5, 1, 9, 3, 8, 6, 4]), batch=5)
    assert [answers[i].output_ids for i in range(len(PROMPTS))] == expected


def test_none_pauses_and_resumes(tiny_target: Path, expected: list[list[int]]) -> None:
    """``None`` stops admission; the iterator is asked again after the next answer, and all is answered in the end."""
    answers: dict[int, Answer] = {}
    in_flight: list[int] = []
    pulls: list[tuple[str, int]] = []

    def stream() -> Iterator[Request | None]:
        for i, ids in enumerate(PROMPTS):
            while len(in_flight) >= 2:  # a budget that has room for two at a time
                pulls.append(("none", len(answers)))
                yield None
            in_flight.append(i)
            pulls.append(("request", len(answers)))
            yield Request(i, ids, Sampling(max_tokens=3 + i % 4), 0)

    def finished(request: Request, answer: Answer) -> None:
        in_flight.remove(request.position)
        answers[request.position] = answer

    TransformersEngine(tiny_target, frozenset({599}), torch.float32, 4, "cpu").answer(stream(), finished)
    assert {i: a.output_ids for i, a in answers.items()} == {i: ids[: 3 + i % 4] for i, ids in enumerate(expected)}
    assert ("none", 0) in pulls


def test_requests_are_pulled_only_when_there_is_room(tiny_target: Path) -> None:
    pulled, done, ahead = 0, 0, []

    def stream() -> Iterator[Request]:
        nonlocal pulled
        for request in requests(Sampling(max_tokens=4)):
            pulled += 1
            ahead.append(pulled - done)
            yield request

    def finished(request: Request, answer: Answer) -> None:
        nonlocal done
        done += 1

    TransformersEngine(tiny_target, frozenset({599}), torch.float32, 3, "cpu").answer(stream(), finished)
    assert done == len(PROMPTS)
    assert max(ahead) == 3


def test_no_requests(tiny_target: Path) -> None:
    assert run(tiny_target, iter(())) == {}


def test_sampled_answers_depend_on_the_seed_and_the_request_alone(tiny_target: Path) -> None:
    sampling = Sampling(max_tokens=NEW, temperature=0.9, top_p=0.95)
    first = run(tiny_target, requests(sampling, seed=5), batch=4)
    other_order = run(tiny_target, requests(sampling, seed=5, order=list(range(len(PROMPTS)))[::-1]), batch=4)
    alone = {i: run(tiny_target, requests(sampling, seed=5, order=[i]), batch=4)[i] for i in (0, 6)}
    assert other_order == first
    assert alone == {i: first[i] for i in alone}
    moved = run(tiny_target, requests(sampling, seed=6), batch=4)
    assert all(moved[i] != first[i] for i in first)


def test_the_draw_keeps_to_the_nucleus() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[torch.tensor([2, 0, 3, 1])]
    names = {0: 2, 1: 0, 2: 3, 3: 1}
    for top_p, allowed in ((0.45, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        pick = picker(Sampling(temperature=1.0, top_p=top_p), 0, [1])
        counts = [0] * 4
        for _ in range(600):
            counts[names[pick(logits)]] += 1
        assert {i for i, n in enumerate(counts) if n} == allowed
        if top_p == 1.0:
            assert [n / 600 for n in counts] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.06)


def test_temperature_sharpens() -> None:
    logits = torch.tensor([1.0, 0.0])
    pick = picker(Sampling(temperature=0.25), 0, [1])
    share = sum(pick(logits) == 0 for _ in range(500)) / 500
    assert share == pytest.approx(torch.tensor([4.0, 0.0]).softmax(0)[0].item(), abs=0.04)


def test_answer_seeds_differ_by_seed_and_prompt() -> None:
    seeds = {answer_seed(seed, ids) for seed in range(3) for ids in ([1], [1, 2], [12], [])}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.fixture
def other_architecture(tiny_target: Path, tmp_path: Path) -> Path:
    """The same model under a name that our decoder does not claim (Mistral has Llama's layers)."""
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(tiny_target / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_other_architectures_go_through_the_library(other_architecture: Path, expected: list[list[int]]) -> None:
    stop = (expected[0][4], expected[3][2])
    answers = run(other_architecture, requests(Sampling(max_tokens=NEW)), stop=stop)
    assert answers == {i: cut(ids, stop, NEW) for i, ids in enumerate(expected)}


def test_the_library_obeys_the_request_and_not_the_model_s_own_habits(
    other_architecture: Path, expected: list[list[int]]
) -> None:
    """Greedy is the largest logit, also when ``generation_config.json`` asks for penalties or sampling."""
    habits = {"repetition_penalty": 5.0, "do_sample": True, "top_k": 3, "eos_token_id": expected[0][0]}
    (other_architecture / "generation_config.json").write_text(json.dumps(habits))
    answers = run(other_architecture, requests(Sampling(max_tokens=NEW), order=[0, 1, 2]))
    assert [answers[i].output_ids for i in range(3)] == expected[:3]


def test_the_library_samples_reproducibly(other_architecture: Path) -> None:
    sampling = Sampling(max_tokens=6, temperature=0.9, top_p=0.9)
    first = run(other_architecture, requests(sampling, seed=1, order=[0, 1, 2]))
    assert run(other_architecture, requests(sampling, seed=1, order=[2, 1, 0])) == first
    assert run(other_architecture, requests(sampling, seed=2, order=[0, 1, 2])) != first
