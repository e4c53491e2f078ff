"""The gate of an fp8 key-value cache: its server must go on as the server with the plain cache does.

The plain server answers some prompts greedily; the other one follows these answers, token by token. Where it would say
something else that is counted, and it is set back on the path. A token that comes of a prefill says nothing (backends
may attend to a prompt's keys as they were computed, not as they were stored), so only decoded tokens count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyrie.engines.base import Request
from eyrie.errors import EyrieError
from eyrie.formats.publish import write_json
from eyrie.locks import locked
from eyrie.servers.lease import Lease, lease
from eyrie.servers.probe import ask
from eyrie.servers.spec import Spec

PROMPTS, TOKENS = 16, 64
LEAST_DECODED = 64
"""Fewer decoded tokens are no evidence."""
TIMEOUT_S = 900.0

Trail = list[tuple[int, float]]
"""Token ids with their log-probabilities."""


@dataclass
class Tally:
    """How a server followed some paths.

    Attributes:
        decoded: tokens compared.
        same: those that are the path's.
        drift: absolute differences of the log-probability of tokens that are the same, summed.
    """

    decoded: int = 0
    same: int = 0
    drift: float = 0.0

    def figures(self) -> dict[str, float]:
        return {
            "agreement": round(self.same / max(1, self.decoded), 4),
            "logprob_drift": round(self.drift / max(1, self.same), 5),
        }


@dataclass(frozen=True)
class CacheGate:
    """Compares two servers once, and remembers the verdict in the folder of the one that is to be used.

    Args:
        plain, spec: the server with the plain cache, and the one that is to be used.
        root: folder for the files of servers.
        least: share of decoded tokens that must be the same.
        stop_ids: ids that end an answer.
        made_of: what a verdict holds for besides ``spec``: version of the engine, hash of the target.
    """

    plain: Spec
    spec: Spec
    root: Path
    least: float
    stop_ids: frozenset[int]
    made_of: dict[str, str] = field(default_factory=dict)

    def check(self, requests: Sequence[Request]) -> None:
        """Let both servers answer ``requests`` (one after the other, a device may hold only one of them).

        Raises:
            EyrieError: the share is under ``least``, there is too little to compare, or a server cannot be had.
        """
        folder = self.spec.folder(self.root.resolve())
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / "kv_cache.json"
        with locked(folder / "kv_cache.lock"):
            figures = self._remembered(record)
            if figures is None:
                figures = self.made_of | self._compare(requests)
                write_json(record, figures)
        if figures["agreement"] < self.least:
            raise EyrieError(
                f"{record}: with server.kv_cache fp8, {figures['agreement']:.1%} of {figures['decoded_tokens']} greedy "
                f"tokens are those of the plain cache (which repeats {figures['plain_agreement']:.1%} of them itself); "
                f"server.kv_cache_gate is {self.least:.1%}: set server.kv_cache to auto, or lower the gate"
            )

    def _remembered(self, record: Path) -> dict[str, Any] | None:
        try:
            figures = json.loads(record.read_text())
        except (OSError, ValueError):
            return None
        same = isinstance(figures, dict) and all(figures.get(name) == value for name, value in self.made_of.items())
        return figures if same and "agreement" in figures else None

    def _compare(self, requests: Sequence[Request]) -> dict[str, Any]:
        prompts = [request.prompt_ids for request in requests]
        lengths = [min(TOKENS, request.sampling.max_tokens) for request in requests]
        with lease(self.plain.model_copy(update={"idle_s": 0.0}), self.root) as held:
            paths = self._paths(held, prompts, lengths)
            decoded = sum(len(path) - 1 for path in paths)
            if decoded < LEAST_DECODED:
                raise EyrieError(
                    f"{held.log}: {len(prompts)} prompts give {decoded} tokens to compare an fp8 cache on, "
                    f"{LEAST_DECODED} are needed: set server.kv_cache to auto, or server.kv_cache_gate to 0 to go "
                    "without"
                )
            again = follow(held, prompts, paths)
        with lease(self.spec, self.root) as held:
            followed = follow(held, prompts, paths)
        plain = again.figures()["agreement"]
        return {"prompts": len(prompts), "decoded_tokens": followed.decoded, "plain_agreement": plain} | (
            followed.figures()
        )

    def _paths(self, held: Lease, prompts: list[list[int]], lengths: list[int]) -> list[Trail]:
        """The greedy answers, each up to its stop token."""
        with ThreadPoolExecutor(PROMPTS) as pool:
            answers = list(pool.map(lambda prompt, count: _greedy(held, prompt, count), prompts, lengths))
        ends = [next((n + 1 for n, (id, _) in enumerate(path) if id in self.stop_ids), None) for path in answers]
        return [path[:end] for path, end in zip(answers, ends, strict=True)]


def follow(held: Lease, prompts: list[list[int]], paths: list[Trail]) -> Tally:
    """Let a server go along ``paths``, all at once.

    Raises:
        EyrieError: it fails to answer.
    """
    total = Tally()
    with ThreadPoolExecutor(PROMPTS) as pool:
        for tally in pool.map(lambda prompt, path: _follow(held, prompt, path), prompts, paths):
            total.decoded += tally.decoded
            total.same += tally.same
            total.drift += tally.drift
    return total


def _follow(held: Lease, prompt: list[int], path: Trail) -> Tally:
    tally, at = Tally(), 0
    while at < len(path):
        said = _greedy(held, prompt + [id for id, _ in path[:at]], len(path) - at)
        for n, ((wanted, was), (got, now)) in enumerate(zip(path[at:], said, strict=True)):
            at += 1
            same = wanted == got
            if n > 0:  # the first one is the prefill's
                tally.decoded += 1
                tally.same += same
                tally.drift += abs(was - now) if same else 0.0
            if not same:
                break
    return tally


def _greedy(held: Lease, ids: list[int], count: int) -> Trail:
    """``count`` greedy tokens, whatever would end an answer."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
    }
    try:
        scored = ask(f"{held.ready().url}/generate", body, timeout=TIMEOUT_S)["meta_info"]["output_token_logprobs"]
        path = [(int(id), float(logprob)) for logprob, id, *_ in scored]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EyrieError(
            f"{held.log}: the server failed to answer ({error!r}) while its cache was examined; its last lines say why"
        ) from error
    if len(path) != count:
        raise EyrieError(f"{held.log}: the server gave {len(path)} tokens instead of {count}; its last lines say why")
    return path
