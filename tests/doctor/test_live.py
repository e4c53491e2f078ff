"""The live readings: NVML through a recording of it, processes and files of this machine for real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eyrie.doctor import collective
from eyrie.doctor.collective import try_all_reduce
from eyrie.doctor.live import take_readings
from eyrie.doctor.nvml import BROKEN, PEER_NVLINK, PEER_READ, Seen, read_gpus, see, visible
from eyrie.doctor.processes import Family, holder
from eyrie.doctor.readings import Readings, RunFacts, load_readings
from eyrie.errors import EyrieError
from tests.doctor.desk import config
from tests.doctor.fake_nvml import MIB, FakeNvml

NOBODY = 2**22 + 5  # above the kernel's largest pid


def seen_with(nvml: FakeNvml) -> Seen:
    seen = read_gpus(nvml, Family())
    assert nvml.open == 0, "NVML is given back"
    return seen


def test_nvml_becomes_readings() -> None:
    seen = seen_with(FakeNvml({0: [(NOBODY, 72_000 * MIB)]}))
    first, second = seen.gpus
    assert seen.driver == "590.48.01"
    assert (first.index, first.name, first.capability) == (0, "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0))
    assert (first.used // MIB, first.total // MIB) == (72_000, 97_887), "what the driver reserves is not used"
    assert [(one.pid, one.bytes, one.state, one.ours) for one in first.holders] == [
        (NOBODY, 72_000 * MIB, "hidden", False)
    ], "a process in both lists is counted once"
    assert (first.uncorrected, second.uncorrected) == (0, 1)
    assert (first.throttled, second.throttled) == ((), ("heat",)), "a power cap is no fault"
    assert [(link.a, link.b, link.path, link.peer) for link in seen.links] == [(0, 1, "PHB", True)]


def test_what_a_device_refuses_is_left_out() -> None:
    seen = seen_with(FakeNvml(refuses=("memory", "ecc", "clocks", "processes", "topology", "peers")))
    first = seen.gpus[0]
    assert first.used == 634 * MIB, "old drivers count their reserve as used"
    assert (first.uncorrected, first.throttled, first.holders, first.holders_known) == (None, (), (), False)
    assert [(link.path, link.peer) for link in seen.links] == [("SYS", False)]


def test_processes_whose_memory_is_unknown_are_said_to_be() -> None:
    seen = seen_with(FakeNvml({0: [(NOBODY, None)]}))
    assert [gpu.holders_known for gpu in seen.gpus] == [False, True]


@pytest.mark.parametrize(
    ("value", "indices"),
    [(None, (0, 1)), ("1,0", (1, 0)), ("", ()), ("-1", ()), ("0,7,1", (0,)), ("GPU-1f5c", (1,)), ("GPU-9", ())],
)
def test_visible_devices_are_read_as_cuda_reads_them(value: str | None, indices: tuple[int, ...]) -> None:
    assert visible(seen_with(FakeNvml()), value) == indices


def test_the_recording_speaks_as_nvml_does() -> None:
    """Names and numbers against the library itself; its errors carry the numbers that are told apart."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is in envs/host.txt")
    for name in (name for name in dir(FakeNvml) if name.lower().startswith("nvml")):
        ours, theirs = getattr(FakeNvml, name), getattr(pynvml, name)
        assert callable(ours) or ours == theirs, name
    assert pynvml.NVML_P2P_CAPS_INDEX_NVLINK == PEER_NVLINK
    assert pynvml.NVML_P2P_CAPS_INDEX_READ in (PEER_READ, (PEER_READ,))
    told_apart = [getattr(pynvml, f"NVML_ERROR_{name}") for name in
                  ("DRIVER_NOT_LOADED", "GPU_IS_LOST", "RESET_REQUIRED", "LIB_RM_VERSION_MISMATCH")]  # fmt: skip
    assert set(told_apart) == BROKEN
    assert pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH).value in BROKEN


def test_a_silent_driver_is_only_missed_where_its_files_are(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    assert see(Family(), tmp_path).unreadable == ""
    (tmp_path / "nvidiactl").touch()
    silent = see(Family(), tmp_path)
    assert silent.unreadable
    assert not silent.broken, "no library says nothing about CUDA"


def test_a_child_is_ours_and_a_zombie_is_called_one() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        found = holder(child.pid, 5, Family())
        assert (found.ours, found.name, found.state, found.bytes) == (True, "sleep", "running", 5)
        assert found.user == psutil.Process().username()
        assert not holder(child.pid, 5, Family(NOBODY)).ours
        child.kill()
        deadline = time.monotonic() + 30
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert holder(child.pid, 5, Family()).state == "zombie"


def test_a_process_that_lost_its_parent_is_an_orphan_and_nobody_of_ours() -> None:
    code = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    try:
        found = holder(pid, 5, Family())
        assert not found.ours
        assert found.orphaned == (psutil.Process(pid).ppid() in (0, 1))
    finally:
        psutil.Process(pid).kill()


def test_this_machine_is_read_fast_and_survives_a_trip_through_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-secret")
    monkeypatch.setenv("SGLANG_API_KEY", "also-secret")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        urls = [f"http://127.0.0.1:{port}", "http://127.0.0.1:1"]
        chosen = config(engine={"kind": "sglang", "urls": urls})
        before = time.process_time()
        readings = take_readings(chosen, tmp_path / "results" / "r", RunFacts())
        assert time.process_time() - before < 0.5, "generation takes them at its start"
    assert readings.reached == dict(zip(urls, [True, False], strict=True))
    assert readings.environment["NCCL_P2P_LEVEL"] == "SYS"
    text = readings.model_dump_json()
    assert "secret" not in text
    assert readings.environment["OPENROUTER_API_KEY"] == "set"
    assert readings.disks[0].path == str(tmp_path / "results" / "r"), "not there yet: its parent's file system counts"
    assert readings.disks[0].kind != "?"
    assert readings.host.cores == os.cpu_count()
    assert readings.versions["snakemake"]
    (tmp_path / "readings.json").write_text(text)
    assert load_readings(tmp_path / "readings.json") == readings
    assert Readings.model_validate_json(text) == readings


def test_a_recording_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(EyrieError, match=r"r\.json: cannot be read .*; give a doctor\.json"):
        load_readings(path)
    path.write_text('{"host": {"cores": "many"}}')
    with pytest.raises(EyrieError, match=r"r\.json: holds no readings \(host\.cores: "):
        load_readings(path)


def test_an_all_reduce_over_two_processes_ends() -> None:
    trial = try_all_reduce("gloo", 2, {"NCCL_P2P_DISABLE": "1"}, seconds=240.0)
    assert trial.seconds is not None, trial.said
    assert trial.environment == {"NCCL_P2P_DISABLE": "1"}


def test_one_that_hangs_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"import os, time; open(r'{tmp_path}/' + str(os.getpid()), 'w').close(); time.sleep(600)"
    monkeypatch.setattr(collective, "rank_command", lambda *_: [sys.executable, "-c", code])
    trial = try_all_reduce("gloo", 2, {}, seconds=3.0)
    assert (trial.seconds, trial.said) == (None, "no end within 3 s")
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert not [pid for pid in started if psutil.pid_exists(pid)], "nothing is left behind"


def test_one_rank_that_fails_ends_the_trial_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(backend: str, rank: int, ranks: int, port: str) -> list[str]:
        code = "import sys, time; sys.exit('no peer access') if {} else time.sleep(600)"
        return [sys.executable, "-c", code.format(rank)]

    monkeypatch.setattr(collective, "rank_command", command)
    before = time.monotonic()
    trial = try_all_reduce("gloo", 2, {}, seconds=120.0)
    assert time.monotonic() - before < 60.0
    assert (trial.seconds, trial.said) == (None, "no peer access")
