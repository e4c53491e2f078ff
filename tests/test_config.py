"""The one list of options: what it accepts, and how it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import Config, Dataset, load_config, parse_config
from eyrie.config.reference import is_machine, markdown_reference, options, schema_text
from eyrie.errors import EyrieError
from tests.deep_merge import deep_merge

ROOT = Path(__file__).resolve().parents[1]


def minimal() -> dict[str, Any]:
    return {
        "run": "r",
        "target": {"model": "m"},
        "datasets": {"code": {"adapter": "jsonl", "token_budget": 1000, "tokens_per_shard": 400}},
    }


def refusal(**changes: Any) -> str:
    with pytest.raises(EyrieError) as caught:
        parse_config(deep_merge(minimal(), changes))
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def test_the_least_config_is_enough() -> None:
    config = parse_config(minimal())
    assert config.tokenize.max_length == 2048
    assert list(config.drafters) == ["eagle3"]
    assert list(config.bench.suites) == ["held-out"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenise": {}}, "tokenise: no such option; did you mean 'tokenize'?"),
        ({"target": {"modle": "x"}}, "target.modle: no such option; did you mean 'model'?"),
        (
            {"datasets": {"code": {"token_budgte": 5}}},
            "datasets.code.token_budgte: no such option; did you mean 'token_budget'?",
        ),
        (
            {"drafters": {"big": {"learning_rat": 1}}},
            "drafters.big.learning_rat: no such option; did you mean 'learning_rate'?",
        ),
        (
            {"bench": {"suites": {"s": {"draft_token": 3}}}},
            "bench.suites.s.draft_token: no such option; did you mean 'draft_tokens'?",
        ),
        ({"engine": {"url": ["http://a"]}}, "engine.url: no such option; did you mean 'urls'?"),
        (
            {"engine": {"kind": "openrouter", "openrouter": {"provider": ["A"]}}},
            "engine.openrouter.provider: no such option; did you mean 'providers'?",
        ),
        ({"engine": {"gates": {"truncate": 1}}}, "engine.gates.truncate: no such option; did you mean 'truncated'?"),
        ({"target": {"xyzzy": 1}}, "target.xyzzy: no such option; known keys here: dtype, gguf, model"),
    ],
)
def test_a_typo_names_the_path_and_the_nearest_key(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datasets": {"code": {"token_budget": 0}}}, "datasets.code.token_budget: input should be greater than or"),
        ({"merge": {"test_fraction": 1.5}}, "merge.test_fraction: input should be less than or equal to 1, got 1.5"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature: input should be greater than or equal to 0"),
        ({"hidden": {"storage_dtype": "fp4"}}, "hidden.storage_dtype: input should be 'bfloat16' or 'float32'"),
        ({"hidden": {"layers": [2, 15]}}, "hidden.layers"),
        ({"engine": {"batch_size": "many"}}, "engine.batch_size: must be a whole number"),
    ],
)
def test_ranges_and_types(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


PAID: dict[str, Any] = {
    "kind": "openrouter", "model": "a/b", "max_dollars": 1.0, "openrouter": {"providers": ["A"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"urls": ["http://a"]}, "engine.urls: is for kind sglang or openai, and engine.kind is transformers; take it"),
        ({"kind": "sglang", "batch_size": 8}, "engine.batch_size: is for kind transformers, and engine.kind is sglang"),
        ({"kind": "sglang", "model": "m"}, "engine.model: is for kind openai or openrouter, and engine.kind is sglang"),
        ({"kind": "sglang", "max_dollars": 3}, "engine.max_dollars: is for kind openrouter, and engine.kind is sglang"),
        ({"kind": "sglang", "openrouter": {"providers": ["A"]}}, "engine.openrouter: is for kind openrouter"),
        (
            {"kind": "openai", "urls": ["http://a/v1"]},
            "engine.model: is required for kind openai; add it",
        ),
        ({"kind": "openai", "model": "m"}, "engine.urls: is required for kind openai; add it to the config"),
        ({**PAID, "max_dollars": None}, "engine.max_dollars: is required for kind openrouter"),
        ({**PAID, "openrouter": {"quantizations": ["int4"]}}, "openrouter.providers is required for kind openrouter"),
        ({"kind": "sglang", "urls": ["localhost:30000"]}, "urls: 'localhost:30000' is no base URL; write http://host"),
        ({"kind": "vllm"}, "engine.kind: input should be 'transformers', 'sglang', 'openai' or 'openrouter'"),
    ],
)
def test_engine_options_must_fit_the_kind(engine: dict[str, Any], message: str) -> None:
    assert message in refusal(engine=engine)


def test_engines_that_fit() -> None:
    for engine in (PAID, {"kind": "sglang", "urls": ["http://a:1"], "concurrency": 256, "gates": {"refused": 0.5}}):
        assert parse_config({**minimal(), "engine": engine}).engine.kind == engine["kind"]
    paid = parse_config({**minimal(), "engine": PAID}).engine
    assert paid.with_recipe({"kind": "openrouter", "model": "c/d", "openrouter": {"providers": ["B"]}}).model == "c/d"


def test_what_is_required_is_named() -> None:
    raw = minimal()
    del raw["target"]["model"]
    with pytest.raises(EyrieError, match=r"target\.model: is required; add it to the config"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "a b"}, "config: run: 'a b' is no folder name"),
        ({"run": "../b"}, "config: run: '../b' is no folder name"),
        ({"bench": {"suites": {"My suite": {}}}}, "config: bench.suites: 'My suite' is no name"),
        ({"datasets": {"code": {"token_budget": "1e6"}}}, "token_budget: must be a whole number, written out (1000000"),
        ({"hidden": {"layers": [1]}}, "config: hidden.layers: too few values; docs/config.md says how many"),
        ({"engine": "fast"}, "config: engine: must be a mapping of options, got 'fast'"),
        ({"sampling": {"max_tokens": 4096}}, "config: datasets.code.sampling.max_tokens (4096) leaves no room"),
    ],
)
def test_plausible_slips_are_said_in_the_words_of_the_config(changes: dict[str, Any], message: str) -> None:
    said = refusal(**changes)
    assert message in said
    assert "top level" not in said


@pytest.mark.parametrize("empty", ["engine", "datasets", "drafters"])
def test_a_section_that_holds_nothing(empty: str) -> None:
    with pytest.raises(EyrieError, match=rf"^config: {empty}: holds nothing; give it options, or {{}} for the"):
        parse_config({**minimal(), empty: None})


def test_a_fault_that_all_datasets_inherit_is_said_once() -> None:
    raw = minimal()
    raw["datasets"]["more"] = raw["datasets"]["code"]
    with pytest.raises(EyrieError) as caught:
        parse_config({**raw, "sampling": {"temperature": "hot"}, "engine": {"gates": {"refused": 2}}})
    assert str(caught.value).count("sampling.temperature") == 1
    assert str(caught.value).count("gates.refused") == 1
    raw["datasets"]["more"] = {**raw["datasets"]["code"], "sampling": {"temperature": 9}}
    with pytest.raises(EyrieError, match=r"datasets\.more\.sampling\.temperature"):
        parse_config(raw)


def test_no_dataset_at_all() -> None:
    raw = minimal()
    raw["datasets"] = {}
    with pytest.raises(EyrieError, match="datasets: name at least one"):
        parse_config(raw)


def test_a_name_that_is_no_file_name() -> None:
    assert "'Code/1' is no name" in refusal(datasets={"Code/1": minimal()["datasets"]["code"]})


def test_fractions_that_leave_nothing_to_train_on() -> None:
    message = refusal(merge={"test_fraction": 0.6, "validation_fraction": 0.5})
    assert "merge: validation_fraction + test_fraction must stay under 1" in message


def test_answers_longer_than_rows_are_caught_before_any_is_paid_for() -> None:
    message = refusal(sampling={"max_tokens": 512}, tokenize={"max_length": 256})
    assert "datasets.code.sampling.max_tokens (512) leaves no room for a prompt" in message


def test_prompts_teach_only_where_their_states_are_kept() -> None:
    message = refusal(drafters={"d": {"prompt_weight": 0.5}})
    assert "drafters.d.prompt_weight (0.5)" in message
    assert "set hidden.final_states: all" in message
    parse_config(deep_merge(minimal(), {"drafters": {"d": {"prompt_weight": 0.5}}, "hidden": {"final_states": "all"}}))


def test_a_dataset_inherits_the_sampling_of_the_run_and_overrides_single_values() -> None:
    raw = deep_merge(minimal(), {"sampling": {"temperature": 0.5, "max_tokens": 99}})
    raw["datasets"]["code"]["sampling"] = {"max_tokens": 50}
    sampling = parse_config(raw).datasets["code"].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 50)


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b\n"])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(EyrieError, match=r"broken\.yaml:(1:)? ") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_file_is_named_with_its_line_when_it_is_no_yaml_or_says_a_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with pytest.raises(EyrieError, match=r"run\.yaml: no such file; give the config of a run"):
        load_config(path)
    path.write_text("run: r\ntarget: [\n")
    with pytest.raises(EyrieError, match=r"run\.yaml:3: "):
        load_config(path)
    section = "  code: {adapter: jsonl, token_budget: 5}\n"
    path.write_text("run: r\ntarget: {model: m}\ndatasets:\n" + section + section)
    with pytest.raises(EyrieError, match=r"run\.yaml:5: 'code' stands here a second time"):
        load_config(path)
    path.write_text("run: r\ntarget: {model: m, modle: n}\ndatasets:\n" + section)
    with pytest.raises(EyrieError, match=r"run\.yaml: target\.modle: no such option"):
        load_config(path)


def test_yaml_aliases_are_no_second_time(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: r\ntarget: {model: m}\ndatasets:\n  a: &a {adapter: jsonl, token_budget: 5}\n"
        "  b: &b {<<: *a, token_budget: 6}\n  c: {<<: *b, token_budget: 7}\n  d: *b\n"
    )
    assert [dataset.token_budget for dataset in load_config(path).datasets.values()] == [5, 6, 7, 6]


@given(budget=st.integers(1, 10_000), shard=st.integers(1, 3_000), raised=st.integers(0, 5_000))
@settings(deadline=None)
def test_shards_hold_the_budget_and_a_raise_moves_no_full_shard(budget: int, shard: int, raised: int) -> None:
    before = Dataset(adapter="a", token_budget=budget, tokens_per_shard=shard)
    after = Dataset(adapter="a", token_budget=budget + raised, tokens_per_shard=shard)
    held = [before.shard_budget(name) for name in before.shards]
    assert sum(held) == budget
    assert all(0 < tokens <= shard for tokens in held)
    assert after.shards[: len(before.shards)] == before.shards
    for name, tokens in list(zip(before.shards, held, strict=True))[:-1]:
        assert after.shard_budget(name) == tokens == shard


def test_a_datasets_gates_override_single_ones_of_the_engine() -> None:
    raw = minimal()
    name = next(iter(raw["datasets"]))
    raw["engine"] = {"gates": {"refused": 0.3, "drifted": 0.2}}
    raw["datasets"][name]["gates"] = {"refused": 0.5}
    gates = parse_config(raw).datasets[name].gates
    assert (gates.refused, gates.drifted, gates.unparsed) == (0.5, 0.2, 0.1)


def test_turns_are_for_answered_datasets() -> None:
    raw = minimal()
    name = next(iter(raw["datasets"]))
    raw["datasets"][name] |= {"kind": "native", "turns": 2}
    with pytest.raises(EyrieError, match="turns is for kind answered"):
        parse_config(raw)


def test_the_schema_and_the_reference_are_those_of_the_model() -> None:
    mend = "run `python scripts/write_schema.py`"
    assert (ROOT / "config" / "schema.json").read_text() == schema_text(), mend
    assert (ROOT / "docs" / "config.md").read_text() == markdown_reference(), mend


def test_every_option_is_described_and_machine_options_are_marked() -> None:
    for path, field in options(Config):
        assert field.description, path
    marked = {path for path, field in options(Config) if is_machine(field)}
    assert {"engine.batch_size", "engine.device", "hidden.batch_tokens"} <= marked
    for path in marked:
        row = next(line for line in markdown_reference().splitlines() if f"`{path}`" in line)
        assert "*(machine)*" in row


def test_a_dataset_has_one_place() -> None:
    datasets = {"a": {"adapter": "columns", "token_budget": 1, "path": "x.jsonl", "revision": "main"}}
    with pytest.raises(EyrieError, match=r"datasets\.a: path and revision name two sources: remove one of them"):
        parse_config({"run": "r", "target": {"model": "m"}, "datasets": datasets})


def test_code_from_the_hub_needs_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    trusted = {"model": "owner/name", "trust_remote_code": True}
    for revision in ({}, {"revision": "main"}, {"revision": commit[:12]}):
        with pytest.raises(EyrieError, match=r"target: trust_remote_code runs code of owner/name: set target.revision"):
            parse_config({**minimal(), "target": {**trusted, **revision}})
    assert parse_config({**minimal(), "target": {**trusted, "revision": commit}}).target.trust_remote_code
    assert parse_config({**minimal(), "target": {"model": "owner/name"}}).target.revision is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert parse_config({**minimal(), "target": trusted}).target.trust_remote_code, "a folder of one's own"
    assert parse_config({**minimal(), "target": {**trusted, "model": "./owner/name"}}).target.trust_remote_code
