"""Recorded machines and configs to hold them against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyrie.config import Config, parse_config
from eyrie.doctor.checks import CHECKS
from eyrie.doctor.finding import Finding
from eyrie.doctor.readings import Readings, load_readings
from tests.deep_merge import deep_merge

RECORDINGS = Path(__file__).parent / "recordings"
GIB, MIB = 1 << 30, 1 << 20


def recorded(name: str, **changes: Any) -> Readings:
    """A recording, with single values changed: mappings merge key by key, anything else is replaced."""
    plain = load_readings(RECORDINGS / f"{name}.json").model_dump(mode="json")
    return Readings.model_validate(deep_merge(plain, changes))


def with_gpu(name: str, index: int, **changes: Any) -> Readings:
    """A recording in which one GPU is another."""
    gpus = recorded(name).model_dump(mode="json")["gpus"]
    gpus[index] |= changes
    return recorded(name, gpus=gpus)


def config(**changes: Any) -> Config:
    least = {
        "run": "r",
        "target": {"model": "m"},
        "datasets": {"code": {"adapter": "jsonl", "token_budget": 1_000_000}},
    }
    return parse_config(deep_merge(least, changes))


def examined(name: str, readings: Readings, **changes: Any) -> Finding:
    """What one check says."""
    check = next(check for check in CHECKS if check.name == name)
    return check.examine(readings, config(**changes))
