"""The serve stage: the exported drafter beside its target on a real engine, held against the reference decoder.

Equal text proves nothing about a drafter: speculative decoding is lossless with a broken one too, and layer ids that
are off by one cost a few per cent of acceptance. In float32 a right drafter needs, request by request, exactly as many
verify steps as the reference decoder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyrie.bench.stats import WIRING_FAULT
from eyrie.bench.suites import Prompt
from eyrie.config import Server, Suite
from eyrie.errors import EyrieError
from eyrie.formats.manifest import verified_manifest
from eyrie.formats.publish import write_json
from eyrie.progress import Progress
from eyrie.servers.lease import Lease, lease
from eyrie.servers.probe import ask
from eyrie.servers.sglang import Speculation, sglang_spec
from eyrie.speculate import Trace
from eyrie.targets.card import read_card, resolve

DTYPE = "float32"
REQUEST_TIMEOUT_S = 3600.0

CAUSES = (
    "the layer ids in config.json ('eagle_config') are not those it was trained on",
    "'d2t' does not hold offsets, or belongs to another draft vocabulary",
    "a tensor has a name that the engine drops silently (fc, hidden_norm)",
    "the drafter was trained on another target, tokenizer or chat template",
    "the export was edited after it was checked (`snakemake -R export` writes it again)",
)


@dataclass(frozen=True)
class Answer:
    """One request as a server answered it.

    Attributes:
        output_ids: emitted tokens.
        verifies: forwards of the target after the prefill; 0 for a server that does not speculate.
    """

    output_ids: list[int]
    verifies: int


@dataclass
class Served:
    """All answers of one server, in prompt order, and the wall seconds of each round."""

    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def tokens_per_s(self) -> float:
        return sum(len(answer.output_ids) for answer in self.answers) / max(1e-9, sum(self.seconds))


def serve(
    recipe: dict[str, Any], machine: dict[str, Any], *, export: Path, target: Path, model: str, merged: Path,
    tokens: Sequence[Path], servers: Path, out: Path, threads: int,
) -> None:  # fmt: skip
    """Serve the drafter and write what was measured to ``out``.

    Args:
        recipe: the suite's and the server's options that change the result.
        machine: the server's machine-level options.
        export: exported folder in SGLang's layout.
        servers: folder for the servers' logs and state.
        threads: CPU threads of each server process.

    Raises:
        EyrieError: no server can be had, the files do not belong together, or the acceptance length is under 1.05.
    """
    from eyrie.bench.stage import prompts_of

    suite = Suite.model_validate(recipe.get("suite", {}))
    server = Server.model_validate({**recipe.get("server", {}), **machine, "idle_s": 0.0})
    card = read_card(target)
    verified_manifest(export / "model.safetensors", stage="export", identity={"target": card.target})
    verified_manifest(merged / "index.parquet", stage="merge", identity=card.identity())
    folder = resolve(model, card.revision)
    prompts = prompts_of(suite, merged, tokens, folder, card)
    longest = max(len(prompt.ids) for prompt in prompts) + suite.max_tokens + suite.draft_tokens + 1
    shared: dict[str, Any] = {
        "model": folder, "dtype": DTYPE, "threads": threads, "context_length": max(longest, 256),
        "prefix_cache": False, "probe_ids": tuple(prompts[0].ids[:8]),
    }  # fmt: skip
    plain_spec = sglang_spec(server, **shared)
    drafter_spec = sglang_spec(server, **shared, speculation=Speculation(export, steps=suite.draft_tokens))
    reference = reference_traces(prompts, folder, export, suite, frozenset(card.stop_ids), threads)
    with lease(plain_spec, servers) as plain, lease(drafter_spec, servers) as drafter:
        version = drafter.ready().version
        served = run_interleaved(
            {"plain": plain, "drafter": drafter}, prompts, suite, card.stop_ids, server.max_running_requests
        )
    figures = summarise(prompts, served["plain"], served["drafter"], reference)
    refuse_wiring_fault(figures, drafter_spec.folder(servers.resolve()) / "server.log")
    write_json(
        out,
        figures
        | {
            "engine": {"name": "sglang", "version": version, "command": list(drafter_spec.command)},
            "dtype": DTYPE,
            "draft_tokens": suite.draft_tokens,
            "max_tokens": suite.max_tokens,
            "concurrency": server.max_running_requests,
        },
    )


def reference_traces(
    prompts: Sequence[Prompt], folder: Path, export: Path, suite: Suite, stop_ids: frozenset[int], threads: int
) -> list[Trace]:
    """What the reference decoder does with the same drafter and prompts, in float32."""
    from eyrie.drafters.decode import Eagle3Decoder
    from eyrie.export.sglang import read_back
    from eyrie.llama.sequence import SequenceDecoder
    from eyrie.llama.weights import LlamaWeights
    from eyrie.machine import use_threads
    from eyrie.speculate import Eagle3Proposer, decode, prefill

    use_threads(threads)
    drafter = read_back(export)
    capacity = max(len(prompt.ids) for prompt in prompts) + suite.max_tokens + suite.draft_tokens + 2
    target = SequenceDecoder(LlamaWeights.load(folder), drafter.config.layers, capacity)
    proposer = Eagle3Proposer(Eagle3Decoder(drafter, capacity), target)
    traces = []
    with Progress("reference", len(prompts), "prompts") as progress:
        for prompt in prompts:
            start = prefill(target, prompt.ids)
            traces.append(decode(target, start, proposer, stop_ids, suite.max_tokens, suite.draft_tokens))
            progress.advance(1)
    return traces


def run_interleaved(
    leases: dict[str, Lease], prompts: Sequence[Prompt], suite: Suite, stop_ids: Sequence[int], concurrency: int
) -> dict[str, Served]:
    """Every prompt on every server, in rounds of ``concurrency`` prompts; who goes first alternates."""
    served = {name: Served() for name in leases}
    for held in leases.values():
        ask_for([prompts[0]], held, min(suite.max_tokens, 16), stop_ids)  # first use of every code path, unmeasured
    with Progress("serve", len(prompts), "prompts") as progress:
        for turn, first in enumerate(range(0, len(prompts), concurrency)):
            chunk = prompts[first : first + concurrency]
            for name in list(leases)[:: 1 if turn % 2 == 0 else -1]:
                began = time.perf_counter()
                served[name].answers += ask_for(chunk, leases[name], suite.max_tokens, stop_ids)
                served[name].seconds.append(time.perf_counter() - began)
            progress.advance(len(chunk))
    return served


def ask_for(prompts: Sequence[Prompt], held: Lease, max_tokens: int, stop_ids: Sequence[int]) -> list[Answer]:
    """Greedy answers to all prompts at once, ids in and ids out.

    Raises:
        EyrieError: the server fails, or aborts a request.
    """
    sampling = {"max_new_tokens": max_tokens, "temperature": 0.0, "stop_token_ids": list(stop_ids)}
    body = {"input_ids": [prompt.ids for prompt in prompts], "sampling_params": sampling}
    try:
        replies = ask(f"{held.ready().url}/generate", body, timeout=REQUEST_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise EyrieError(f"{held.log}: the server failed to answer ({error}); its last lines say why") from error
    answers = []
    for prompt, reply in zip(prompts, replies, strict=True):
        meta = reply["meta_info"]
        if meta["finish_reason"]["type"] not in ("stop", "length") or meta["prompt_tokens"] != len(prompt.ids):
            raise EyrieError(
                f"{held.log}: the server did not answer {prompt.dataset}/{prompt.id} as asked "
                f"({meta['finish_reason']}, {meta['prompt_tokens']} of {len(prompt.ids)} prompt tokens)"
            )
        answers.append(Answer(list(reply["output_ids"]), int(meta.get("spec_verify_ct", 0))))
    return answers


def summarise(prompts: Sequence[Prompt], plain: Served, drafter: Served, reference: Sequence[Trace]) -> dict[str, Any]:
    """The figures. Acceptance lengths leave out the prefill's token, as everywhere in Eyrie; the engine counts it."""
    rows = []
    for prompt, slow, fast, trace in zip(prompts, plain.answers, drafter.answers, reference, strict=True):
        rows.append(
            {
                "dataset": prompt.dataset,
                "id": prompt.id,
                "tokens": len(fast.output_ids),
                "identical": fast.output_ids == slow.output_ids,
                "equals_reference": fast.output_ids == trace.output_ids,
                "verify_steps": fast.verifies,
                "reference_verify_steps": trace.verifies,
                "acceptance_length": round(_acceptance([fast]), 4),
                "reference_acceptance_length": round(trace.acceptance_length, 4),
            }
        )
    references = [Answer(trace.output_ids, trace.verifies) for trace in reference]
    return {
        "acceptance_length": round(_acceptance(drafter.answers), 4),
        "reference_acceptance_length": round(_acceptance(references), 4),
        "verify_steps": sum(answer.verifies for answer in drafter.answers),
        "reference_verify_steps": sum(trace.verifies for trace in reference),
        "equal_verify_steps": sum(row["verify_steps"] == row["reference_verify_steps"] for row in rows),
        "identical_outputs": sum(bool(row["identical"]) for row in rows),
        "outputs": len(rows),
        "tokens": sum(len(answer.output_ids) for answer in drafter.answers),
        "plain_tokens_per_s": round(plain.tokens_per_s(), 3),
        "speculative_tokens_per_s": round(drafter.tokens_per_s(), 3),
        "per_request": rows,
    }


def _acceptance(answers: Sequence[Answer]) -> float:
    """Tokens emitted per verify, pooled; the token that the prefill gives is no verify's."""
    verifies = sum(answer.verifies for answer in answers)
    return sum(max(0, len(answer.output_ids) - 1) for answer in answers) / verifies if verifies else 1.0


def refuse_wiring_fault(figures: dict[str, Any], log: Path) -> None:
    """Raise :class:`EyrieError` with the likely causes when the served drafter is hardly ever accepted."""
    acceptance, reference = figures["acceptance_length"], figures["reference_acceptance_length"]
    if acceptance >= WIRING_FAULT:
        return
    if reference < WIRING_FAULT:
        likely = "the reference decoder accepts no more, so the drafter itself is at fault: train it longer, or " + (
            "look at its validation figures"
        )
    else:
        likely = f"the reference decoder reaches {reference:.2f} with the same files. Likely causes: " + "; ".join(
            CAUSES
        )
    raise EyrieError(f"{log}: acceptance length {acceptance:.2f} on the server, under {WIRING_FAULT}; {likely}")
