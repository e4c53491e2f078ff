"""The loop closes: the drafter that the smoke run made, served by a real SGLang beside its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from smoke_run import SMOKE, Workspace

from eyrie.bench.serve import ask_for
from eyrie.bench.suites import Prompt, held_out
from eyrie.config import Server, Suite
from eyrie.llama.sequence import SequenceDecoder
from eyrie.llama.weights import LlamaWeights
from eyrie.servers.lease import lease
from eyrie.servers.process import wait_for
from eyrie.servers.sglang import Speculation, sglang_spec
from eyrie.speculate import Plain, decode, prefill
from eyrie.targets.card import read_card
from tests.servers.test_lease import alive

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(run: Workspace, long_serving_python: Path) -> dict[str, Any]:
    before, name = run.smoke.read_text(), "results/smoke/serve/eagle3.json"
    suites = {"held-out": {**SMOKE["bench"]["suites"]["held-out"], "prompts_per_dataset": 3, "max_tokens": 32}}
    changed = {**SMOKE, "server": {"python": str(long_serving_python)}, "bench": {"suites": suites}}
    run.smoke.write_text(yaml.safe_dump(changed, sort_keys=False))  # the order of datasets is content
    try:
        result = run.snakemake("--", name)
    finally:
        run.smoke.write_text(before)
    assert result.returncode == 0, result.stderr[-8000:]  # the log of a failed job is in it
    return dict(json.loads((run.folder / name).read_text()))


def test_the_served_drafter_takes_the_reference_decoders_steps(served: dict[str, Any]) -> None:
    assert served["outputs"] == len(served["per_request"]) > 0
    assert served["identical_outputs"] == served["outputs"]
    for row in served["per_request"]:
        assert row["verify_steps"] == row["reference_verify_steps"], row
        assert row["equals_reference"], row
    assert served["acceptance_length"] == served["reference_acceptance_length"] >= 1.05
    assert min(served["plain_tokens_per_s"], served["speculative_tokens_per_s"]) > 0


def test_serving_leaves_no_process_and_stales_nothing(served: dict[str, Any], run: Workspace) -> None:
    states = [json.loads(path.read_text()) for path in run.folder.glob("logs/smoke/servers/*/state.json")]
    assert [state["phase"] for state in states] == ["stopped", "stopped"]
    pids = [pid for state in states for pid in (state["guard"], state["supervisor"])]
    assert wait_for(lambda: not any(map(alive, pids)), 10.0)
    assert run.dry_run() == set()


def test_trees_of_drafts_are_lossless(served: dict[str, Any], run: Workspace, long_serving_python: Path) -> None:
    results, model = run.folder / "results/smoke", run.folder / "data/targets/smollm2-135m"
    card = read_card(results / "target.json")
    suite = Suite(prompts_per_dataset=2, max_tokens=24)
    prompts = held_out(suite, results / "merged", sorted(results.glob("tokens/*/*.parquet")))
    speculation = Speculation(results / "export/eagle3/sglang", steps=3, topk=3, draft_tokens=8)
    server = Server(python=str(long_serving_python), device="cpu", idle_s=0.0, context_length=512)
    spec = sglang_spec(server, model=model, dtype="float32", threads=1, speculation=speculation)
    with lease(spec, run.folder / "logs/smoke/tree") as held:
        answers = ask_for(prompts, held, suite.max_tokens, card.stop_ids)
    plain = [plain_output(model, prompt, frozenset(card.stop_ids), suite.max_tokens) for prompt in prompts]
    assert [answer.output_ids for answer in answers] == plain
    assert sum(answer.verifies for answer in answers) < sum(len(ids) - 1 for ids in plain), "no draft was accepted"


def plain_output(model: Path, prompt: Prompt, stop_ids: frozenset[int], max_tokens: int) -> list[int]:
    target = SequenceDecoder(LlamaWeights.load(model), (2, 15, 27), 512)
    return decode(target, prefill(target, prompt.ids), Plain(), stop_ids, max_tokens, 1).output_ids
