"""The configs that ship name adapters and options that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyrie.config import load_config
from eyrie.datasets import find_adapter
from eyrie.datasets.pins import hub_of, is_pinned
from eyrie.datasets.registry import Hub

ROOT = Path(__file__).parents[2]
CONFIGS = [ROOT / "config.yaml", *sorted((ROOT / "config").glob("*.yaml"))]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_adapters_and_options_exist(path: Path) -> None:
    for dataset in load_config(path).datasets.values():
        hub = Hub(dataset.repo, dataset.subset, dataset.split, dataset.revision, dataset.files)
        find_adapter(dataset.adapter).open(dataset.options, dataset.kind, dataset.path, hub)


def test_the_kimi_preset_names_ten_sources_and_their_budgets() -> None:
    datasets = load_config(ROOT / "config" / "kimi-k2.5.yaml").datasets
    kinds = [dataset.kind for dataset in datasets.values()]
    assert kinds == ["native"] * 2 + ["answered"] * 8
    assert [dataset.adapter for dataset in datasets.values()] == [
        "deepswe-kimi-k2", "hermes-kimi", "opencodeinstruct", "magicoder-oss", "glaive", "mixture-of-thoughts",
        "openthoughts", "ultrachat", "sharegpt", "swe-agent",
    ]  # fmt: skip
    assert {dataset.token_budget for dataset in datasets.values()} == {10_000_000}
    rows = {"deepswe": 2_809, "hermes": 7_646, "openthoughts": 113_957, "glaive": 112_960, "swe-agent": 80_036}
    for name, count in rows.items():
        owned = len(datasets[name].shards) * datasets[name].prompts_per_shard
        assert owned <= count, f"the last shard of {name} would be empty"
    for name, dataset in datasets.items():
        hub = hub_of(dataset)
        assert hub is not None
        assert is_pinned(hub), name
        assert dataset.revision == find_adapter(dataset.adapter).hub.revision, (
            "the commit that the adapter was written for"
        )


def test_the_ingest_benchmark_reads_all_that_it_writes(tmp_path: Path) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("ingest_benchmark", ROOT / "benchmarks" / "ingest.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    path = tmp_path / "rows.jsonl"
    written = benchmark.write_file(path, 0.3)
    assert 300_000 < path.stat().st_size < 320_000
    assert benchmark.run_once("read", path)["rows"] == written
    done = benchmark.run_once("ingest", path)
    assert done["rows"] == written
    assert 0 < done["kept"] < written
