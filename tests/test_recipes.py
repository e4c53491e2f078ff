"""Recipes: what changes a stage's bytes, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.config import ENGINE_FITS, Config, parse_config
from eyrie.config.reference import is_machine, options
from eyrie.datasets import find_adapter
from eyrie.recipes import REVISIONS, canonical_json, recipe

RAW: dict[str, Any] = {
    "run": "r",
    "target": {"model": "m", "gguf": {"package": "p", "file": "f"}},
    "datasets": {
        "code": {"adapter": "jsonl", "token_budget": 1000, "tokens_per_shard": 400},
        "talk": {"adapter": "chitchat", "kind": "native", "token_budget": 500, "tokens_per_shard": 400},
    },
    "drafters": {"a": {}, "b": {"ttt_steps": 5}},
}


def all_recipes(raw: dict[str, Any]) -> dict[str, str]:
    """Every recipe of every stage of a config, as Snakemake compares them."""
    config = parse_config(raw)
    found = {}
    for stage in REVISIONS:
        for name, dataset in config.datasets.items():
            for shard in dataset.shards:
                for drafter in config.drafters:
                    for suite in config.bench.suites:
                        key = f"{stage} {name}/{shard} {drafter} {suite}"
                        made_of = recipe(config, stage, dataset=name, shard=shard, drafter=drafter, suite=suite)
                        found[key] = canonical_json(made_of)
    return found


def set_option(raw: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy of ``raw`` with one option set; ``<name>`` stands for the first name there, or a default one."""
    changed = json.loads(json.dumps(raw))
    at = changed
    *path, last = dotted.split(".")
    for part in path:
        if part == "<name>":
            part = next(iter(at), "held-out")
        at = at.setdefault(part, {})
    at[last] = value
    return changed


def test_a_default_written_out_is_no_change() -> None:
    config = parse_config(RAW)
    written = json.loads(config.model_dump_json(exclude_none=True))
    assert all_recipes(written) == all_recipes(RAW)


def test_recipes_hold_no_default_values() -> None:
    made_of = recipe(parse_config(RAW), "train", drafter="a")
    assert made_of == {"revision": REVISIONS["train"], "drafter": {}}
    made_of = recipe(parse_config(RAW), "train", drafter="b")
    assert made_of == {"revision": REVISIONS["train"], "drafter": {"ttt_steps": 5}}


def test_key_order_is_no_change() -> None:
    def reversed_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_keys(value[key]) for key in reversed(value)}
        return value

    shuffled = reversed_keys(RAW)
    shuffled["datasets"] = {name: shuffled["datasets"][name] for name in RAW["datasets"]}  # their order is content
    assert all_recipes(shuffled) == all_recipes(RAW)


MACHINE = sorted(path for path, field in options(Config) if is_machine(field))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "engine.device": st.sampled_from(["cpu", "cuda", "cuda:1"]),
    "doctor.allow": st.lists(st.sampled_from(["disk", "gpu-held"]), min_size=1),
    "engine.urls": st.lists(st.sampled_from(["http://a:1", "https://b/v1"]), min_size=1),
    **{path: st.floats(0.0, 1.0) for path in MACHINE if ".gates." in path},
    "server.device": st.sampled_from(["cpu", "cuda"]),
    "server.kv_cache_gate": st.floats(0.0, 1.0),
    "server.memory_fraction": st.floats(0.1, 0.9),
    "server.preset": st.sampled_from(["pcie-latency", "pcie-throughput"]),
    "server.python": st.just("elsewhere/bin/python"),
}
# An engine's options fit some kinds alone, so each kind has a config of its own to start from.
KINDS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "sglang": {"kind": "sglang"},
    "openai": {"kind": "openai", "model": "m", "urls": ["http://c/v1"]},
    "openrouter": {"kind": "openrouter", "model": "m", "max_dollars": 1.0, "openrouter": {"providers": ["A"]}},
}


def starting_from(dotted: str, which: int = 0) -> dict[str, Any]:
    """A config in which the option at ``dotted`` means something: its first fitting kind of engine, or another."""
    if dotted == "drafters.<name>.prompt_weight":
        return set_option(RAW, "hidden.final_states", "all")
    section, _, name = dotted.partition(".")
    return {**RAW, "engine": KINDS[ENGINE_FITS[name.split(".")[0]][which]]} if section == "engine" else RAW


@pytest.mark.parametrize("dotted", MACHINE)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_each_machine_option_exists_and_can_be_set(data: st.DataObject, dotted: str) -> None:
    parse_config(set_option(starting_from(dotted), dotted, data.draw(VALUES.get(dotted, st.just(17)))))


@settings(deadline=None)
@given(data=st.data(), dotted=st.sampled_from(MACHINE), which=st.sampled_from([0, -1]))
def test_a_machine_option_never_changes_any_recipe(data: st.DataObject, dotted: str, which: int) -> None:
    value = data.draw(VALUES.get(dotted, st.integers(16, 10**6)))
    base = starting_from(dotted, which)
    assert all_recipes(set_option(base, dotted, value)) == all_recipes(base)


def test_the_kind_of_engine_and_what_it_pins_are_part_of_the_recipe() -> None:
    made_of = [json.dumps(recipe(parse_config({**RAW, "engine": engine}), "generate", dataset="code", shard="s0000"))
               for engine in KINDS.values()]  # fmt: skip
    assert len(set(made_of)) == 4
    assert recipe(parse_config(RAW), "generate", dataset="code", shard="s0000")["engine"] == {}


# Every option that is not the machine's business must change some recipe, or a stale result would pass for fresh.
# `run` names the folder instead: another run is another set of files.
CONTENT: dict[str, Any] = {
    "target.model": "other",
    "target.revision": "abc",
    "target.gguf.package": "other",
    "target.gguf.file": "other",
    "target.dtype": "bfloat16",
    "target.thinking": True,
    "target.trust_remote_code": True,
    "engine.reasoning": "high",
    "engine.openrouter.providers": ["B"],
    "engine.openrouter.quantizations": ["int4"],
    "sampling.temperature": 0.5,
    "sampling.top_p": 0.5,
    "sampling.max_tokens": 17,
    "sampling.seed": 5,
    "datasets.<name>.adapter": "gsm8k",
    "datasets.<name>.kind": "native",
    "datasets.<name>.path": "x.jsonl",
    "datasets.<name>.options": {"a": 1},
    "datasets.<name>.token_budget": 1100,
    "datasets.<name>.tokens_per_shard": 450,
    "datasets.<name>.prompts_per_shard": 7,
    "datasets.<name>.max_prompt_chars": 7,
    "datasets.<name>.tools": "drop",
    "datasets.<name>.weight": 2.0,
    "datasets.<name>.turns": 3,
    "datasets.<name>.token_cap": 7,
    "datasets.<name>.sampling.temperature": 0.5,
    "datasets.<name>.sampling.top_p": 0.5,
    "datasets.<name>.sampling.max_tokens": 17,
    "datasets.<name>.sampling.seed": 5,
    "tokenize.max_length": 999,
    "tokenize.truncated": "keep",
    "merge.validation_fraction": 0.1,
    "merge.test_fraction": 0.1,
    "merge.draft_vocab_size": 99,
    "merge.decontamination_ngram": 8,
    "hidden.layers": [1, 2, 3],
    "hidden.storage_dtype": "float32",
    "drafters.<name>.dtype": "bfloat16",
    "hidden.final_states": "all",
    "drafters.<name>.batch_tokens": 999,
    "drafters.<name>.init": "random",
    "bench.suites.<name>.options": {"a": 1},
    "server.kv_cache": "fp8",
    "server.flags": {"page-size": 16},
}
GENERIC = {int: 11, float: 0.37, str: "other"}
# the folder's name; an option with a single value so far; one with a test of its own
FIXED = {"run", "drafters.<name>.algorithm", "engine.kind"}


@pytest.mark.parametrize("dotted", sorted({p for p, f in options(Config) if not is_machine(f)} - FIXED))
def test_every_other_option_changes_some_recipe(dotted: str) -> None:
    field = dict(options(Config))[dotted]
    default = field.get_default(call_default_factory=True)
    value = CONTENT.get(dotted, GENERIC.get(type(default), "other"))
    base = starting_from(dotted, -1)
    changed, before = all_recipes(set_option(base, dotted, value)), all_recipes(base)
    if dotted == "bench.suites.<name>.options":
        # Options of an external suite count once there is one.
        external = set_option(RAW, "bench.suites.<name>.dataset", "other")
        changed, before = all_recipes(set_option(external, dotted, value)), all_recipes(external)
    assert any(changed.get(key) != text for key, text in before.items()), "a change that no stage would notice"


def test_the_commit_of_a_hub_dataset_is_part_of_its_recipe() -> None:
    """An adapter's own pin counts like one of the config: a release that moves it makes the prompts stale."""
    pin = find_adapter("ultrachat").hub.revision

    def commit(**more: Any) -> Any:
        dataset = {"adapter": "ultrachat", "token_budget": 1000, **more}
        config = parse_config({"run": "r", "target": {"model": "x/y"}, "datasets": {"talk": dataset}})
        return recipe(config, "ingest", dataset="talk", shard="s0000")["dataset"].get("revision")

    assert commit() == commit(revision=pin) == pin
    assert commit(revision="a" * 40) == "a" * 40
    assert commit(path="mine.jsonl") is None


def test_canonical_json_refuses_what_has_no_value() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        canonical_json({"a": float("nan")})


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), st.recursive(st.integers() | st.text() | st.booleans(), st.lists, max_leaves=8)))
def test_canonical_json_round_trips_and_ignores_order(value: dict[str, Any]) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(dict(reversed(value.items()))) == text
