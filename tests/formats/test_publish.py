"""Publishing: whole and described, or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyrie.errors import EyrieError, run_cli
from eyrie.formats import publish as module
from eyrie.formats.manifest import RowCounts, manifest_path, read_manifest, stats_path, verified_manifest
from eyrie.formats.publish import atomic, publish, write_json, write_text


def make(path: Path, data: bytes) -> None:
    with publish(path, stage="merge", recipe={}) as draft:
        draft.path.write_bytes(data)
        draft.rows = RowCounts(read=1, kept=1)
        draft.stats = {"seconds": 1.0}


def test_a_file_and_its_manifest_appear_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path / "deep" / "f", b"data")
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"f", "f.manifest.json", "f.stats.json"}
    assert verified_manifest(tmp_path / "deep" / "f", stage="merge").rows.kept == 1


def test_a_failed_body_publishes_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    make(path, b"first")

    def fail() -> None:
        with publish(path, stage="merge", recipe={}) as draft:
            draft.path.write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"first"
    assert verified_manifest(path, stage="merge").bytes == 5
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failed_first_body_leaves_an_empty_folder(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic(tmp_path / "f") as part:
            part.write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_kill_between_data_and_manifest_leaves_no_manifest_of_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    make(path, b"first")
    script = f"""
import os, signal
from pathlib import Path
from eyrie.formats import publish as module
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
module.write_text = die   # the data file is in place, its manifest is about to be written
with module.publish(Path({str(path)!r}), stage="merge", recipe={{}}) as draft:
    draft.path.write_bytes(b"second, longer")
"""
    env = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"second, longer"
    assert not manifest_path(path).exists()
    with pytest.raises(EyrieError, match=r"manifest.json: missing; rebuild it with"):
        verified_manifest(path, stage="merge")
    make(path, b"third")
    assert verified_manifest(path, stage="merge").bytes == 5


def test_a_kill_while_writing_leaves_the_old_file_and_no_litter_that_looks_complete(tmp_path: Path) -> None:
    path = tmp_path / "f"
    make(path, b"first")
    script = f"""
import os, signal
from pathlib import Path
from eyrie.formats.publish import publish
with publish(Path({str(path)!r}), stage="merge", recipe={{}}) as draft:
    draft.path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode == -signal.SIGKILL
    assert verified_manifest(path, stage="merge").bytes == 5
    litter = {path.name for path in tmp_path.iterdir()} - {"f", "f.manifest.json", "f.stats.json"}
    assert all(name.startswith(".") and name.endswith(".part") for name in litter)


def test_a_full_disk_publishes_nothing_and_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f"

    def main() -> None:
        with publish(path, stage="merge", recipe={}) as draft, draft.path.open("wb") as file:
            file.write(b"some")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft.path))

    with pytest.raises(SystemExit) as stopped:
        run_cli(main)
    assert "no space left on device" in str(stopped.value)
    assert "\n" not in str(stopped.value)
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_disk_publishes_nothing(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")

    def fill() -> None:
        with publish(tmp_path / "f", stage="merge", recipe={}) as draft:
            draft.path.symlink_to("/dev/full")
            draft.path.write_bytes(b"data")

    with pytest.raises(OSError, match="No space left") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": "ü", "a": [1]})
    assert (tmp_path / "a.json").read_text() == '{\n "b": "ü",\n "a": [\n  1\n ]\n}\n'
    write_text(tmp_path / "a.json", "x")
    assert (tmp_path / "a.json").read_text() == "x"
    assert len(list(tmp_path.iterdir())) == 1


def test_stats_are_written_only_where_there_are_some(tmp_path: Path) -> None:
    with publish(tmp_path / "f", stage="merge", recipe={}) as draft:
        draft.path.write_bytes(b"")
    assert not stats_path(tmp_path / "f").exists()
    assert read_manifest(tmp_path / "f").bytes == 0
    assert json.loads(manifest_path(tmp_path / "f").read_text())["schema_version"] == 1
