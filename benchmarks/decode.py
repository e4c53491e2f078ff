"""Decode throughput of the in-process engine against the library's own ``generate`` at its best batch size.

Same target, same prompts, same max_tokens, greedy, one thread, rounds interleaved in one process. Throughput is
completion tokens per CPU second, prefill included; both models are loaded beforehand. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eyrie.bench.stage import machine
from eyrie.bench.stats import Spread
from eyrie.config import Sampling
from eyrie.engines.base import Answer, Request
from eyrie.engines.transformers import ContinuousBatch
from eyrie.errors import run_cli
from eyrie.llama.batch import BatchDecoder
from eyrie.llama.weights import LlamaWeights
from eyrie.machine import choose_dtype, use_threads
from eyrie.render.renderer import Renderer

LIBRARY_BATCHES = (8, 16, 32, 64)
EYRIE_BATCH = 48

ASKS = (
    "Explain {} to somebody who has never heard of it.",
    "Write a short, friendly email about {} to a colleague.",
    "List five common mistakes people make with {}, and how to avoid each of them.",
    "What is the history of {}? Keep it under two hundred words, and end with a question.",
    "Write a small Python program that helps a person who works with {}. Show only the code.",
    "Give me a plan for one week in which I learn the basics of {}, an hour a day.",
    "Two friends disagree about {}. Write their conversation.",
    "Summarise the best arguments for and against {} in one table.",
)
SUBJECTS = (
    "sourdough bread", "compound interest", "bicycle repair", "the water cycle", "binary search", "jazz piano",
    "houseplants", "remote work", "unit testing", "long-distance running", "chess openings", "public libraries",
    "spreadsheets", "solar panels", "meeting notes", "train timetables",
)  # fmt: skip

Answers = list[list[int]]


def built_in_prompts(renderer: Renderer, count: int) -> list[list[int]]:
    """Chat-templated prompts, all different up to 128."""
    texts = [ASKS[i % len(ASKS)].format(SUBJECTS[(i // len(ASKS) + i) % len(SUBJECTS)]) for i in range(count)]
    return [renderer.prompt_ids([{"role": "user", "content": text}]) for text in texts]


def run_eyrie(decoder: BatchDecoder, stop_ids: frozenset[int], prompts: Answers, max_tokens: int) -> Answers:
    """Answer ``prompts`` with the engine's continuous batch."""
    outputs: Answers = [[] for _ in prompts]

    def finished(request: Request, answer: Answer) -> None:
        outputs[request.position] = answer.output_ids

    sampling = Sampling(max_tokens=max_tokens)
    requests = (Request(i, ids, sampling, 0) for i, ids in enumerate(prompts))
    ContinuousBatch(decoder, stop_ids).run(requests, finished)
    return outputs


@torch.inference_mode()
def run_library(library: Any, stop_ids: frozenset[int], prompts: Answers, max_tokens: int, batch: int) -> Answers:
    """Answer ``prompts`` with ``generate``, left-padded batches of prompts of like length."""
    outputs: Answers = [[] for _ in prompts]
    pad = min(stop_ids)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(order), batch):
        chosen = order[begin : begin + batch]
        width = max(len(prompts[i]) for i in chosen)
        ids_BT = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in chosen])
        mask_BT = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
        made = library.generate(
            ids_BT, attention_mask=mask_BT, max_new_tokens=max_tokens, do_sample=False,
            eos_token_id=sorted(stop_ids), pad_token_id=pad,
        )  # fmt: skip
        for i, row in zip(chosen, made[:, width:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(row) if token in stop_ids), len(row))
            outputs[i] = row[:end]
    return outputs


def timed(run: Callable[[], Answers]) -> tuple[float, Answers]:
    """Completion tokens per CPU second, and the answers."""
    began = time.process_time()
    outputs = run()
    return sum(len(ids) for ids in outputs) / (time.process_time() - began), outputs


def measure(model: Path, prompts_count: int, max_tokens: int, rounds: int) -> dict[str, Any]:
    """All figures; ``ratio`` is the median over rounds of Eyrie's throughput over the library's in the same round."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    use_threads(1)
    dtype = choose_dtype("auto", "cpu")
    renderer = Renderer(str(model))
    stop_ids = frozenset(renderer.stop_ids)
    prompts = built_in_prompts(renderer, prompts_count)
    library = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    decoder = BatchDecoder(LlamaWeights.load(model), min(EYRIE_BATCH, len(prompts)), dtype)

    run_eyrie(decoder, stop_ids, prompts[:2], 2)  # compiles, unmeasured
    run_library(library, stop_ids, prompts[:2], 2, 2)
    brief = max(2, max_tokens // 8)
    trials = {
        batch: timed(lambda b=batch: run_library(library, stop_ids, prompts, brief, b))[0]  # type: ignore[misc]
        for batch in LIBRARY_BATCHES
        if batch <= max(len(prompts), LIBRARY_BATCHES[0])
    }
    best = max(trials, key=lambda batch: trials[batch])
    contestants: dict[str, Callable[[], Answers]] = {
        "eyrie": lambda: run_eyrie(decoder, stop_ids, prompts, max_tokens),
        "library": lambda: run_library(library, stop_ids, prompts, max_tokens, best),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    outputs: dict[str, Answers] = {}
    for turn in range(rounds):
        # who goes first alternates, so that drift of the machine's clock favours nobody
        for name in sorted(contestants, reverse=turn % 2 == 1):
            speed, outputs[name] = timed(contestants[name])
            speeds[name].append(speed)
    return {
        "eyrie": Spread.of(speeds["eyrie"]).to_json(),
        "library": Spread.of(speeds["library"]).to_json(),
        "ratio": round(statistics.median(a / b for a, b in zip(speeds["eyrie"], speeds["library"], strict=True)), 3),
        "library_batch": best,
        "library_trials": {str(batch): round(speed, 1) for batch, speed in trials.items()},
        "eyrie_batch": min(EYRIE_BATCH, len(prompts)),
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "rounds": rounds,
        "tokens": sum(len(ids) for ids in outputs["eyrie"]),
        "same_answers": sum(a == b for a, b in zip(outputs["eyrie"], outputs["library"], strict=True)),
        "machine": machine(1) | {"dtype": str(dtype).removeprefix("torch.")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("data/targets/smollm2-135m"), help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=96, help="how many prompts to answer")
    parser.add_argument("--max-tokens", type=int, default=128, help="completion tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    args = parser.parse_args()

    figures = measure(args.model, args.prompts, args.max_tokens, args.rounds)
    table = Table(title="Completion tokens per CPU second")
    for column in ("", "batch", "median", "lowest", "highest"):
        table.add_column(column, justify="right" if column else "left")
    for label, name in (("eyrie", "eyrie"), ("transformers generate", "library")):
        speed = figures[name]
        table.add_row(label, str(figures[f"{name}_batch"]), *(f"{speed[key]:.1f}" for key in ("median", "low", "high")))
    console = Console()
    console.print(table)
    console.print(
        f"eyrie is {figures['ratio']:.2f} times as fast; "
        f"{figures['same_answers']} of {figures['prompts']} answers are the same token for token"
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    run_cli(main)
