"""Token shards made on the spot, and the merge run over them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from eyrie.config import Merge
from eyrie.datasets import ADAPTERS, Source, adapter
from eyrie.formats.manifest import RowCounts, verified_manifest
from eyrie.formats.publish import publish, write_json
from eyrie.formats.tokens import write_tokens
from eyrie.merge import merge, split_of
from eyrie.targets import TargetCard, read_card

VOCAB = 100
SPECIALS = [0, 1, 2]


def make_card(folder: Path) -> Path:
    facts: dict[str, Any] = dict.fromkeys(
        ("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 8
    )
    made = TargetCard(
        model="m", architecture="a", model_type="t", vocab_size=VOCAB, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=64, tied_embeddings=True, dtype="bfloat16", stop_ids=[2], special_ids=SPECIALS,
        target="T" * 64, tokenizer="K" * 64, template="C" * 64, **facts,
    )  # fmt: skip
    write_json(folder / "target.json", made.model_dump())
    return folder / "target.json"


def row(
    conversation: str, answer: list[int], key: str = "", text: str | list[str] = "", turn: int = 1
) -> dict[str, Any]:
    """A token row: three prompt ids, then ``answer``; ``text`` is what it asks, or a list of such."""
    ids = [1, 90, 91, *answer]
    return {
        "row_id": f"{conversation}:{turn}",
        "conversation": conversation,
        "prompt_key": key or conversation,
        "turn": turn,
        "input_ids": ids,
        "spans": [{"start": 3, "end": len(ids)}],
        "length": len(ids),
        "completion_tokens": len(answer),
        "finish_reason": "stop",
        "asked": text if isinstance(text, list) else [text or f"text of {conversation}"],
    }


def shard(folder: Path, dataset: str, name: str, rows: list[dict[str, Any]], card: Path) -> Path:
    path = folder / "tokens" / dataset / f"{name}.parquet"
    with publish(path, stage="tokenize", recipe={}, identity=read_card(card).identity()) as draft:
        write_tokens(draft.path, rows)
        draft.rows = RowCounts(read=len(rows), kept=len(rows))
    return path


def recipe(
    datasets: list[tuple[str, float]],
    suites: dict[str, Any] | None = None,
    caps: dict[str, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    size = {} if "draft_vocab_from" in options else {"draft_vocab_size": 16}
    chosen = {**size, "test_fraction": 0.0, "validation_fraction": 0.0, **options}
    return {"merge": chosen, "datasets": [list(pair) for pair in datasets], "suites": suites or {}, "caps": caps or {}}


@contextmanager
def suite(*prompts: list[str]) -> Iterator[dict[str, Any]]:
    """A registered adapter whose conversations have these user turns, as the ``suites`` of a recipe."""

    @adapter("test-suite")
    def read(source: Source) -> Iterator[dict[str, Any]]:
        for turns in prompts:
            messages = [{"role": "user", "content": turns[0]}]
            for turn in turns[1:]:
                messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": turn}]
            yield {"messages": messages}

    try:
        yield {"ext": {"dataset": "test-suite"}}
    finally:
        del ADAPTERS["test-suite"]


def named(split: str, count: int, options: Merge, prefix: str = "c") -> list[str]:
    """Conversation ids whose rows, their key being the id, fall into ``split``."""
    names = (f"{prefix}{i}" for i in range(100_000))
    return list(islice((name for name in names if split_of(name, options) == split), count))


def run(recipe: dict[str, Any], card: Path, tokens: list[Path], out: Path) -> tuple[pl.DataFrame, dict[str, Any]]:
    merge(recipe, target=card, tokens=tokens, out=out)
    for name in ("index.parquet", "vocab.safetensors", "summary.json"):
        verified_manifest(out / name, stage="merge", identity=read_card(card).identity())
    return pl.read_parquet(out / "index.parquet"), json.loads((out / "summary.json").read_text())
