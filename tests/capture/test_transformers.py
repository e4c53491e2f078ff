"""Capture: batched states are the model's own, every row is accounted for, and what is wrong is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eyrie.capture import capture
from eyrie.capture.base import plan_batches
from eyrie.capture.stage import relative_error, spread
from eyrie.capture.transformers import TransformersCapturer, find_decoder
from eyrie.errors import EyrieError
from eyrie.formats.hidden import HiddenShard
from eyrie.formats.manifest import RowCounts, manifest_path, read_manifest, stats_path
from eyrie.formats.publish import publish, write_json
from eyrie.formats.tokens import write_tokens
from eyrie.targets.card import TargetCard, identify, read_card

LAYERS = (1, 3, 5)
RECIPE: dict[str, Any] = {
    "hidden": {"layers": LAYERS, "storage_dtype": "float32"},
    "target": {"model": "tiny", "dtype": "float32"},
    "revision": 1,
}
LENGTHS = [5, 23, 9, 24, 1 + 1, 17]


@pytest.fixture(scope="module")
def reference(tiny_target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target_json(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("card") / "target.json"
    identify({"target": {"model": str(tiny_target)}}, str(tiny_target), out)
    return out


@pytest.fixture
def capturer(tiny_target: Path) -> TransformersCapturer:
    return TransformersCapturer(tiny_target, LAYERS, torch.float32, torch.float32, "cpu")


def ids_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, 600, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def token_row(number: int, ids: list[int], spans: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "row_id": f"{number:016x}:1", "conversation": f"{number:016x}", "prompt_key": "k", "turn": 1, "input_ids": ids,
        "spans": [{"start": start, "end": end} for start, end in spans], "length": len(ids),
        "completion_tokens": sum(end - start for start, end in spans), "finish_reason": "stop", "asked": [],
    }  # fmt: skip


def publish_tokens(path: Path, rows: list[dict[str, Any]], card: TargetCard, *, is_greedy: bool = False) -> Path:
    with publish(path, stage="tokenize", recipe={}, identity=card.identity()) as draft:
        write_tokens(draft.path, rows)
        draft.rows = RowCounts(read=len(rows), kept=len(rows))
        draft.facts = {"kind": "answered" if is_greedy else "native", "greedy": is_greedy}
    return path


@pytest.fixture
def tokens(tmp_path: Path, target_json: Path) -> Path:
    rows = [
        token_row(n, ids_of(length, n), [(1, 3), (4, 6)] if length == 9 else [(max(1, length // 2), length)])
        for n, length in enumerate(LENGTHS)
    ]
    return publish_tokens(tmp_path / "chat" / "s0000.parquet", rows, read_card(target_json))


def run(tokens: Path, target_json: Path, model: Path, recipe: dict[str, Any] = RECIPE, batch_tokens: int = 64) -> Path:
    out = tokens.parent / "hidden" / "s0000.safetensors"
    capture(
        recipe, tokens=tokens, target=target_json, model=str(model), out=out, batch_tokens=batch_tokens, device="cpu",
        threads=1,
    )  # fmt: skip
    return out


def open_shard(out: Path, tokens: Path, target_json: Path) -> HiddenShard:
    return HiddenShard.open(out, target_sha=read_card(target_json).target, tokens_sha=read_manifest(tokens).sha256)


def test_boundary_k_is_hidden_states_k_and_final_is_after_the_norm(
    capturer: TransformersCapturer, reference: Any
) -> None:
    batch = [ids_of(length, seed) for seed, length in enumerate(LENGTHS)]
    states = list(capturer.states(batch))
    assert len(states) == len(batch)
    entering_norm: list[torch.Tensor] = []
    hook = reference.model.norm.register_forward_pre_hook(lambda _m, args: entering_norm.append(args[0]))
    for ids, (aux_TA, final_TH) in zip(batch, states, strict=True):
        with torch.inference_mode():
            out = reference.model(torch.tensor([ids]), output_hidden_states=True)
            normed = reference.model.norm(entering_norm[-1])
        assert aux_TA.shape == (len(ids), 3 * 64)
        assert final_TH.shape == (len(ids), 64)
        for k, aux_TH in zip(LAYERS, aux_TA.chunk(3, -1), strict=True):
            torch.testing.assert_close(aux_TH, out.hidden_states[k][0], rtol=1e-4, atol=1e-4)
            for other in {0, *range(1, 6)} - {k}:
                assert relative_error(aux_TH, out.hidden_states[other][0]) > 0.05
        torch.testing.assert_close(final_TH, normed[0], rtol=1e-4, atol=1e-4)
        assert relative_error(final_TH, entering_norm[-1][0]) > 0.05
        alone_aux, alone_final = capturer.alone(ids)
        torch.testing.assert_close(aux_TA, alone_aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(final_TH, alone_final, rtol=1e-4, atol=1e-4)
    hook.remove()


def test_padding_never_leaks(capturer: TransformersCapturer) -> None:
    short, long = ids_of(4, 1), ids_of(40, 2)
    (with_long, _), (alone,) = capturer.states([short, long]), capturer.states([short])
    for one, other in zip(with_long, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), batch_tokens=st.integers(16, 120))
def test_batches_hold_every_row_once_and_little_padding(lengths: list[int], batch_tokens: int) -> None:
    batches = plan_batches(lengths, batch_tokens)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[row] for row in batch)
        assert lengths[batch[0]] == longest
        assert len(batch) == 1 or len(batch) * longest <= batch_tokens
        assert all(lengths[row] >= 0.9 * longest for row in batch)


def test_the_shard_holds_every_row_in_order_and_finals_at_labels(
    tokens: Path, target_json: Path, tiny_target: Path, reference: Any
) -> None:
    out = run(tokens, target_json, tiny_target)
    shard = open_shard(out, tokens, target_json)
    assert (len(shard), shard.tokens, shard.layers) == (len(LENGTHS), sum(LENGTHS), LAYERS)
    for index, row in enumerate(pl.read_parquet(tokens).iter_rows(named=True)):
        aux_TA, final_FH = shard.row(index)
        with torch.inference_mode():
            states = reference.model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
        places = [p for span in row["spans"] for p in range(span["start"] - 1, span["end"] - 1)]
        torch.testing.assert_close(aux_TA, torch.cat([states[k][0] for k in LAYERS], -1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(final_FH, states[-1][0, places], rtol=1e-4, atol=1e-4)
    manifest = read_manifest(out)
    card = read_card(target_json)
    assert manifest.rows == RowCounts(read=6, kept=6)
    assert manifest.tokens == {"total": sum(LENGTHS), "supervised": shard.final_offsets[-1]}
    assert manifest.inputs == {"chat/s0000.parquet": read_manifest(tokens).sha256}
    assert manifest.identity == {**card.identity(), "layers": "[1, 3, 5]"}
    assert manifest.facts["greedy_agreement"] is None
    assert json.loads(stats_path(out).read_text())["tokens_per_cpu_second"] > 0


def test_all_final_states_are_kept_on_demand(
    tokens: Path, target_json: Path, tiny_target: Path, reference: Any
) -> None:
    recipe = {**RECIPE, "hidden": {**RECIPE["hidden"], "final_states": "all"}}
    shard = open_shard(run(tokens, target_json, tiny_target, recipe), tokens, target_json)
    assert shard.whole
    for index, row in enumerate(pl.read_parquet(tokens).iter_rows(named=True)):
        with torch.inference_mode():
            out = reference.model(torch.tensor([row["input_ids"]]))
        torch.testing.assert_close(shard.row(index)[1], out.last_hidden_state[0, :-1], rtol=1e-4, atol=1e-4)


def test_the_same_bytes_come_again(tokens: Path, target_json: Path, tiny_target: Path) -> None:
    out = run(tokens, target_json, tiny_target)
    data, manifest = out.read_bytes(), manifest_path(out).read_bytes()
    run(tokens, target_json, tiny_target)
    assert (out.read_bytes(), manifest_path(out).read_bytes()) == (data, manifest)


def test_default_layers_and_storage_in_bfloat16(tokens: Path, target_json: Path, tiny_target: Path) -> None:
    recipe = {**RECIPE, "hidden": {"storage_dtype": "bfloat16", "layers": (2, 3, 4)}}
    shard = open_shard(run(tokens, target_json, tiny_target, recipe), tokens, target_json)
    assert shard.dtype == torch.bfloat16
    assert shard.layers == (2, 3, 4)


@pytest.mark.parametrize("final_states", ["answers", "all"])
def test_greedy_answers_are_reproduced(
    tmp_path: Path, target_json: Path, tiny_target: Path, reference: Any, final_states: str
) -> None:
    recipe = {**RECIPE, "hidden": {**RECIPE["hidden"], "final_states": final_states}}
    rows = []
    for n in range(3):
        prompt = ids_of(6 + n, n)
        rows.append(token_row(n, prompt + greedy(reference, prompt, 8), [(len(prompt), len(prompt) + 8)]))
    tokens = publish_tokens(tmp_path / "a" / "s0000.parquet", rows, read_card(target_json), is_greedy=True)
    assert read_manifest(run(tokens, target_json, tiny_target, recipe)).facts["greedy_agreement"] == 1.0


def test_answers_of_another_model_are_refused(tmp_path: Path, target_json: Path, tiny_target: Path) -> None:
    rows = [token_row(n, ids_of(12, n), [(4, 12)]) for n in range(3)]
    tokens = publish_tokens(tmp_path / "a" / "s0000.parquet", rows, read_card(target_json), is_greedy=True)
    with pytest.raises(EyrieError, match=r"do not reproduce the target's own greedy answers: \d+% of 24 labels"):
        run(tokens, target_json, tiny_target)
    assert not list((tmp_path / "a" / "hidden").iterdir())


def test_tokens_of_another_target_are_refused(
    tokens: Path, target_json: Path, tiny_target: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    write_json(other, {**read_card(target_json).model_dump(), "target": "f" * 64})
    with pytest.raises(EyrieError, match=f"{tokens}: was made for another target"):
        run(tokens, other, tiny_target)


def test_a_folder_that_is_no_longer_the_card_s_is_refused(
    tokens: Path, target_json: Path, tiny_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(tiny_target, folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "num_hidden_layers": 5})
    with pytest.raises(EyrieError, match="has num_hidden_layers 5, the run's target card says 6"):
        run(tokens, target_json, folder)


def test_states_that_are_not_finite_name_the_row(
    tokens: Path, target_json: Path, tiny_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_target, folder)
    state = load_file(folder / "model.safetensors")
    ids = pl.read_parquet(tokens)["input_ids"].to_list()
    culprit = next(token for token in ids[2] if not any(token in ids[row] for row in (0, 1, 3, 4, 5)))
    state["model.embed_tokens.weight"][culprit] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EyrieError, match=f"the states of row {2:016x}:1 are not finite"):
        run(tokens, target_json, folder)


def test_a_wrong_state_is_caught_by_the_second_path(
    tokens: Path, target_json: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = TransformersCapturer._keeper

    def off_by_one(self: TransformersCapturer, layer: int) -> Any:
        keep = keeper(self, layer)
        return lambda module, args, kwargs: keep(module, (args[0].roll(1, dims=1),), kwargs)

    monkeypatch.setattr(TransformersCapturer, "_keeper", off_by_one)
    with pytest.raises(EyrieError, match=r"row 0+\d:1: layer 1 differs by .* from the same row run alone"):
        run(tokens, target_json, tiny_target)


@pytest.mark.parametrize("layers", [(1, 3, 6), (3, 2, 5), (1, 1, 2)])
def test_layers_that_the_target_lacks_are_refused(
    tokens: Path, target_json: Path, tiny_target: Path, layers: tuple[int, int, int]
) -> None:
    with pytest.raises(EyrieError, match=r"hidden\.layers: .* must be three ascending ids from 0 to 5"):
        run(tokens, target_json, tiny_target, {**RECIPE, "hidden": {"layers": layers}})


@pytest.mark.parametrize("spans", [[(0, 3)], [(2, 99)], [(4, 6), (5, 7)], []])
def test_spans_out_of_place_name_the_row(
    tmp_path: Path, target_json: Path, tiny_target: Path, spans: list[tuple[int, int]]
) -> None:
    rows = [token_row(0, ids_of(8, 0), [(2, 8)]), token_row(1, ids_of(8, 1), spans)]
    tokens = publish_tokens(tmp_path / "a" / "s0000.parquet", rows, read_card(target_json))
    with pytest.raises(EyrieError, match=f"row {1:016x}:1 of 8 tokens has the label spans"):
        run(tokens, target_json, tiny_target)


def test_a_model_without_decoder_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match="keeps no decoder layers"):
        find_decoder(torch.nn.Linear(2, 2), tmp_path)


def test_a_nested_language_model_is_found(tmp_path: Path) -> None:
    inner, middle, outer = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    inner.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    middle.language_model, outer.model = inner, middle
    assert find_decoder(outer, tmp_path) is inner


def test_a_folder_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match="cannot be loaded as a causal language model") as caught:
        TransformersCapturer(tmp_path, LAYERS, torch.float32, torch.float32, "cpu")
    assert "\n" not in str(caught.value)


@given(count=st.integers(0, 2000), most=st.integers(1, 600))
def test_a_spread_is_even_and_in_range(count: int, most: int) -> None:
    places = list(spread(count, most))
    assert len(places) == len(set(places)) == min(count, most)
    assert all(0 <= place < count for place in places)
