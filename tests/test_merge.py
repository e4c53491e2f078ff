"""The merge: splits, duplicates, held-out prompts, and the draft vocabulary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from eyrie.config import Merge
from eyrie.conversation import prompt_key
from eyrie.datasets import ADAPTERS, Source, adapter
from eyrie.errors import EyrieError
from eyrie.formats.manifest import RowCounts, manifest_path, read_manifest, verified_manifest
from eyrie.formats.publish import publish, write_json
from eyrie.formats.tokens import write_tokens
from eyrie.merge import merge, split_of
from eyrie.targets import TargetCard, read_card

VOCAB = 100
SPECIALS = [0, 1, 2]


def _card(folder: Path) -> Path:
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


@pytest.fixture
def card(tmp_path: Path) -> Path:
    return _card(tmp_path)


def row(conversation: str, answer: list[int], key: str = "", text: str = "", turn: int = 1) -> dict[str, Any]:
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
        "prompt_text": text or f"text of {conversation}",
    }


def shard(folder: Path, dataset: str, name: str, rows: list[dict[str, Any]], card: Path) -> Path:
    path = folder / "tokens" / dataset / f"{name}.parquet"
    with publish(path, stage="tokenize", recipe={}, identity=read_card(card).identity()) as draft:
        write_tokens(draft.path, rows)
        draft.rows = RowCounts(read=len(rows), kept=len(rows))
    return path


def recipe(datasets: list[tuple[str, float]], suites: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    chosen = {"draft_vocab_size": 16, "test_fraction": 0.0, "validation_fraction": 0.0, **options}
    return {"merge": chosen, "datasets": [list(pair) for pair in datasets], "suites": suites or {}}


def named(split: str, count: int, options: Merge, prefix: str = "c") -> list[str]:
    """Conversation ids that fall into ``split``."""
    names = (f"{prefix}{i}" for i in range(100_000))
    return [name for name in names if split_of(name, options) == split][:count]


def run(recipe: dict[str, Any], card: Path, tokens: list[Path], out: Path) -> tuple[pl.DataFrame, dict[str, Any]]:
    merge(recipe, target=card, tokens=tokens, out=out)
    for name in ("index.parquet", "vocab.safetensors", "summary.json"):
        verified_manifest(out / name, stage="merge", identity=read_card(card).identity())
    return pl.read_parquet(out / "index.parquet"), json.loads((out / "summary.json").read_text())


def test_the_index_names_rows_by_shard_and_position(card: Path, tmp_path: Path) -> None:
    tokens = [
        shard(tmp_path, "b", "s0000", [row("b0", [10, 2]), row("b1", [11, 12, 2])], card),
        shard(tmp_path, "a", "s0001", [row("a1", [13, 2])], card),
        shard(tmp_path, "a", "s0000", [row("a0", [14, 2])], card),
    ]
    index, summary = run(recipe([("a", 1.0), ("b", 0.5)]), card, tokens, tmp_path / "merged")
    assert index.columns == [
        "dataset", "shard", "row", "row_id", "conversation", "split", "weight", "length", "completion_tokens"
    ]  # fmt: skip
    assert index.select("dataset", "shard", "row").rows() == [
        ("a", "s0000", 0), ("a", "s0001", 0), ("b", "s0000", 0), ("b", "s0000", 1)
    ]  # fmt: skip
    assert index["weight"].to_list() == [1.0, 1.0, 0.5, 0.5]
    assert index["row"].dtype == index["length"].dtype == pl.Int32
    assert index["weight"].dtype == pl.Float32
    assert summary["datasets"]["b"]["splits"]["train"] == {"rows": 2, "tokens": 11, "completion_tokens": 5}
    assert summary["datasets"]["a"]["share"] == pytest.approx(4 / 6.5, abs=1e-6)
    manifest = read_manifest(tmp_path / "merged" / "index.parquet")
    assert set(manifest.inputs) == {"a/s0000.parquet", "a/s0001.parquet", "b/s0000.parquet"}
    assert manifest.rows == RowCounts(read=4, kept=4)


@settings(max_examples=30)
@given(st.floats(0, 0.5), st.floats(0, 0.4))
def test_splits_have_the_shares_that_were_asked_for(test: float, validation: float) -> None:
    options = Merge(test_fraction=test, validation_fraction=validation)
    counted = Counter(split_of(str(i), options) for i in range(1500))
    assert counted["test"] / 1500 == pytest.approx(test, abs=0.05)
    assert counted["validation"] / 1500 == pytest.approx(validation, abs=0.05)


def test_no_conversation_stands_in_two_splits(card: Path, tmp_path: Path) -> None:
    rows = [row(f"c{i}", [10, 2], turn=turn) for i in range(60) for turn in (1, 3, 5)]
    made = recipe([("a", 1.0)], test_fraction=0.3, validation_fraction=0.3)
    index, _ = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert len(index) == 180
    assert index.group_by("conversation").agg(pl.col("split").n_unique())["split"].max() == 1
    assert set(index["split"]) == {"train", "validation", "test"}


def test_the_first_dataset_of_the_config_keeps_a_shared_prompt(card: Path, tmp_path: Path) -> None:
    tokens = [
        shard(tmp_path, "a", "s0000", [row("a0", [10, 2], "same"), row("a1", [10, 2])], card),
        shard(tmp_path, "b", "s0000", [row("b0", [10, 2], "same"), row("b1", [10, 2])], card),
    ]
    index, summary = run(recipe([("a", 1.0), ("b", 1.0)]), card, tokens, tmp_path / "merged")
    assert index["conversation"].to_list() == ["a0", "a1", "b1"]
    assert summary["datasets"]["b"]["left_out"] == summary["left_out"] == {"cross_dataset_duplicate": 1}
    index, _ = run(recipe([("b", 1.0), ("a", 1.0)]), card, tokens, tmp_path / "merged")
    assert index["conversation"].to_list() == ["b0", "b1", "a1"]


def test_training_shares_no_prompt_with_the_test_split(card: Path, tmp_path: Path) -> None:
    options = Merge(test_fraction=0.3, validation_fraction=0.3)
    train, held = named("train", 4, options), named("test", 3, options)
    watched = named("validation", 2, options)
    long = "one two three four five six seven"
    rows = [
        row(held[0], [10, 2], "asked"),
        row(held[1], [10, 2], "asked", long + " eight"),
        row(held[2], [10, 2]),
        row(train[0], [10, 2], "asked"),
        row(train[1], [10, 2], text="zero " + long),
        row(train[2], [10, 2], text="one two three four"),
        row(watched[0], [10, 2], "asked"),
        row(watched[1], [10, 2]),
    ]
    made = recipe([("a", 1.0)], test_fraction=0.3, validation_fraction=0.3, decontamination_ngram=6)
    index, summary = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert set(index["conversation"]) == {*held, train[2], watched[1]}
    assert summary["left_out"] == {"held_out_prompt": 3}
    assert read_manifest(tmp_path / "merged" / "index.parquet").rows.dropped == {"held_out_prompt": 3}


def test_prompts_of_an_external_suite_are_left_out_of_every_split(card: Path, tmp_path: Path) -> None:
    text = "write a function that adds two numbers and returns the result"

    @adapter("test-suite")
    def suite(source: Source) -> Iterator[dict[str, Any]]:
        yield {"messages": [{"role": "user", "content": text}]}

    rows = [
        row("a", [10, 2], prompt_key([{"role": "user", "content": text.upper() + "!"}])),
        row("b", [10, 2], text="Please: " + text + " quickly"),
        row("c", [10, 2]),
    ]
    made = recipe([("a", 1.0)], {"ext": {"dataset": "test-suite"}}, decontamination_ngram=8)
    try:
        index, summary = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    finally:
        del ADAPTERS["test-suite"]
    assert index["conversation"].to_list() == ["c"]
    assert summary["left_out"] == {"benchmark_prompt": 2}


def test_the_draft_vocabulary_counts_supervised_training_tokens_alone(card: Path, tmp_path: Path) -> None:
    options = Merge(test_fraction=0.3, validation_fraction=0.0)
    (train,), (held,) = named("train", 1, options), named("test", 1, options)
    rows = [row(train, [50] * 5 + [60] * 3 + [70] + [2]), row(held, [80] * 50 + [60] * 50)]
    made = recipe([("a", 1.0)], test_fraction=0.3, validation_fraction=0.0, draft_vocab_size=16)
    _, summary = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    tensors = load_file(tmp_path / "merged" / "vocab.safetensors")
    kept = np.arange(16) + tensors["d2t"]
    # specials, the three seen ids, then the lowest unused; prompt ids 90, 91 and the test row's 80 count for nothing
    assert kept.tolist() == sorted([*SPECIALS, 50, 60, 70, *range(3, 13)])
    assert tensors["t2d"].dtype == np.bool_
    assert tensors["t2d"].shape == (VOCAB,)
    assert np.flatnonzero(tensors["t2d"]).tolist() == kept.tolist()
    coverage = summary["draft_vocabulary"]["coverage"]
    assert (coverage["train"], coverage["held_out"], coverage["all"]) == (1.0, 0.5, round(60 / 110, 6))
    assert coverage["held_out_by_dataset"] == {"a": 0.5}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=5),
    st.integers(16, VOCAB),
)
def test_no_kept_id_is_rarer_than_one_left_out(answers: list[list[int]], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        card = _card(folder)
        rows = [row(f"c{i}", answer) for i, answer in enumerate(answers)]
        run(recipe([("a", 1.0)], draft_vocab_size=size), card, [shard(folder, "a", "s0000", rows, card)], folder)
        tensors = load_file(folder / "vocab.safetensors")
    kept = set((np.arange(size) + tensors["d2t"]).tolist())
    counts = Counter(token for answer in answers for token in answer)
    assert len(kept) == size
    assert kept >= set(SPECIALS)
    free = kept - set(SPECIALS)
    assert min((counts[i] for i in free), default=0) >= max((counts[i] for i in set(range(VOCAB)) - kept), default=0)


def test_merging_twice_gives_the_same_bytes(card: Path, tmp_path: Path) -> None:
    rows = [row(f"c{i}", [10 + i % 40, 2]) for i in range(50)]
    tokens = [shard(tmp_path, "a", "s0000", rows, card)]
    made, out = recipe([("a", 1.0)], test_fraction=0.2, validation_fraction=0.2), tmp_path / "merged"
    run(made, card, tokens, out)
    files = [
        path
        for name in ("index.parquet", "vocab.safetensors", "summary.json")
        for path in (out / name, manifest_path(out / name))
    ]
    first = [path.read_bytes() for path in files]
    run(made, card, tokens, out)
    assert [path.read_bytes() for path in files] == first


def test_faults_are_one_line(card: Path, tmp_path: Path) -> None:
    tokens = [shard(tmp_path, "a", "s0000", [row("c0", [10, 2])], card)]
    cases = [
        (recipe([("a", 1.0)], draft_vocab_size=101), "draft_vocab_size is 101, the target has only 100 tokens"),
        (recipe([("b", 1.0)]), "belongs to dataset 'a', which the config does not name"),
        (recipe([("a", 1.0), ("b", 1.0)]), "dataset b: none of its token shards holds a row"),
        (recipe([("a", 1.0)], test_fraction=0.999), "no row is left to train on out of 1"),
    ]
    for made, message in cases:
        with pytest.raises(EyrieError, match=message) as caught:
            merge(made, target=card, tokens=tokens, out=tmp_path / "merged")
        assert "\n" not in str(caught.value)
    foreign = shard(tmp_path, "a", "s0001", [row("c1", [VOCAB, 2])], card)
    with pytest.raises(EyrieError, match=r"s0001.parquet: holds token id 100, the target has 100"):
        merge(recipe([("a", 1.0)]), target=card, tokens=[*tokens, foreign], out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    tokens[0].write_bytes(b"short")
    with pytest.raises(EyrieError, match=r"holds 5 bytes, its manifest says"):
        merge(recipe([("a", 1.0)]), target=card, tokens=tokens, out=tmp_path / "merged")
