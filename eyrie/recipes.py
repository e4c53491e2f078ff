"""Recipes: the part of the config that changes a stage's bytes, as canonical JSON.

A recipe is the single param of a rule, so it is what Snakemake compares. It holds the config subtree of the stage
without default values and without machine-level fields, plus the stage's revision.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from eyrie.config import Config
from eyrie.datasets.pins import hub_of
from eyrie.errors import EyrieError

# Raise a stage's number when its code changes its output. A comment must not cost money, so nothing hashes source.
REVISIONS = {
    "convert": 1,
    "target": 2,
    "ingest": 2,
    "generate": 2,
    "tokenize": 5,
    "merge": 3,
    "preview": 1,
    "hidden": 3,
    "train": 3,
    "export": 1,
    "bench": 1,
    "serve": 1,
    "report": 1,
}


def canonical_json(value: Any) -> str:
    """JSON whose bytes depend on content alone: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def subtree(section: BaseModel, *drop: str) -> dict[str, Any]:
    """The section's non-default, non-machine values, without the fields in ``drop``."""
    kept: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if name in drop or (isinstance(extra, dict) and extra.get("machine")):
            continue
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            value = subtree(value)
            if not value:
                continue
        elif not field.is_required() and value == field.get_default(call_default_factory=True):
            continue
        kept[name] = value
    return kept


def machine_options(section: BaseModel) -> dict[str, Any]:
    """The section's machine-level values other than their defaults: what reaches a job beside its recipe."""
    chosen = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        value = getattr(section, name)
        if isinstance(extra, dict) and extra.get("machine") and value != field.get_default(call_default_factory=True):
            chosen[name] = value
    return chosen


def recipe(
    config: Config, stage: str, *, dataset: str = "", shard: str = "", drafter: str = "", suite: str = ""
) -> dict[str, Any]:
    """What ``stage`` is made of, for one dataset shard, drafter or suite."""
    return {"revision": REVISIONS[stage], **_CONTENT[stage](config, dataset, shard, drafter, suite)}


def _convert(config: Config, *_: str) -> dict[str, Any]:
    return {"target": {"gguf": config.target.gguf.model_dump() if config.target.gguf else None}}


def _target(config: Config, *_: str) -> dict[str, Any]:
    return {"target": subtree(config.target, "gguf", "dtype")}


def _ingest(config: Config, dataset: str, shard: str, *_: str) -> dict[str, Any]:
    chosen = config.datasets[dataset]
    source = subtree(chosen, "token_budget", "tokens_per_shard", "weight", "token_cap", "sampling")
    hub = hub_of(chosen)
    if hub and hub.revision:
        source["revision"] = hub.revision  # the adapter's own pin may move with a release
    return {"dataset": source, "shard": int(shard[1:])}


def _generate(config: Config, dataset: str, shard: str, *_: str) -> dict[str, Any]:
    chosen = config.datasets[dataset]
    server = subtree(config.server) if config.engine.managed else {}  # of your own servers Eyrie knows no options
    return {
        "target": subtree(config.target, "gguf"),
        "engine": subtree(config.engine),
        **({"server": server} if server else {}),
        "sampling": subtree(chosen.sampling),
        "token_budget": chosen.shard_budget(shard),
        **({"turns": chosen.turns} if chosen.turns else {}),
    }


def _tokenize(config: Config, dataset: str, shard: str, *_: str) -> dict[str, Any]:
    chosen = config.datasets[dataset]
    native = {"token_budget": chosen.shard_budget(shard)} if chosen.kind == "native" else {}
    return {"kind": chosen.kind, "tokenize": subtree(config.tokenize), **native}


def _merge(config: Config, *_: str) -> dict[str, Any]:
    return {
        "merge": subtree(config.merge),
        "datasets": [[name, chosen.weight] for name, chosen in config.datasets.items()],
        "caps": {name: chosen.token_cap for name, chosen in config.datasets.items() if chosen.token_cap},
        "suites": {
            name: subtree(suite, "prompts_per_dataset", "max_tokens", "draft_tokens", "ngram_size",
                          "timed_prompts", "repeats")
            for name, suite in sorted(config.bench.suites.items())
            if suite.dataset
        },
    }  # fmt: skip


def _hidden(config: Config, *_: str) -> dict[str, Any]:
    return {"target": subtree(config.target, "gguf"), "hidden": subtree(config.hidden)}


def _train(config: Config, _dataset: str, _shard: str, drafter: str, _suite: str) -> dict[str, Any]:
    return {"drafter": subtree(config.drafters[drafter])}


def _export(config: Config, *_: str) -> dict[str, Any]:
    return {}


def _bench(config: Config, _dataset: str, _shard: str, _drafter: str, suite: str) -> dict[str, Any]:
    return {"suite": subtree(config.bench.suites[suite]), "target": subtree(config.target, "gguf")}


def _serve(config: Config, *_: str) -> dict[str, Any]:
    for suite in config.bench.suites.values():
        return {
            "suite": subtree(suite, "ngram_size", "timed_prompts", "repeats"),
            "server": subtree(config.server),
            "target": subtree(config.target, "gguf", "dtype"),
        }
    raise EyrieError("bench.suites: serving takes its prompts from the first suite; name one")


_CONTENT: dict[str, Callable[[Config, str, str, str, str], dict[str, Any]]] = {
    "convert": _convert,
    "target": _target,
    "ingest": _ingest,
    "generate": _generate,
    "tokenize": _tokenize,
    "merge": _merge,
    "preview": _target,
    "hidden": _hidden,
    "train": _train,
    "export": _export,
    "bench": _bench,
    "serve": _serve,
    "report": _target,
}
