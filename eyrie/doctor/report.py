"""The doctor's page for people and its twin in JSON: the same facts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eyrie.config import Config
from eyrie.doctor.checks import CHECKS
from eyrie.doctor.finding import Finding
from eyrie.doctor.readings import Readings

VERDICTS = ("red", "yellow", "green", "not applicable")


def examine(readings: Readings, config: Config) -> dict[str, Finding]:
    """The finding of every check, by name, in the order of the page."""
    return {check.name: check.examine(readings, config) for check in CHECKS}


def report(readings: Readings, config: Config, findings: Mapping[str, Finding]) -> dict[str, Any]:
    """What ``doctor.json`` holds."""
    return {
        "run": config.run,
        "summary": {verdict: sum(found.verdict == verdict for found in findings.values()) for verdict in VERDICTS},
        "checks": [
            {
                "name": check.name,
                "looks_at": check.looks_at,
                "guards_generation": check.guards,
                "verdict": findings[check.name].verdict,
                "allowed": check.name in config.doctor.allow,
                "evidence": findings[check.name].evidence,
                "mend": findings[check.name].mend,
            }
            for check in CHECKS
        ],
        "readings": readings.model_dump(mode="json"),
    }


def markdown(facts: Mapping[str, Any]) -> str:
    """``doctor.md`` from what :func:`report` returned."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=False, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["cell"] = _cell
    return environment.get_template("doctor.md.jinja").render(facts, verdicts=VERDICTS)


def _cell(text: str) -> str:
    """Text that cannot end a table's cell or row; evidence holds names that others chose."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
