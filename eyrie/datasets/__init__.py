"""Datasets: adapters that read a source, and ingest, which makes prompt shards of them."""

from eyrie.datasets import (  # noqa: F401  (importing them registers their adapters)
    agents,
    code,
    dialogue,
    glaive,
    kimi,
    local,
    packaged,
    reasoning,
)
from eyrie.datasets.ingest import check_sources, ingest, suite_prompts
from eyrie.datasets.registry import ADAPTERS, Source, adapter, find_adapter

__all__ = ["ADAPTERS", "Source", "adapter", "check_sources", "find_adapter", "ingest", "suite_prompts"]
