"""The report of a run: a page for people and STATUS.md, the engineering record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyrie.formats.publish import write_text


def write_report(config: Path | dict[str, Any], run_dir: Path, report: Path, status: Path) -> None:
    """Write both from what the stages left in ``run_dir``; equal inputs give equal bytes.

    What is not made yet is shown as missing, so the report of half a run is a report too.

    Args:
        config: ``config.resolved.yaml`` of the run, or its content.
        run_dir: ``results/<run>``.
        report: the HTML page to write.
        status: the Markdown page to write.

    Raises:
        EyrieError: the config is at fault, or a file that is there is malformed.
    """
    from eyrie.report.collect import collect
    from eyrie.report.page import render_page
    from eyrie.report.status import render_status

    run = collect(config, run_dir)
    write_text(report, render_page(run))
    write_text(status, render_status(run))
