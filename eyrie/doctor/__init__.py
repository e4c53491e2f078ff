"""The doctor: does this machine fit this config, and did the run so far come out well.

Checks are pure functions of readings and config (:mod:`eyrie.doctor.checks`). The page runs all of them; generation
runs those that guard it, in a fraction of a second, and refuses to start on a red one unless ``doctor.allow`` names it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eyrie.config import Config
    from eyrie.doctor.readings import Readings

log = logging.getLogger(__name__)


def write_doctor(config: Config, *, run_dir: Path, servers: Path, out: Path, readings: Path | None = None) -> None:
    """Examine the machine and write the page; ``<out>.json`` beside it holds the same facts and all readings.

    Args:
        run_dir: ``results/<run>``.
        servers: folder with the states of servers that Eyrie started.
        out: ``doctor.md``.
        readings: a recording to judge instead of this machine.
    """
    from eyrie.doctor.readings import load_readings
    from eyrie.doctor.report import examine, markdown, report
    from eyrie.formats.publish import write_json, write_text

    taken = load_readings(readings) if readings else _all_readings(config, run_dir, servers)
    facts = report(taken, config, examine(taken, config))
    write_json(out.with_suffix(".json"), facts)
    write_text(out, markdown(facts))
    for check in facts["checks"]:
        if check["verdict"] in ("red", "yellow"):
            log.info("%s: %s: %s; %s", check["verdict"], check["name"], check["evidence"], check["mend"])


def _all_readings(config: Config, run_dir: Path, servers: Path) -> Readings:
    from eyrie.doctor.live import take_readings, take_trials
    from eyrie.doctor.run_facts import all_facts

    return take_trials(take_readings(config, run_dir, all_facts(config, run_dir, servers)), config)


def require_healthy(config: Config, run_dir: Path, readings: Readings | None = None) -> None:
    """Refuse to generate on a machine that a guarding check finds red.

    Args:
        run_dir: ``results/<run>``.
        readings: taken elsewhere; default: this machine's, now.

    Raises:
        EyrieError: the first red check with its evidence and mend.
    """
    from eyrie.doctor.checks import CHECKS
    from eyrie.doctor.finding import for_generation
    from eyrie.doctor.live import take_readings
    from eyrie.doctor.run_facts import cheap_facts
    from eyrie.errors import EyrieError

    seen = for_generation(config)
    if readings is None:
        readings = take_readings(seen, run_dir, cheap_facts(seen, run_dir))
    for check in CHECKS:
        if not check.guards:
            continue
        found = check.examine(readings, seen)
        if found.verdict != "red":
            continue
        if check.name in config.doctor.allow:
            log.warning("doctor.allow: %s is red and allowed: %s", check.name, found.evidence)
            continue
        raise EyrieError(
            f"doctor: {check.name}: {found.evidence}; {found.mend}. To start nevertheless, add {check.name} to "
            "doctor.allow"
        )
