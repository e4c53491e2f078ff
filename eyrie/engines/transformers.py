"""The in-process engine: continuous batching on this machine, no server.

Llama-family targets are decoded by :class:`eyrie.llama.batch.BatchDecoder`; any other causal language model that
transformers loads is decoded by the library's own ``generate``, one request after another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyrie.config import Sampling
from eyrie.engines.base import Answer, Request, answer_seed
from eyrie.llama.batch import BatchDecoder
from eyrie.llama.weights import LlamaWeights, unsupported


class TransformersEngine:
    """Answers prompts in this process.

    Args:
        model: local Hugging Face folder.
        stop_ids: token ids that end an answer.
        dtype: compute dtype of the matrix products.
        batch_size: sequences decoded together.
    """

    def __init__(self, model: Path, stop_ids: frozenset[int], dtype: torch.dtype, batch_size: int, device: str) -> None:
        self.model, self.stop_ids, self.dtype = model, stop_ids, dtype
        self.batch_size, self.device = batch_size, device

    def answer(self, requests: Iterator[Request | None], finished: Callable[[Request, Answer], None]) -> None:
        """Answer ``requests`` as they come; see :class:`eyrie.engines.base.Engine`."""
        raw = json.loads((self.model / "config.json").read_text())
        if self.device == "cpu" and not unsupported(raw):
            decoder = BatchDecoder(LlamaWeights.load(self.model), self.batch_size, self.dtype)
            ContinuousBatch(decoder, self.stop_ids).run(requests, finished)
        else:
            LibraryLoop(self.model, self.stop_ids, self.dtype, self.device).run(requests, finished)


@dataclass
class _Running:
    """One sequence in a slot."""

    request: Request
    slot: int
    pick: Callable[[Tensor], int]
    output_ids: list[int] = field(default_factory=list)


class ContinuousBatch:
    """Refills a slot the moment its answer ends, so the batch stays full until the requests run out."""

    def __init__(self, decoder: BatchDecoder, stop_ids: frozenset[int]) -> None:
        self.decoder, self.stop_ids = decoder, stop_ids

    @torch.inference_mode()
    def run(self, requests: Iterator[Request | None], finished: Callable[[Request, Answer], None]) -> None:
        free = list(range(self.decoder.slots))
        running: list[_Running] = []
        exhausted = False
        while True:
            while free and not exhausted:
                try:
                    request = next(requests)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:  # nothing for now: the budget waits for what is in flight
                    break
                self._admit(request, free, running, finished)
            if not running:
                if exhausted or request is None:
                    return
                continue
            running = self._step(running, free, finished)

    def _admit(
        self, request: Request, free: list[int], running: list[_Running], finished: Callable[[Request, Answer], None]
    ) -> None:
        sequence = _Running(request, free[-1], picker(request.sampling, request.seed, request.prompt_ids))
        self.decoder.reserve(len(request.prompt_ids) + request.sampling.max_tokens)
        logits_V = self.decoder.prefill(sequence.slot, request.prompt_ids)
        if self._take(sequence, sequence.pick(logits_V), finished):
            return
        free.pop()
        running.append(sequence)

    def _step(
        self, running: list[_Running], free: list[int], finished: Callable[[Request, Answer], None]
    ) -> list[_Running]:
        slots_B = [sequence.slot for sequence in running]
        ids_B = [sequence.output_ids[-1] for sequence in running]
        logits_BV = self.decoder.step(slots_B, ids_B)
        best_B = logits_BV.max(-1).indices.tolist()
        left = []
        for row, sequence in enumerate(running):
            greedy = sequence.request.sampling.temperature == 0
            token = best_B[row] if greedy else sequence.pick(logits_BV[row])
            if self._take(sequence, token, finished):
                free.append(sequence.slot)
            else:
                left.append(sequence)
        return left

    def _take(self, sequence: _Running, token: int, finished: Callable[[Request, Answer], None]) -> bool:
        """Append ``token``; report and return True when the answer is over."""
        sequence.output_ids.append(token)
        if token in self.stop_ids:
            reason = "stop"
        elif len(sequence.output_ids) >= sequence.request.sampling.max_tokens:
            reason = "length"
        else:
            return False
        finished(sequence.request, Answer(sequence.output_ids, reason))
        return True


class LibraryLoop:
    """Any causal language model, by ``transformers.generate``, one request at a time (so company cannot matter)."""

    def __init__(self, model: Path, stop_ids: frozenset[int], dtype: torch.dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        # the request alone says how to answer: penalties of the model's own file would make greedy something else
        self.model.generation_config = GenerationConfig()
        self.stop_ids, self.device = stop_ids, device

    @torch.inference_mode()
    def run(self, requests: Iterator[Request | None], finished: Callable[[Request, Answer], None]) -> None:
        for request in requests:
            if request is None:  # nothing is ever in flight here, so there is nothing to wait for
                return
            prompt = torch.tensor([request.prompt_ids], device=self.device)
            sampling = request.sampling
            options: dict[str, Any] = {"do_sample": False}
            if sampling.temperature > 0:
                torch.manual_seed(answer_seed(request.seed, request.prompt_ids))
                options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=sampling.max_tokens,
                eos_token_id=sorted(self.stop_ids),
                pad_token_id=min(self.stop_ids),
                **options,
            )
            output_ids = out[0, prompt.shape[1] :].tolist()
            reason = "stop" if output_ids and output_ids[-1] in self.stop_ids else "length"
            finished(request, Answer(output_ids, reason))


def picker(sampling: Sampling, seed: int, prompt_ids: list[int]) -> Callable[[Tensor], int]:
    """How the next token is chosen from logits ``[V]``: the largest, or a draw within the nucleus."""
    if sampling.temperature == 0:
        return lambda logits_V: int(logits_V.max(-1).indices)
    generator = torch.Generator().manual_seed(answer_seed(seed, prompt_ids))

    def draw(logits_V: Tensor) -> int:
        probability, order = torch.softmax(logits_V / sampling.temperature, -1).sort(descending=True)
        if sampling.top_p < 1.0:
            # the token that crosses top_p is kept, as everywhere in the field
            probability = probability.masked_fill(probability.cumsum(-1) - probability >= sampling.top_p, 0.0)
        return int(order[torch.multinomial(probability, 1, generator=generator)])

    return draw
