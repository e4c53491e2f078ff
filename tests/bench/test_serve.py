"""The figures of a served drafter, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eyrie.bench import serve
from eyrie.bench.serve import Answer, Served, ask_for, refuse_wiring_fault, run_interleaved, summarise
from eyrie.bench.suites import Prompt
from eyrie.config import Suite
from eyrie.errors import EyrieError
from eyrie.servers.lease import Lease
from eyrie.speculate import Trace

PROMPTS = [Prompt("code", "a", [1, 2, 3]), Prompt("code", "b", [4]), Prompt("chat", "c", [5, 6])]


def held(name: str = "plain") -> Lease:
    return cast(Lease, SimpleNamespace(ready=lambda: SimpleNamespace(url=name), log=Path("server.log")))


def reply(ids: list[int], prompt: list[int], **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": len(prompt), **meta}}


def test_figures_compare_request_by_request() -> None:
    plain = Served([Answer([9, 8, 7, 6], 0), Answer([5], 0), Answer([1, 2], 0)], [2.0, 1.5])
    drafter = Served([Answer([9, 8, 7, 6], 2), Answer([5], 0), Answer([1, 3], 1)], [1.0])
    reference = [
        Trace([9, 8, 7, 6], emitted=[1, 2]),
        Trace([5]),
        Trace([1, 2], emitted=[1, 1]),
    ]
    figures = summarise(PROMPTS, plain, drafter, reference)
    assert (figures["outputs"], figures["identical_outputs"], figures["equal_verify_steps"]) == (3, 2, 2)
    assert (figures["verify_steps"], figures["reference_verify_steps"]) == (3, 4)
    assert figures["acceptance_length"] == round(4 / 3, 4)
    assert figures["reference_acceptance_length"] == 1.0
    assert (figures["plain_tokens_per_s"], figures["speculative_tokens_per_s"]) == (2.0, 7.0)
    assert [row["id"] for row in figures["per_request"]] == ["a", "b", "c"]
    assert [row["identical"] for row in figures["per_request"]] == [True, True, False]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (1.61, "reaches 1.61 with the same files. Likely causes: the layer ids"),
        (1.02, "the drafter itself is at fault"),
    ],
)
def test_no_acceptance_fails_with_the_likely_causes(reference: float, message: str) -> None:
    figures = {"acceptance_length": 1.04, "reference_acceptance_length": reference}
    with pytest.raises(EyrieError, match=message):
        refuse_wiring_fault(figures, Path("server.log"))
    refuse_wiring_fault({**figures, "acceptance_length": 1.05}, Path("server.log"))


def test_ids_go_in_and_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    def answer(url: str, body: dict[str, Any], timeout: float) -> list[Any]:
        bodies.append((url, body))
        return [reply([7, 2], ids, spec_verify_ct=1) for ids in body["input_ids"]]

    monkeypatch.setattr(serve, "ask", answer)
    assert ask_for(PROMPTS, held(), 16, [2]) == [Answer([7, 2], 1)] * 3
    url, body = bodies[0]
    assert url == "plain/generate"
    assert body["input_ids"] == [prompt.ids for prompt in PROMPTS]
    assert body["sampling_params"] == {"max_new_tokens": 16, "temperature": 0.0, "stop_token_ids": [2]}


@pytest.mark.parametrize(
    "meta", [{"finish_reason": {"type": "abort", "message": "too long"}}, {"prompt_tokens": 2}], ids=["abort", "cut"]
)
def test_a_request_that_was_not_answered_as_asked_is_an_error(
    monkeypatch: pytest.MonkeyPatch, meta: dict[str, Any]
) -> None:
    monkeypatch.setattr(serve, "ask", lambda *_, **__: [reply([7], PROMPTS[0].ids, **meta)])
    with pytest.raises(EyrieError, match=r"server\.log: the server did not answer code/a as asked"):
        ask_for(PROMPTS[:1], held(), 16, [2])


def test_servers_take_turns_to_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def answer(url: str, body: dict[str, Any], timeout: float) -> list[Any]:
        order.append((url.removesuffix("/generate"), len(body["input_ids"])))
        return [reply([len(ids)], ids) for ids in body["input_ids"]]

    monkeypatch.setattr(serve, "ask", answer)
    got = run_interleaved({"plain": held("plain"), "drafter": held("drafter")}, PROMPTS, Suite(), [2], 2)
    assert order[2:] == [("plain", 2), ("drafter", 2), ("drafter", 1), ("plain", 1)]
    assert [answer.output_ids for answer in got["drafter"].answers] == [[3], [1], [2]]
    assert len(got["plain"].seconds) == 2
