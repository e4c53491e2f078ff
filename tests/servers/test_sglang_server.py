"""SGLang's arguments follow from the config and are ones that its version accepts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eyrie.config import Server, load_config
from eyrie.errors import EyrieError
from eyrie.recipes import machine_options, subtree
from eyrie.servers import sglang
from eyrie.servers.flags import FOLDER, accepted_flags, check_arguments, sglang_version
from eyrie.servers.sglang import GIB, Speculation, build_jobs, check_host_cache, sglang_spec
from eyrie.servers.spec import Spec

VERSION = "0.5.23"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "sglang_version", lambda python: VERSION)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def spec(tmp_path: Path, speculation: Speculation | None = None, **options: Any) -> Spec:
    server = Server.model_validate({"device": "cpu", **options})
    return sglang_spec(server, model=tmp_path, dtype="float32", threads=2, speculation=speculation)


def value(command: tuple[str, ...], flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


def drafter(folder: Path, architecture: str = "LlamaForCausalLMEagle3") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return folder


def test_the_pinned_version_is_the_recorded_one() -> None:
    pins = (ROOT / "envs" / "serve-cpu.txt").read_text()
    assert f"\nsglang=={VERSION}\n" in pins
    assert json.loads((FOLDER / f"sglang-{VERSION}.json").read_text())["version"] == VERSION
    assert len(accepted_flags(VERSION)) > 500


def test_on_a_cpu_it_runs_the_stand_in(tmp_path: Path) -> None:
    made = spec(tmp_path)
    assert value(made.command, "--device") == "cpu"
    assert value(made.command, "--decode-attention-backend") == "intel_amx"
    assert value(made.command, "--model-path") == str(tmp_path.resolve())
    assert {"{port}", "{nccl_port}", "{name}"} <= set(made.command)
    assert made.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert made.environment["OMP_NUM_THREADS"] == "2"
    assert str(made.planned_pool_tokens) == value(made.command, "--max-total-tokens")
    assert made.gpus == ()


def test_on_a_gpu_it_runs_the_stock_package(tmp_path: Path) -> None:
    made = spec(tmp_path, device="cuda", tensor_parallel=2, memory_fraction=0.88, pool_tokens=100_000)
    assert "--device" not in made.command
    assert "--max-total-tokens" not in made.command, "the pool is compared, not capped"
    assert made.planned_pool_tokens == 100_000
    assert value(made.command, "--mem-fraction-static") == "0.88"
    assert value(made.command, "--tensor-parallel-size") == "2"
    assert int(made.environment["MAX_JOBS"]) >= 1
    assert made.gpus == (0, 1)


def test_the_memory_of_the_visible_devices_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert spec(tmp_path, device="cuda", tensor_parallel=2).gpus == (4, 6)


def test_fp8_needs_its_switch_and_is_in_the_recipe(tmp_path: Path) -> None:
    assert value(spec(tmp_path).command, "--kv-cache-dtype") == "auto"
    assert value(spec(tmp_path, kv_cache="fp8").command, "--kv-cache-dtype") == "fp8_e4m3"
    with pytest.raises(EyrieError, match="'kv-cache-dtype' is already set"):
        spec(tmp_path, flags={"kv-cache-dtype": "fp8_e4m3"})
    assert subtree(Server(kv_cache="fp8", max_running_requests=3)) == {"kv_cache": "fp8"}
    assert machine_options(Server(kv_cache="fp8", max_running_requests=3)) == {"max_running_requests": 3}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"schedule-polciy": "lpm"}, "no argument 'schedule-polciy'; did you mean 'schedule-policy'"),
        ({"skip-server-warmup": "yes"}, "'skip-server-warmup' takes 0 values, got 1"),
        ({"page-size": True}, "'page-size' takes 1 values, got 0"),
        ({"load-format": "guess"}, "'load-format' is 'guess'; SGLang 0.5.23 knows"),
        ({"port": 30000}, "'port' is already set by Eyrie"),
    ],
)
def test_what_the_version_does_not_accept_is_refused(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(EyrieError, match=message):
        spec(tmp_path, flags=flags)


def test_further_arguments_pass_through(tmp_path: Path) -> None:
    command = spec(tmp_path, flags={"page-size": 1, "enable-metrics": True, "cuda-graph-bs-decode": "1 2 4"}).command
    assert value(command, "--page-size") == "1"
    assert "--enable-metrics" in command
    place = command.index("--cuda-graph-bs-decode")
    assert command[place + 1 : place + 4] == ("1", "2", "4")


def test_an_unrecorded_version_says_how_to_record_it() -> None:
    with pytest.raises(EyrieError, match=r"SGLang 9\.9 are not recorded .*record_server_flags"):
        check_arguments(["--port", "1"], "9.9")


def test_a_missing_environment_says_how_to_make_it() -> None:
    with pytest.raises(EyrieError, match="no interpreter nowhere/python; make it with `make serve-cpu`"):
        sglang_version("nowhere/python")
    with pytest.raises(EyrieError, match="has no SGLang"):
        sglang_version(sys.executable)


@pytest.mark.parametrize("preset", ["pcie-latency", "pcie-throughput"])
def test_presets_are_data_that_the_version_accepts(tmp_path: Path, preset: str) -> None:
    made = spec(tmp_path, device="cuda", preset=preset)
    assert "--disable-custom-all-reduce" in made.command
    assert any(name.startswith("NCCL_") for name in made.environment)
    with pytest.raises(EyrieError, match="no 'pcie'; choose one of pcie-latency, pcie-throughput"):
        spec(tmp_path, preset="pcie")


def test_the_drafter_is_served_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spec(tmp_path, Speculation(drafter(tmp_path / "draft"), steps=3))
    assert value(made.command, "--speculative-algorithm") == "EAGLE3"
    sizes = ("num-steps", "eagle-topk", "num-draft-tokens")
    assert [value(made.command, f"--speculative-{name}") for name in sizes] == ["3", "1", "4"]
    with pytest.raises(EyrieError, match="EAGLE-3 drafter, which SGLang must serve with the algorithm EAGLE3"):
        spec(tmp_path, Speculation(tmp_path / "draft", steps=3, algorithm="EAGLE"))
    with pytest.raises(EyrieError, match="a chain of 3 steps has 4 draft tokens, not 6"):
        spec(tmp_path, Speculation(tmp_path / "draft", steps=3, draft_tokens=6))
    with pytest.raises(EyrieError, match="is no EAGLE-3 drafter"):
        spec(tmp_path, Speculation(drafter(tmp_path / "other", "LlamaForCausalLM"), steps=3))
    with pytest.raises(EyrieError, match="export the drafter again"):
        spec(tmp_path, Speculation(tmp_path / "nowhere", steps=3))
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(EyrieError, match="SGLANG_SIMULATE_ACC_LEN: is set and would fake the acceptance"):
        spec(tmp_path, Speculation(tmp_path / "draft", steps=3))


def test_eagle_cannot_come_in_by_the_side_door(tmp_path: Path) -> None:
    for speculation in (None, Speculation(drafter(tmp_path / "draft"), steps=3)):
        with pytest.raises(EyrieError, match="'speculative-algorithm' is set from the drafter"):
            spec(tmp_path, speculation, flags={"speculative-algorithm": "EAGLE"})


def test_a_host_cache_must_fit_the_host() -> None:
    check_host_cache(48, 8, 449 * GIB)
    with pytest.raises(EyrieError, match=r"48 GB for each of 8 GPUs .* 45 would fit"):
        check_host_cache(48, 8, 350 * GIB)


def test_compilations_are_limited_by_memory_where_there_is_no_swap() -> None:
    assert build_jobs(64, 512 * GIB, 0) == 20
    assert build_jobs(64, 32 * GIB, 0) == 4
    assert build_jobs(64, 32 * GIB, 8 * GIB) == 5
    assert build_jobs(2, 1 * GIB, 0) == 1


def test_the_default_config_uses_the_environment_that_make_builds() -> None:
    assert load_config(ROOT / "config.yaml").server.python == ".venv-serve/bin/python"
    assert ".venv-serve" in (ROOT / "Makefile").read_text()
