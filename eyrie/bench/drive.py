"""Running the suites: plain, drafter and prompt lookup on the same prompts, interleaved in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eyrie.bench.suites import Prompt
from eyrie.config import Suite
from eyrie.drafters.decode import Eagle3Decoder
from eyrie.drafters.eagle3 import Eagle3
from eyrie.llama.sequence import SequenceDecoder
from eyrie.llama.weights import LlamaWeights
from eyrie.progress import Progress
from eyrie.speculate import Eagle3Proposer, Plain, Prefilled, PromptLookup, Proposer, Trace, decode, prefill, replay

MODES = ("plain", "drafter", "ngram")


@dataclass
class Runs:
    """Traces of every prompt by mode, and timings of the repeated ones.

    Attributes:
        traces: mode -> one trace per prompt, in prompt order. Those of prompt lookup are replayed on the plain output,
            which is exact for acceptance and costs nothing; they hold no seconds.
        repeats: mode -> per repeat, the traces of the timed prompts.
        differing: prompts whose speculative output is not the plain one.
    """

    repeats: dict[str, list[list[Trace]]]
    traces: dict[str, list[Trace]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    differing: list[str] = field(default_factory=list)


class Driver:
    """Holds target and drafter in memory and decodes prompts in every mode."""

    def __init__(
        self, weights: LlamaWeights, drafter: Eagle3, suite: Suite, stop_ids: frozenset[int], longest: int
    ) -> None:
        capacity = longest + suite.max_tokens + suite.draft_tokens + 2
        self.suite, self.stop_ids = suite, stop_ids
        self.target = SequenceDecoder(weights, drafter.config.layers, capacity)
        self.proposers: dict[str, Proposer] = {
            "plain": Plain(),
            "drafter": Eagle3Proposer(Eagle3Decoder(drafter, capacity), self.target),
            "ngram": PromptLookup(suite.ngram_size),
        }

    def decode(self, mode: str, start: Prefilled) -> Trace:
        return decode(
            self.target, start, self.proposers[mode], self.stop_ids, self.suite.max_tokens, self.suite.draft_tokens
        )

    def run(self, prompts: Sequence[Prompt]) -> Runs:
        """Every prompt in every mode, the timed ones ``repeats`` times, interleaved; each prompt is prefilled once."""
        runs = Runs(repeats={mode: [[] for _ in range(self.suite.repeats)] for mode in MODES})
        self.decode("drafter", prefill(self.target, prompts[0].ids))  # compiles and warms, unmeasured
        timed = set(spread_over(prompts, self.suite.timed_prompts))
        with Progress("bench", len(prompts), "prompts") as progress:
            for index, prompt in enumerate(prompts):
                start = prefill(self.target, prompt.ids)
                if index in timed:
                    for repeat in range(self.suite.repeats):
                        self._round(runs.repeats, repeat, index, start)
                    plain, drafted = runs.repeats["plain"][0][-1], runs.repeats["drafter"][0][-1]
                else:
                    plain, drafted = self.decode("plain", start), self.decode("drafter", start)
                lookup = replay(
                    prompt.ids,
                    plain.output_ids,
                    self.proposers["ngram"],
                    self.suite.max_tokens,
                    self.suite.draft_tokens,
                )
                for mode, trace in zip(MODES, (plain, drafted, lookup), strict=True):
                    runs.traces[mode].append(trace)
                if drafted.output_ids != plain.output_ids:
                    runs.differing.append(prompt.id)
                progress.advance(1)
        return runs

    def _round(self, repeats: dict[str, list[list[Trace]]], repeat: int, index: int, start: Prefilled) -> None:
        """One timed round of a prompt; who goes first rotates, so that drift of the clock favours nobody."""
        for turn in range(len(MODES)):
            mode = MODES[(turn + index + repeat) % len(MODES)]
            repeats[mode][repeat].append(self.decode(mode, start))


def spread_over(prompts: Sequence[Prompt], count: int) -> list[int]:
    """Indices of ``count`` prompts taken in turn from the datasets."""
    places: dict[str, int] = {}
    ranked = []
    for index, prompt in enumerate(prompts):
        places[prompt.dataset] = places.get(prompt.dataset, -1) + 1
        ranked.append((places[prompt.dataset], index))
    return sorted(index for _, index in sorted(ranked)[:count])


@dataclass(frozen=True)
class NearTies:
    """How often bfloat16 would choose otherwise than float32, teacher forced on plain outputs.

    Attributes:
        tokens: positions compared.
        differing: positions whose bfloat16 argmax is another token.
        largest_gap: largest float32 gap between the two tokens among them (logits): near-ties when it is small.
    """

    tokens: int
    differing: int
    largest_gap: float


def near_ties(model: str, prompts: Sequence[Prompt], traces: Sequence[Trace], limit: int) -> NearTies:
    """Compare the float32 and bfloat16 choices of the library's own model on up to ``limit`` output tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    rows: list[tuple[list[int], list[int]]] = []
    for prompt, trace in zip(prompts, traces, strict=True):
        if sum(len(output) for _, output in rows) >= limit:
            break
        rows.append((prompt.ids, trace.output_ids))
    logits: dict[torch.dtype, list[np.ndarray]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        library = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        with torch.inference_mode():
            logits[dtype] = [
                library(torch.tensor([ids + output]), logits_to_keep=len(output) + 1).logits[0, :-1].float().numpy()
                for ids, output in rows
            ]
    exact = np.concatenate(logits[torch.float32])
    chosen, other = exact.argmax(-1), np.concatenate(logits[torch.bfloat16]).argmax(-1)
    where = np.flatnonzero(chosen != other)
    gaps = exact[where, chosen[where]] - exact[where, other[where]]
    return NearTies(len(exact), len(where), float(gaps.max()) if len(where) else 0.0)
