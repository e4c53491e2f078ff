"""The draft vocabulary: what is counted, what is forced in, and one that is kept from an earlier drafter."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_desk import SPECIALS, VOCAB, make_card, named, recipe, row, run, shard
from safetensors.numpy import load_file, save_file

from eyrie.config import Merge
from eyrie.errors import EyrieError
from eyrie.formats.manifest import read_manifest
from eyrie.formats.tokens import token_schema
from eyrie.merge import merge
from eyrie.merge.vocabulary import add_counts, choose, coverage, keep, supervised_ids, write_vocabulary
from eyrie.targets import read_card


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
        card = make_card(folder)
        rows = [row(f"c{i}", answer) for i, answer in enumerate(answers)]
        run(recipe([("a", 1.0)], draft_vocab_size=size), card, [shard(folder, "a", "s0000", rows, card)], folder)
        tensors = load_file(folder / "vocab.safetensors")
    kept = set((np.arange(size) + tensors["d2t"]).tolist())
    counts = Counter(token for answer in answers for token in answer)
    assert len(kept) == size
    assert kept >= set(SPECIALS)
    free = kept - set(SPECIALS)
    assert min((counts[i] for i in free), default=0) >= max((counts[i] for i in set(range(VOCAB)) - kept), default=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=VOCAB, max_size=VOCAB), st.integers(3, VOCAB))
def test_d2t_and_t2d_name_the_same_tokens(frequency: list[int], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        card = read_card(make_card(Path(name)))
        chosen = choose(np.array(frequency), size, card)
        path = Path(name) / "v.safetensors"
        write_vocabulary(path, chosen, VOCAB)
        tensors = load_file(path)
        again = keep(path, card)
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (d2t.dtype, t2d.dtype) == (np.int64, np.bool_)
    assert (len(d2t), len(t2d)) == (size, VOCAB)
    target_ids = d2t + np.arange(size)
    assert (np.diff(target_ids) > 0).all()
    assert np.flatnonzero(t2d).tolist() == target_ids.tolist() == again.ids.tolist()
    assert (np.diff(d2t) >= 0).all(), "offsets of ascending ids never fall"
    assert again.missing_specials == []
    total = sum(frequency)
    assert coverage(np.array(frequency), chosen) == (
        round(sum(frequency[i] for i in target_ids) / total, 6) if total else None
    )


SPANS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), SPANS), min_size=1, max_size=6))
def test_supervised_ids_are_those_inside_spans(rows: list[tuple[list[int], list[tuple[int, int]]]]) -> None:
    listed, expected = [], []
    for number, (tail, gaps) in enumerate(rows):
        spans, ids = [], []
        for gap, size in gaps:
            start = len(ids) + gap
            ids += [100] * gap + [number * 20 + len(ids) + gap + i for i in range(size)]
            spans.append({"start": start, "end": start + size})
            expected += ids[start:]
        listed.append({"input_ids": ids + [100] * (len(tail) + 1), "spans": spans})
    schema = {name: kind for name, kind in token_schema().items() if name in ("input_ids", "spans")}
    found = supervised_ids(pl.DataFrame(listed, schema=schema))
    assert found.tolist() == expected


def test_counts_are_those_of_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie.merge.vocabulary.CHUNK", 7)
    ids = np.random.default_rng(0).integers(0, 20, 100).astype(np.int32)
    counts = np.ones(20, np.int64)
    add_counts(counts, ids)
    assert counts.tolist() == [1 + Counter(ids.tolist())[i] for i in range(20)]


def _given(path: Path, ids: list[int], vocab_size: int = VOCAB) -> Path:
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[ids] = True
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"d2t": np.array(ids) - np.arange(len(ids)), "t2d": t2d, "fc": np.zeros((2, 2), np.float32)}, path)
    return path


def test_a_given_vocabulary_is_kept_as_it_is(card: Path, tmp_path: Path) -> None:
    """A warm start on other data: counting anew would give every row of the drafter's head another token."""
    ids = [*SPECIALS, 7, 50, 99]
    weights = _given(tmp_path / "earlier" / "model.safetensors", ids)
    tokens = [shard(tmp_path, "a", "s0000", [row("c0", [50, 60, 60, 60])], card)]
    for source in (weights, weights.parent):
        out = tmp_path / "merged"
        _, summary = run(recipe([("a", 1.0)], draft_vocab_from=str(source)), card, tokens, out)
        kept, before = load_file(out / "vocab.safetensors"), load_file(weights)
        assert kept.keys() == {"d2t", "t2d"}
        for name in kept:
            assert kept[name].dtype == before[name].dtype
            assert (kept[name] == before[name]).all()
        assert summary["draft_vocabulary"]["size"] == 6
        assert summary["draft_vocabulary"]["kept_from"] == str(weights)
        assert summary["draft_vocabulary"]["coverage"]["train"] == 0.25
        inputs = read_manifest(out / "vocab.safetensors").inputs
        assert inputs["draft_vocab_from"] == hashlib.sha256(weights.read_bytes()).hexdigest()
        assert summary["warnings"] == []


def test_a_given_vocabulary_without_a_stop_id_is_warned_of(
    card: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = _given(tmp_path / "v.safetensors", [0, 1, 7])
    tokens = [shard(tmp_path, "a", "s0000", [row("c0", [50])], card)]
    _, summary = run(recipe([("a", 1.0)], draft_vocab_from=str(weights)), card, tokens, tmp_path / "merged")
    assert summary["draft_vocabulary"]["missing_specials"] == [2]
    assert "lacks special or stop ids of the target (2)" in summary["warnings"][0]
    assert f"warning: {summary['warnings'][0]}" in caplog.text


def test_a_given_vocabulary_must_fit_the_target_and_itself(card: Path, tmp_path: Path) -> None:
    tokens = [shard(tmp_path, "a", "s0000", [row("c0", [50])], card)]
    full = np.zeros(VOCAB, np.bool_)
    full[:3] = True
    cases = {
        "long": ({"d2t": np.zeros(3, np.int64), "t2d": np.ones(VOCAB + 28, np.bool_)}, r"its t2d is bool \[128\]"),
        "ids": ({"d2t": np.array([0, 1, 2]), "t2d": full}, "d2t and t2d name different tokens"),
        "absolute": ({"d2t": np.array([97, 98, 98]), "t2d": full}, "no map of offsets into 100 target tokens"),
        "doubled": ({"d2t": np.array([0, -1, 0]), "t2d": full}, "no map of offsets"),
        "floats": ({"d2t": np.zeros(3, np.float32), "t2d": full}, "no map of offsets"),
        "headless": ({"fc": np.zeros(3, np.float32)}, "holds no d2t and no t2d; set merge.draft_vocab_from"),
    }
    for name, (tensors, message) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path)
        with pytest.raises(EyrieError, match=message) as caught:
            merge(recipe([("a", 1.0)], draft_vocab_from=str(path)), target=card, tokens=tokens, out=tmp_path / "merged")
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
    (tmp_path / "text.safetensors").write_text("no tensors")
    for name, message in (("text", "no safetensors file"), ("absent", "no such file; mend merge.draft_vocab_from")):
        made = recipe([("a", 1.0)], draft_vocab_from=str(tmp_path / f"{name}.safetensors"))
        with pytest.raises(EyrieError, match=message):
            merge(made, target=card, tokens=tokens, out=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_given_vocabulary_brings_its_own_size() -> None:
    with pytest.raises(ValueError, match="give it or draft_vocab_size, not both"):
        Merge(draft_vocab_from="x", draft_vocab_size=4096)
    assert Merge(draft_vocab_from="x").draft_vocab_file == "x/model.safetensors"
    assert Merge(draft_vocab_from="x/v.safetensors").draft_vocab_file == "x/v.safetensors"
    assert Merge().draft_vocab_file is None
