"""One smoke run for the whole session, and dry-runs against it inside this process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from snakemake.api import SnakemakeApi
from snakemake.settings.types import (
    ConfigSettings,
    DAGSettings,
    OutputSettings,
    Quietness,
    ResourceSettings,
    WorkflowSettings,
)

ROOT = Path(__file__).resolve().parents[2]
SMOKE: dict[str, Any] = yaml.safe_load((ROOT / "config" / "smoke.yaml").read_text())
TIMEOUT_S = 3600.0
"""Of one command: it ends a hang; a busy machine is none."""


class Workspace:
    """A working directory that holds a finished smoke run, and the config that made it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.smoke = folder / "smoke.yaml"
        self.smoke.write_text(yaml.safe_dump(SMOKE, sort_keys=False))

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line as a user does, from a checkout elsewhere."""
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "2"]
        return subprocess.run(
            [*command, "--directory", str(self.folder), "--configfile", str(self.smoke), *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=TIMEOUT_S,
        )

    def dry_run(self, config: dict[str, Any] | None = None, **settings: Any) -> set[str]:
        """The exact jobs that would run: ``"rule"`` or ``"rule wildcard/wildcard"``.

        A generate job that would buy new answers ends in ``!``. Settings: ``targets``, ``forcerun`` (-R),
        ``forcetargets`` (-f), ``forceall`` (-F), ``cores``, and ``root`` for another checkout.
        """
        path = self.folder / "changed.yaml"
        path.write_text(yaml.safe_dump(config if config is not None else SMOKE, sort_keys=False))
        return dry_run(self.folder, path, **settings)

    def config(self) -> dict[str, Any]:
        """A copy of the smoke config, to change."""
        return copy.deepcopy(SMOKE)

    @contextmanager
    def changed(self, name: str, data: bytes) -> Iterator[None]:
        """Replace a file's bytes for a while; bytes and time are put back."""
        path = self.folder / name
        before, times = path.read_bytes(), path.stat()
        path.write_bytes(data)
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def dry_run(
    folder: Path,
    config: Path,
    *,
    cores: int = 2,
    root: Path = ROOT,
    workflow_settings: WorkflowSettings | None = None,
    **settings: Any,
) -> set[str]:
    """See :meth:`Workspace.dry_run`."""
    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        workflow = api.workflow(
            resource_settings=ResourceSettings(cores=cores),
            config_settings=ConfigSettings(configfiles=[config]),
            workflow_settings=workflow_settings,
            snakefile=root / "Snakefile",
            workdir=folder,
        )
        profile = yaml.safe_load((root / "profiles" / "default" / "config.yaml").read_text())
        settings.setdefault("max_checksum_file_size", profile["max-checksum-file-size"])
        workflow.dag(DAGSettings(**settings)).execute_workflow(executor="dryrun")
        dag = workflow._workflow.dag
        return {_job_name(job) for job in dag.jobs if dag.needrun(job)}


def _job_name(job: Any) -> str:
    name = " ".join([job.rule.name, "/".join(map(str, job.wildcards))]).strip()
    return name + ("!" if job.resources.get("afresh") == "yes" else "")
