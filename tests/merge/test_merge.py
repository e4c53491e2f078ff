"""The merge as a stage: the index, splits, held-out prompts, suites, and faults."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_desk import VOCAB, make_card, named, recipe, row, run, shard, suite
from pyarrow.parquet import ParquetFile

import eyrie.merge.index
from eyrie.config import Merge
from eyrie.conversation import prompt_key
from eyrie.errors import EyrieError
from eyrie.formats.manifest import RowCounts, manifest_path, read_manifest
from eyrie.merge import merge, split_of


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
    train, held = named("train", 3, options), named("test", 2, options)
    watched = named("validation", 2, options)
    long = "one two three four five six seven"
    rows = [
        row(held[0], [10, 2], text=long + " eight"),
        row(held[1], [10, 2]),
        row(train[0], [10, 2], held[1]),
        row(train[1], [10, 2], text="zero " + long),
        row(train[2], [10, 2], text="one two three four"),
        row(watched[0], [10, 2], text=long + " nine"),
        row(watched[1], [10, 2]),
    ]
    made = recipe([("a", 1.0)], test_fraction=0.3, validation_fraction=0.3, decontamination_ngram=6)
    index, summary = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert set(index["conversation"]) == {*held, train[0], train[2], watched[1]}
    assert index.filter(pl.col("conversation") == train[0])["split"].item() == "test", "as its prompt is"
    assert summary["left_out"] == {"held_out_prompt": 2}
    assert read_manifest(tmp_path / "merged" / "index.parquet").rows.dropped == {"held_out_prompt": 2}


def test_prompts_of_an_external_suite_are_left_out_of_every_split(card: Path, tmp_path: Path) -> None:
    text = "write a function that adds two numbers and returns the result"
    rows = [
        row("a", [10, 2], prompt_key([{"role": "user", "content": text.upper() + "!"}])),
        row("b", [10, 2], text="Please: " + text + " quickly"),
        row("c", [10, 2]),
    ]
    with suite([text]) as suites:
        made = recipe([("a", 1.0)], suites, decontamination_ngram=8)
        index, summary = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert index["conversation"].to_list() == ["c"]
    assert summary["left_out"] == {"benchmark_prompt": 2}


def test_every_turn_of_a_suite_and_of_a_conversation_counts(card: Path, tmp_path: Path) -> None:
    """A later question of a benchmark is a benchmark prompt, and a later turn of a row holds the earlier ones."""
    second = "now rewrite your answer as a limerick about the sea and its birds"
    rows = [
        row("a", [10, 2], text="so " + second, turn=1),
        row("a", [10, 2], text="thanks", turn=3),
        row("b", [10, 2], text="thanks", turn=1),
    ]
    with suite(["who lives at the beach", second]) as suites:
        made = recipe([("a", 1.0)], suites, decontamination_ngram=8)
        index, summary = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert index["conversation"].to_list() == ["b"]
    assert summary["left_out"] == {"benchmark_prompt": 2}


def test_a_turn_inside_an_answered_conversation_is_compared_too(card: Path, tmp_path: Path) -> None:
    """One row holds the whole conversation: its first, middle and last questions count alike."""
    options = Merge(test_fraction=0.3, validation_fraction=0.0)
    train, held = named("train", 5, options), named("test", 1, options)
    asked = "name the seven hills of the old city and who built on them"
    other = "how many sheep can graze on an acre of wet land in spring"
    rows = [
        row(held[0], [10, 2], text=["hello", other, "thanks"]),
        row(train[0], [10, 2], text=["hello", "so " + asked, "thanks"]),
        row(train[1], [10, 2], text=["say " + other, "thanks", "go on"]),
        row(train[2], [10, 2], text=["hello", "go on", other + " and summer"]),
        row(train[3], [10, 2], text=["hello", "thanks", "go on"]),
        row(train[4], [10, 2], text=[]),
    ]
    with suite([asked]) as suites:
        made = recipe([("a", 1.0)], suites, test_fraction=0.3, decontamination_ngram=8)
        index, summary = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert index["conversation"].to_list() == [held[0], train[3], train[4]]
    assert summary["left_out"] == {"benchmark_prompt": 1, "held_out_prompt": 2}


def test_a_short_turn_of_a_suite_counts_when_it_is_the_same(card: Path, tmp_path: Path) -> None:
    """Fewer words than a run: equal but for case, spacing and end marks; and it may be any turn of a suite or row."""
    turns = {
        "same": "  what is 2 + 2 * 3 in\nBASE four",
        "else": "what is 2 - 2 / 3 in base four?",
        "longer": "please: what is 2 + 2 * 3 in base four?",
        "later": "name a color of the sky",
        "tiny": "thank you",
    }
    rows = [row(name, [10, 2], text=["good morning to you all", text]) for name, text in turns.items()]
    with suite(["what is 2 + 2 * 3 in base four?", "thank you", "Name a color of the sky!"]) as suites:
        made = recipe([("a", 1.0)], suites, decontamination_ngram=13)
        index, _ = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert index["conversation"].to_list() == ["else", "longer", "tiny"]


def test_short_turns_of_the_test_split_hold_nothing_back(card: Path, tmp_path: Path) -> None:
    options = Merge(test_fraction=0.3, validation_fraction=0.0)
    chosen = named("train", 2, options) + named("test", 2, options)
    rows = [row(name, [10, 2], text=[name, "could you please go on with that"]) for name in chosen]
    made = recipe([("a", 1.0)], test_fraction=0.3)
    index, _ = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert index["conversation"].to_list() == chosen


def test_instructions_that_every_task_repeats_are_no_prompt(card: Path, tmp_path: Path) -> None:
    """An agent's page of instructions stands in every row; what tells the tasks apart is still compared."""
    options = Merge(test_fraction=0.3, validation_fraction=0.0)
    train, held = named("train", 3, options), named("test", 24, options)
    page = "you are in a repository so look around before you change anything at all "
    rows = [row(name, [10, 2], text=page + f"issue {name} is about the {name} loader and its {name}") for name in held]
    rows += [row(train[0], [10, 2], text=page + "issue of another kind")]
    rows += [row(train[1], [10, 2], text=page + f"issue {held[0]} is about the {held[0]} loader and its {held[0]}")]
    rows += [row(train[2], [10, 2], text="unlike any other")]
    made = recipe([("a", 1.0)], test_fraction=0.3, decontamination_ngram=8)
    tokens = [shard(tmp_path, "a", f"s000{part}", rows[part::2], card) for part in range(2)]
    index, summary = run(made, card, tokens, tmp_path / "merged")
    assert set(index["conversation"]) == {*held, train[0], train[2]}
    assert summary["left_out"] == {"held_out_prompt": 1}
    assert summary["datasets"]["a"]["template_runs"] == len(page.split()) - 8 + 2  # "issue" follows it everywhere
    few = [shard(tmp_path, "a", "s0000", rows[:3] + rows[24:], card)]
    index, _ = run(made, card, few, tmp_path / "merged")
    assert set(index["conversation"]) == {*held[:3], train[2]}, "three prompts show no template"


def test_a_benchmark_prompt_in_the_test_split_holds_no_training_row_back(card: Path, tmp_path: Path) -> None:
    options = Merge(test_fraction=0.3, validation_fraction=0.0)
    train, (held,) = named("train", 2, options), named("test", 1, options)
    words = "one two three four five six seven eight"
    rows = [
        row(held, [10, 2], text=words + " alpha beta"),
        row(train[0], [10, 2], text="six seven eight alpha beta"),
        row(train[1], [10, 2]),
    ]
    tokens = [shard(tmp_path, "a", "s0000", rows, card)]
    made: dict[str, Any] = {"test_fraction": 0.3, "validation_fraction": 0.0, "decontamination_ngram": 5}
    index, _ = run(recipe([("a", 1.0)], **made), card, tokens, tmp_path / "merged")
    assert index["conversation"].to_list() == [held, train[1]]
    with suite([words]) as suites:
        index, _ = run(recipe([("a", 1.0)], suites, **made), card, tokens, tmp_path / "merged")
    assert index["conversation"].to_list() == train


def test_chinese_prompts_are_compared_by_characters(card: Path, tmp_path: Path) -> None:
    """Text without spaces is not one long word that never matches."""
    asked = "请写一篇关于秋天的短文并说明树叶为什么会变黄"
    rows = [row("a", [10, 2], text="你好 " + asked + "谢谢"), row("b", [10, 2], text="请写一篇关于春天的短文")]
    with suite([asked]) as suites:
        index, _ = run(recipe([("a", 1.0)], suites), card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path)
    assert index["conversation"].to_list() == ["b"]


def test_one_trajectory_in_three_datasets_is_kept_once(card: Path, tmp_path: Path) -> None:
    """The same conversations in three spellings of one source: equal prompts, different ids and answers."""
    rows = {
        name: [row(f"{name}{i}", [10 + k, 2], f"issue {i}") for i in range(5)]
        for k, name in enumerate(("xml", "ticks", "tool"))
    }
    tokens = [shard(tmp_path, name, "s0000", mine, card) for name, mine in rows.items()]
    index, summary = run(recipe([(n, 1.0) for n in ("tool", "xml", "ticks")]), card, tokens, tmp_path / "merged")
    assert set(index["dataset"]) == {"tool"}
    assert summary["left_out"] == {"cross_dataset_duplicate": 10}
    empty = [warning.split(" brings no row")[0] for warning in summary["warnings"] if "no row" in warning]
    assert empty == ["dataset xml", "dataset ticks"]


def test_many_answers_to_one_prompt_stand_in_one_split_and_none_is_lost(card: Path, tmp_path: Path) -> None:
    rows = [row(f"c{i}.{k}", [10, 2], f"prompt {i}", turn=t) for i in range(60) for k in range(16) for t in (1, 3)]
    made = recipe([("a", 1.0)], test_fraction=0.2, validation_fraction=0.2)
    index, summary = run(made, card, [shard(tmp_path, "a", "s0000", rows, card)], tmp_path / "merged")
    assert (len(index), summary["left_out"], summary["warnings"]) == (len(rows), {}, [])
    prompt = pl.col("conversation").str.split(".").list.first()
    assert index.group_by(prompt).agg(pl.col("split").n_unique())["split"].max() == 1
    assert set(index["split"]) == {"train", "validation", "test"}


def test_prompts_cut_from_one_template_are_said(card: Path, tmp_path: Path) -> None:
    """Long instructions that every prompt repeats tie the training rows to the test split: the loss is warned of."""
    options = Merge(test_fraction=0.2, validation_fraction=0.0)
    chosen = named("train", 8, options) + named("test", 2, options)
    rows = [row(name, [10, 2], text="always say what you did and then why for issue " + name) for name in chosen]
    chosen = named("train", 8, options, "d")
    made = recipe([("a", 1.0), ("b", 1.0)], test_fraction=0.2, decontamination_ngram=5)
    tokens = [
        shard(tmp_path, "a", "s0000", rows, card),
        shard(tmp_path, "b", "s0000", [row(name, [10, 2]) for name in chosen], card),
    ]
    _, summary = run(made, card, tokens, tmp_path / "merged")
    (warning,) = summary["warnings"]
    assert warning.startswith(
        "dataset a loses 80% of its rows because they share long runs of words with the test split"
    )


def test_generated_ids_are_counted_as_they_are(card: Path, tmp_path: Path) -> None:
    """Ids that decode to text which encodes otherwise: the shard is only read, and the index names the very row."""
    rows = [row("a", [40, 41, 40, 2]), row("b", [39, 2])]
    path = shard(tmp_path, "a", "s0000", rows, card)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    index, _ = run(recipe([("a", 1.0)], draft_vocab_size=16), card, [path], tmp_path / "merged")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert index.select("row", "row_id", "length", "completion_tokens").rows() == [(0, "a:1", 7, 4), (1, "b:1", 5, 2)]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_row_is_accounted_for(data: st.DataObject) -> None:
    import tempfile

    words = st.lists(st.sampled_from("abcde"), min_size=1, max_size=6).map(" ".join)
    one = st.tuples(st.integers(0, 12), st.integers(0, 9), words, st.integers(1, 3))
    shards = data.draw(
        st.dictionaries(st.sampled_from(["x", "y", "z"]), st.lists(one, min_size=1, max_size=12), min_size=1)
    )
    caps = {name: data.draw(st.integers(36, 60)) for name in shards if data.draw(st.booleans())}
    with tempfile.TemporaryDirectory() as name, suite(["a b c d"]) as suites:
        folder = Path(name)
        card = make_card(folder)
        tokens = [
            shard(folder, dataset, "s0000", [
                row(f"{dataset}{c}", [10 + n] * n, f"key {key}", text, turn)
                for turn, (c, key, text, n) in enumerate(mine)
            ], card)
            for dataset, mine in shards.items()
        ]  # fmt: skip
        options: dict[str, Any] = {"test_fraction": 0.2, "validation_fraction": 0.2, "decontamination_ngram": 3}
        made = recipe([(n, 1.0) for n in shards], suites, caps, **options)
        try:
            index, summary = run(made, card, tokens, folder / "merged")
        except EyrieError as error:
            assert "no row is left to train on" in str(error)  # noqa: PT017
            return
        manifest = read_manifest(folder / "merged" / "index.parquet")
    assert manifest.rows.dropped == summary["left_out"]
    assert manifest.rows.read == sum(len(mine) for mine in shards.values())
    assert manifest.rows.kept == len(index) == sum(figures["rows"] for figures in summary["datasets"].values())
    for dataset, mine in shards.items():
        figures = summary["datasets"][dataset]
        kept = index.filter(pl.col("dataset") == dataset)
        assert figures["rows"] == len(kept) == sum(split["rows"] for split in figures["splits"].values())
        assert len(mine) == figures["rows"] + sum(figures["left_out"].values())
        if dataset in caps:
            assert kept["completion_tokens"].sum() <= caps[dataset]
    lost = [Counter(figures["left_out"]) for figures in summary["datasets"].values()]
    assert summary["left_out"] == dict(sum(lost, Counter()))


def test_a_long_index_is_the_same_rows_in_order(card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written a group of rows at a time; shards are smaller and larger than a group, and one brings no row."""
    sizes = [3, 30, 1, 16, 0, 40]
    rows = [[row(f"c{k}.{i}", [10] * (1 + i % 5)) for i in range(size)] for k, size in enumerate(sizes)]
    rows[4] = rows[5][:2]  # the same prompts in a later dataset
    tokens = [shard(tmp_path, "b" if k == 4 else "a", f"s{k:04d}", mine, card) for k, mine in enumerate(rows)]
    made = recipe([("a", 1.0), ("b", 0.5)])
    whole, _ = run(made, card, tokens, tmp_path / "whole")
    monkeypatch.setattr(eyrie.merge.index, "GROUP_ROWS", 16)
    cut, _ = run(made, card, tokens, tmp_path / "cut")
    assert cut.equals(whole)
    kept = [one for k, mine in enumerate(rows) if k != 4 for one in mine]
    assert cut["row_id"].to_list() == [one["row_id"] for one in kept]
    assert cut["length"].to_list() == [one["length"] for one in kept]
    assert cut["row"].to_list() == [i for k, mine in enumerate(rows) if k != 4 for i in range(len(mine))]
    assert ParquetFile(tmp_path / "cut" / "index.parquet").num_row_groups == -(-len(kept) // 16)


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
    with pytest.raises(EyrieError, match=r"datasets\.a\.token_cap is 1, its first conversation alone holds 2"):
        merge(recipe([("a", 1.0)], caps={"a": 1}), target=card, tokens=tokens, out=tmp_path / "merged")
    foreign = shard(tmp_path, "a", "s0001", [row("c1", [VOCAB, 2])], card)
    with pytest.raises(EyrieError, match=r"s0001.parquet: holds token id 100, the target has 100"):
        merge(recipe([("a", 1.0)]), target=card, tokens=[*tokens, foreign], out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    tokens[0].write_bytes(b"short")
    with pytest.raises(EyrieError, match=r"holds 5 bytes, its manifest says"):
        merge(recipe([("a", 1.0)]), target=card, tokens=tokens, out=tmp_path / "merged")
