"""A fake engine whose answers are a function of the request alone, and a folder to run the generate stage in."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eyrie.config import Engine, Gates, Sampling
from eyrie.conversation import Reject
from eyrie.engines.base import Answer, Request
from eyrie.formats.jsonl import read_jsonl, write_jsonl
from eyrie.formats.manifest import Manifest, RowCounts, read_manifest, stats_path
from eyrie.formats.publish import publish, write_json
from eyrie.generate.stage import PromptRenderer, generate
from eyrie.recipes import subtree
from eyrie.render.renderer import TurnRow
from eyrie.targets.card import TargetCard
from tests.fake_answers import STOP, answer_ids

MAX_TOKENS, CONTEXT = 24, 64


class FakeRenderer:
    """Ids are the bytes of the last message."""

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        if messages[-1]["content"] == "refuse me":
            raise Reject("template_refused")
        return list(messages[-1]["content"].encode())

    def decode(self, ids: list[int]) -> str:
        assert STOP not in ids
        return " ".join(map(str, ids))

    def said(self, prompt_ids: Sequence[int], output_ids: Sequence[int], *, tools: bool) -> dict[str, Any]:
        """The answer's ids as words; where tools are declared, every other answer calls one of two."""
        if output_ids[0] % 11 == 0:
            raise Reject("unparsed", "a call that is none")
        message: dict[str, Any] = {"role": "assistant", "content": " ".join(map(str, output_ids))}
        if tools and output_ids[0] % 2:
            name = "search" if output_ids[0] % 4 == 1 else "add"
            message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {}}}]
        return message

    def last_turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> TurnRow | Reject:
        """The last message is the answer: a character an id, then the stop id."""
        prompt = self.prompt_ids(messages[:-1], tools)
        spoken = (messages[-1].get("reasoning") or "") + messages[-1]["content"]
        return TurnRow(len(messages) - 1, [*prompt, *spoken.encode(), STOP], len(prompt), "")


class FakeEngine:
    """Answers are a function of the request alone; a seed settles the order in which they end."""

    def __init__(self, slots: int = 4, order: int = 0, sleep: float = 0.0, fail_after: int | None = None) -> None:
        self.slots, self.random, self.sleep, self.fail_after = slots, random.Random(order), sleep, fail_after
        self.asked: list[Request] = []
        self.pauses = 0

    def answer(self, requests: Iterator[Request | None], finished: Callable[[Request, Answer], None]) -> None:
        running: list[Request] = []
        open_ = True
        while open_ or running:
            while open_ and len(running) < self.slots:
                try:
                    request = next(requests)
                except StopIteration:
                    open_ = False
                    break
                if request is None:
                    assert running, "a pause with nothing in flight would never end"
                    self.pauses += 1
                    break
                self.asked.append(request)
                running.append(request)
            if running:
                if self.fail_after is not None and len(self.asked) > self.fail_after:
                    raise KeyboardInterrupt
                time.sleep(self.sleep)
                done = running.pop(self.next_to_end(running))
                finished(done, self.of(done))

    def next_to_end(self, running: list[Request]) -> int:
        return self.random.randrange(len(running))

    @staticmethod
    def of(request: Request) -> Answer:
        seed = request.seed if request.sampling.temperature else 0
        return Answer(*answer_ids(request.prompt_ids, request.sampling.max_tokens, seed))

    @classmethod
    def of_ids(cls, prompt_ids: list[int]) -> Answer:
        """The greedy answer to a prompt."""
        return cls.of(Request(0, prompt_ids, Sampling(max_tokens=MAX_TOKENS), 0))


class LockstepEngine(FakeEngine):
    """Gives every request in flight a token per step, as real engines do."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.step = 0
        self.ends: dict[int, int] = {}

    def next_to_end(self, running: list[Request]) -> int:
        for request in running:
            self.ends.setdefault(request.position, self.step + len(self.of(request).output_ids))
        chosen = min(range(len(running)), key=lambda n: self.ends[running[n].position])
        self.step = self.ends[running[chosen].position]
        return chosen


class Desk:
    """A folder with a prompt shard and a target card, and a way to run the stage there."""

    def __init__(
        self,
        root: Path,
        contents: list[str],
        *,
        rows: list[dict[str, Any]] | None = None,
        turns: int | None = None,
        renderer: PromptRenderer | None = None,
        gates: Gates | None = None,
        context: int = CONTEXT,
    ) -> None:
        self.gates, self.context = gates, context
        rows = [prompt_row(n, content) for n, content in enumerate(contents)] if rows is None else rows
        self.turns = {"turns": turns} if turns else {}
        self.renderer = renderer or FakeRenderer()
        self.progress = root / "logs" / "s0000.json"
        self.root = root
        self.prompts = root / "code" / "s0000.jsonl.zst"
        self.out = root / "responses" / "s0000.jsonl.zst"
        self.journal = root / "journal" / "s0000.jsonl"
        self.target = root / "target.json"
        self.contents = contents
        with publish(self.prompts, stage="ingest", recipe={}) as draft:
            write_jsonl(draft.path, rows)
            draft.rows = RowCounts(read=len(rows), kept=len(rows))
        self.set_target("target of the day")

    def set_target(self, target: str) -> None:
        numbers = dict.fromkeys(
            ("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "vocab_size"), 1,
        )  # fmt: skip
        card = TargetCard(
            model="m", architecture="a", model_type="t", rms_norm_eps=1e-5, rope_theta=1e4, tied_embeddings=True,
            dtype="bfloat16", max_position_embeddings=self.context, stop_ids=[STOP], special_ids=[STOP], target=target,
            tokenizer="tok", template="tpl", **numbers,
        )  # fmt: skip
        write_json(self.target, card.model_dump())

    def run(self, budget: int, engine: FakeEngine | None, *, afresh: bool = False, **sampling: Any) -> Manifest:
        """Run the stage; with ``engine`` None a call to the engine is a failure."""

        def make() -> FakeEngine:
            assert engine is not None, "the engine was made although every answer is in the journal"
            return engine

        generate(
            recipe_of(budget, **sampling) | self.turns,
            prompts=self.prompts,
            target=self.target,
            model="m",
            out=self.out,
            journal=self.journal,
            afresh=afresh,
            engine=make,
            renderer=self.renderer,
            progress=self.progress,
            gates=self.gates,
        )
        return read_manifest(self.out)

    def run_served(self, budget: int, options: dict[str, Any], **sampling: Any) -> Manifest:
        """Run the stage against servers; ``options`` is the config's ``engine`` section."""
        engine = Engine.model_validate({"kind": "sglang", **options})
        generate(
            recipe_of(budget, **sampling) | {"engine": subtree(engine)} | self.turns,
            prompts=self.prompts,
            target=self.target,
            model="m",
            out=self.out,
            journal=self.journal,
            options=engine,
            renderer=self.renderer,
            progress=self.progress,
            gates=self.gates,
        )
        return read_manifest(self.out)

    def records(self) -> list[dict[str, Any]]:
        """What the journal holds, its first line left out."""
        lines = self.journal.read_text().splitlines()[1:] if self.journal.exists() else []
        return [json.loads(line) for line in lines]

    def rows(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.out))

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(stats_path(self.out).read_text())
        return stats

    def published(self) -> tuple[bytes, bytes]:
        return self.out.read_bytes(), self.out.with_name(self.out.name + ".manifest.json").read_bytes()


def recipe_of(budget: int, **sampling: Any) -> dict[str, Any]:
    return {"revision": 1, "sampling": {"max_tokens": MAX_TOKENS, **sampling}, "token_budget": budget}


def prompt_row(index: int, content: str) -> dict[str, Any]:
    identity = hashlib.sha256(content.encode()).hexdigest()[:16]
    return {"id": identity, "index": index, "messages": [{"role": "user", "content": content}], "meta": {"n": index}}


def questions(count: int) -> list[str]:
    return [f"question {n}" for n in range(count)]


def length_of(content: str) -> int:
    request = Request(0, list(content.encode()), Sampling(max_tokens=MAX_TOKENS), 0)
    return len(FakeEngine.of(request).output_ids)


def shortest_prefix(contents: list[str], budget: int) -> int:
    """How many rows the definition keeps, counted the slow way."""
    filled = 0
    for count, content in enumerate(contents):
        if filled >= budget:
            return count
        filled += length_of(content)
    return len(contents)
