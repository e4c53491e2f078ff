"""The smoke run that the workflow tests share."""

from __future__ import annotations

import pytest
from smoke_run import Workspace


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The prepared run. Tests leave it as they found it."""
    workspace = Workspace(tmp_path_factory.mktemp("smoke"))
    result = workspace.snakemake()
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
    return workspace
