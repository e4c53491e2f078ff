"""The bench stage: run a suite on an export and publish its figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyrie.bench.stats import (
    Spread,
    conditional,
    pooled_acceptance_length,
    seconds_per_verify,
    survival,
    tokens_per_second,
    verdict,
)
from eyrie.bench.suites import Prompt, held_out
from eyrie.config import Suite
from eyrie.errors import EyrieError
from eyrie.formats.manifest import verified_manifest
from eyrie.formats.publish import write_json
from eyrie.machine import use_threads
from eyrie.targets.card import TargetCard, read_card, resolve

NEAR_TIE_TOKENS = 200


def bench(
    recipe: dict[str, Any], *, suite: str, export: Path, target: Path, model: str, merged: Path,
    tokens: Sequence[Path], out: Path, threads: int,
) -> None:  # fmt: skip
    """Measure acceptance and speed of an exported drafter and write ``out``.

    Decoding runs on the CPU in float32 with weights as stored; plain and speculative decoding share all code.
    """
    from eyrie.bench.drive import Driver, near_ties
    from eyrie.export.sglang import read_back
    from eyrie.llama.weights import LlamaWeights

    use_threads(threads)
    options = Suite.model_validate(recipe["suite"])
    card = read_card(target)
    verified_manifest(export / "model.safetensors", stage="export", identity={"target": card.target})
    verified_manifest(merged / "index.parquet", stage="merge", identity=card.identity())
    folder = resolve(model, card.revision)
    prompts = prompts_of(options, merged, tokens, folder, card)
    driver = Driver(
        LlamaWeights.load(folder), read_back(export), options, frozenset(card.stop_ids),
        max(len(prompt.ids) for prompt in prompts),
    )  # fmt: skip
    runs = driver.run(prompts)
    ties = near_ties(str(folder), prompts, runs.traces["plain"], NEAR_TIE_TOKENS)
    figures = summarise(prompts, runs, options)
    figures["suite"] = suite
    figures["near_ties"] = vars(ties) | {"dtype": "bfloat16"}
    figures["machine"] = machine(threads)
    write_json(out, figures)


def prompts_of(suite: Suite, merged: Path, tokens: Sequence[Path], folder: Path, card: TargetCard) -> list[Prompt]:
    """Prompts of the run's test split, or of the external suite that the config names."""
    if suite.dataset is None:
        return held_out(suite, merged, tokens)
    from eyrie.datasets import suite_prompts
    from eyrie.render.renderer import Renderer

    renderer = Renderer(folder, card.stop_ids, card.rendering)
    prompts: list[Prompt] = []
    for conversation in suite_prompts(suite.dataset, suite.options)[: suite.prompts_per_dataset]:
        row = conversation.to_row(len(prompts))
        prompts.append(Prompt(suite.dataset, row["id"], renderer.prompt_ids(row["messages"], row.get("tools"))))
    if not prompts:
        raise EyrieError(f"bench.suites: {suite.dataset!r} yields no prompt; check its options")
    return prompts


def summarise(prompts: Sequence[Prompt], runs: Any, suite: Suite) -> dict[str, Any]:
    """The figures of a run, rounded; see :mod:`eyrie.bench.stats` for their definitions."""
    drafter, ngram, plain = (runs.traces[mode] for mode in ("drafter", "ngram", "plain"))
    speeds = {mode: [tokens_per_second(traces) for traces in runs.repeats[mode]] for mode in runs.repeats}
    speedup = Spread.of([fast / slow for fast, slow in zip(speeds["drafter"], speeds["plain"], strict=True)])
    ngram_speedup = Spread.of([fast / slow for fast, slow in zip(speeds["ngram"], speeds["plain"], strict=True)])
    cost = [
        seconds_per_verify(a) / seconds_per_verify(b)
        for a, b in zip(runs.repeats["drafter"], runs.repeats["plain"], strict=True)
    ]
    acceptance = pooled_acceptance_length(drafter)
    # a speculative step that costs r plain steps pays from r tokens on
    break_even = Spread.of(cost).median
    survivals = survival(drafter, suite.draft_tokens)
    return {
        "acceptance_length": round(acceptance, 4),
        "ngram_acceptance_length": round(pooled_acceptance_length(ngram), 4),
        "speedup": speedup.to_json(),
        "ngram_speedup": ngram_speedup.to_json(),
        "lossless_float32": not runs.differing,
        "differing_prompts": runs.differing,
        "per_position": [round(value, 4) for value in survivals],
        "conditional": [round(value, 4) for value in conditional(survivals)],
        "break_even": round(break_even, 3),
        "step_cost_ratio": Spread.of(cost).to_json(),
        "verdict": verdict(acceptance, break_even, speedup, ngram_speedup.median),
        "plain_tokens_per_s": Spread.of(speeds["plain"]).to_json(),
        "speculative_tokens_per_s": Spread.of(speeds["drafter"]).to_json(),
        "ngram_tokens_per_s": Spread.of(speeds["ngram"]).to_json(),
        "draft_tokens": suite.draft_tokens,
        "max_tokens": suite.max_tokens,
        "prompts": len(prompts),
        "tokens": sum(len(trace.output_ids) for trace in plain),
        "repeats": suite.repeats,
        "timed_prompts": len(runs.repeats["plain"][0]),
        "datasets": [per_dataset(name, prompts, runs, suite) for name in dict.fromkeys(p.dataset for p in prompts)],
        "per_request": [
            {
                "dataset": prompt.dataset,
                "id": prompt.id,
                "tokens": len(trace.output_ids),
                "verifies": trace.verifies,
                "acceptance_length": round(trace.acceptance_length, 4),
            }
            for prompt, trace in zip(prompts, drafter, strict=True)
        ],
    }


def per_dataset(name: str, prompts: Sequence[Prompt], runs: Any, suite: Suite) -> dict[str, Any]:
    """The same figures for one dataset; speed from its single pass, so without a spread."""
    chosen = [i for i, prompt in enumerate(prompts) if prompt.dataset == name]
    drafter, ngram, plain = ([runs.traces[mode][i] for i in chosen] for mode in ("drafter", "ngram", "plain"))
    return {
        "name": name,
        "prompts": len(chosen),
        "tokens": sum(len(trace.output_ids) for trace in plain),
        "acceptance_length": round(pooled_acceptance_length(drafter), 4),
        "ngram_acceptance_length": round(pooled_acceptance_length(ngram), 4),
        "per_position": [round(value, 4) for value in survival(drafter, suite.draft_tokens)],
        "speedup": round(tokens_per_second(drafter) / tokens_per_second(plain), 3),
    }


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    name = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), name
        )
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "dtype": "float32",
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
