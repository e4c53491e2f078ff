"""The reference speculative decoder: greedy, a chain of K drafts, lossless; the ground truth for acceptance length.

One loop serves plain decoding, EAGLE-3 and prompt lookup: they differ in who proposes. Each verify runs the target on
the last emitted token and the drafts; the longest prefix of drafts that equals the target's own choices is kept, and
the target's next choice (the bonus token) is always emitted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from eyrie.drafters.decode import Eagle3Decoder
from eyrie.llama.sequence import SequenceDecoder


class Proposer(Protocol):
    """Who drafts."""

    def start(self, prompt_ids: Sequence[int], aux_TAH: np.ndarray) -> None:
        """A new sequence: its prompt and the target's auxiliary hidden states ``[T, 3, H]`` of it."""

    def propose(self, emitted: Sequence[int], aux_MAH: np.ndarray, count: int) -> list[int]:
        """Up to ``count`` drafts.

        Args:
            emitted: all tokens emitted so far, the prompt not included; the last one has no state yet.
            aux_MAH: the target's states of the tokens verified since the last call, ``[M, 3, H]``
                (none at the first call).
        """


class Plain:
    """Drafts nothing: plain greedy decoding by the same loop."""

    def start(self, prompt_ids: Sequence[int], aux_TAH: np.ndarray) -> None:
        pass

    def propose(self, emitted: Sequence[int], aux_MAH: np.ndarray, count: int) -> list[int]:
        return []


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the last n tokens, for the longest n that occurs.

    Args:
        longest: the longest n tried; then ``longest - 1`` down to 1.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.ids: list[int] = []
        self.prompt = 0

    def start(self, prompt_ids: Sequence[int], aux_TAH: np.ndarray) -> None:
        self.ids, self.prompt = list(prompt_ids), len(prompt_ids)

    def propose(self, emitted: Sequence[int], aux_MAH: np.ndarray, count: int) -> list[int]:
        ids = self.ids
        ids += emitted[len(ids) - self.prompt :]
        for n in range(min(self.longest, len(ids) - 1), 0, -1):
            tail = ids[-n:]
            for begin in range(len(ids) - n - 1, -1, -1):
                if ids[begin : begin + n] == tail:
                    return ids[begin + n : begin + n + count]
        return []


class Eagle3Proposer:
    """EAGLE-3, as served: true features for verified columns, its own output for the rest of the chain."""

    def __init__(self, drafter: Eagle3Decoder, target: SequenceDecoder) -> None:
        self.drafter, self.target = drafter, target
        self.columns = 0
        self.pending_MAH = np.empty((0, 0, 0), np.float32)
        self.prompt: list[int] = []

    def start(self, prompt_ids: Sequence[int], aux_TAH: np.ndarray) -> None:
        self.columns, self.prompt, self.pending_MAH = 0, list(prompt_ids), aux_TAH

    def propose(self, emitted: Sequence[int], aux_MAH: np.ndarray, count: int) -> list[int]:
        if self.columns:
            self.pending_MAH = aux_MAH
        # column t reads token t + 1, so the new columns read the tokens after the first column not yet done
        sequence = [*self.prompt, *emitted]
        known = sequence[self.columns + 1 : self.columns + 1 + len(self.pending_MAH)]
        feature_MH = self.drafter.fuse(self.pending_MAH)
        output_1H = self.drafter.forward(self.target.embed(known), feature_MH, self.columns)[-1:]
        self.columns += len(known)
        drafts = [self.drafter.best(output_1H)]
        for step in range(1, count):
            output_1H = self.drafter.forward(self.target.embed(drafts[-1:]), output_1H, self.columns + step - 1)
            drafts.append(self.drafter.best(output_1H))
        return drafts[:count]


@dataclass
class Trace:
    """What one decoding did.

    Attributes:
        output_ids: emitted tokens, the first (from the prefill) and the stop token included.
        drafted, accepted: per verify, how many tokens were drafted and how many of them the target agreed with.
        emitted: per verify, how many tokens came out (accepted + bonus, less what lies beyond the end).
        seconds: wall time after the prefill.
    """

    output_ids: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verifies(self) -> int:
        return len(self.emitted)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward, the bonus token included; the prefill's token is not counted."""
        return sum(self.emitted) / self.verifies if self.emitted else 1.0


def replay(
    prompt_ids: Sequence[int], output_ids: Sequence[int], proposer: Proposer, max_tokens: int, count: int
) -> Trace:
    """The trace that ``proposer`` would leave, from the known greedy output, without running the target.

    Exact for proposers that read tokens alone (prompt lookup): greedy verification accepts a draft when it is the
    target's next token, and that is known.
    """
    trace = Trace(list(output_ids[:1]))
    none = np.empty((0, 0, 0), np.float32)
    proposer.start(prompt_ids, none)
    while len(trace.output_ids) < len(output_ids):
        done = len(trace.output_ids)
        room = max_tokens - done
        drafts = proposer.propose(trace.output_ids, none, min(count, room - 1)) if room > 1 else []
        agreed = 0
        while (
            agreed < len(drafts) and list(output_ids[done + agreed : done + agreed + 1]) == drafts[agreed : agreed + 1]
        ):
            agreed += 1
        kept = list(output_ids[done : done + agreed + 1])
        trace.output_ids += kept
        trace.drafted.append(len(drafts))
        trace.accepted.append(agreed)
        trace.emitted.append(len(kept))
    return trace


@dataclass
class Prefilled:
    """A prompt in the target's cache: what every proposer starts from."""

    prompt_ids: list[int]
    aux_TAH: np.ndarray
    first: int


def prefill(target: SequenceDecoder, prompt_ids: Sequence[int]) -> Prefilled:
    """Run the prompt; the target's cache then holds exactly it."""
    target.rewind(0)
    logits_1V, aux_TAH = target.extend(list(prompt_ids), logits_from=len(prompt_ids) - 1)
    return Prefilled(list(prompt_ids), aux_TAH, int(logits_1V[-1].argmax()))


def decode(
    target: SequenceDecoder, start: Prefilled, proposer: Proposer, stop_ids: frozenset[int], max_tokens: int, count: int
) -> Trace:
    """Decode greedily from a prefilled prompt, ``count`` drafts per verify."""
    target.rewind(len(start.prompt_ids))
    trace = Trace([start.first])
    began = time.perf_counter()
    proposer.start(start.prompt_ids, start.aux_TAH)
    aux_MAH = start.aux_TAH[:0]
    while len(trace.output_ids) < max_tokens and trace.output_ids[-1] not in stop_ids:
        room = max_tokens - len(trace.output_ids)
        drafts = proposer.propose(trace.output_ids, aux_MAH, min(count, room - 1)) if room > 1 else []
        base = target.length
        logits_MV, aux_MAH = target.extend([trace.output_ids[-1], *drafts])
        choices = logits_MV.argmax(-1).tolist()
        agreed = 0
        while agreed < len(drafts) and drafts[agreed] == choices[agreed]:
            agreed += 1
        kept = choices[: agreed + 1]
        for place, token in enumerate(kept):
            if token in stop_ids:
                kept = kept[: place + 1]
                break
        target.rewind(base + agreed + 1)
        aux_MAH = aux_MAH[: agreed + 1]
        trace.output_ids += kept
        trace.drafted.append(len(drafts))
        trace.accepted.append(min(agreed, len(kept)))  # drafts behind a stop token are never emitted
        trace.emitted.append(len(kept))
    trace.seconds = time.perf_counter() - began
    return trace
