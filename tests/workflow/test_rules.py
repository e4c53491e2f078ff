"""What every rule and every config must keep to, whatever the stage."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from smoke_run import ROOT, dry_run
from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, OutputSettings, Quietness, ResourceSettings

from eyrie.config import load_config
from eyrie.recipes import recipe

CONFIGS = [ROOT / "config.yaml", *sorted((ROOT / "config").glob("*.yaml"))]
RULE_FILES = sorted((ROOT / "rules").glob("*.smk"))


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The rules of the default workflow that do work."""
    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        workflow = api.workflow(
            resource_settings=ResourceSettings(cores=1),
            config_settings=ConfigSettings(configfiles=[ROOT / "config.yaml"]),
            snakefile=ROOT / "Snakefile",
            workdir=tmp_path_factory.mktemp("rules"),
        )
        return [rule for rule in workflow._workflow.rules if not rule.norun]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_plans_without_network_or_files(config: Path, tmp_path: Path) -> None:
    jobs = dry_run(tmp_path, config)
    raw = yaml.safe_load(config.read_text())
    for stage in ("ingest", "tokenize", "hidden"):
        planned = {job.split()[1].split("/")[0] for job in jobs if job.startswith(f"{stage} ")}
        assert planned == set(raw["datasets"]), stage
    assert {job.split()[1] for job in jobs if job.startswith("train ")} == set(raw["drafters"])
    assert ("convert_target" in jobs) == ("gguf" in raw["target"])
    assert not list(tmp_path.rglob("config.resolved.yaml")), "a dry-run writes no outputs"


def test_configs_use_different_runs_and_say_what_they_are_for() -> None:
    runs = [yaml.safe_load(path.read_text())["run"] for path in CONFIGS]
    assert len(set(runs)) == len(runs)
    assert all(path.read_text().startswith("# yaml-language-server: $schema=") for path in CONFIGS)


def test_configs_that_share_a_dataset_share_its_prompt_shards() -> None:
    """data/prompts is common to all runs, so the same name must mean the same slices, or two runs stale each other."""
    seen: dict[str, tuple[str, object]] = {}
    for path in (ROOT / "config.yaml", ROOT / "config" / "smoke.yaml", ROOT / "config" / "smollm2-hour.yaml"):
        config = load_config(path)
        for name in config.datasets:
            made_of = recipe(config, "ingest", dataset=name, shard="s0000")
            other, expected = seen.setdefault(name, (path.name, made_of))
            assert made_of == expected, f"{name}: {path.name} and {other} disagree"


def test_every_rule_says_where_it_logs_and_what_it_needs(rules: list[Any]) -> None:
    assert len(rules) == 14
    for rule in rules:
        assert rule.log, rule.name
        assert rule.benchmark, rule.name
        assert rule.message, rule.name
        assert rule.conda_env, rule.name
        assert {"mem_mb", "runtime", "_cores"} <= set(rule.resources), rule.name


def test_every_rule_has_the_recipe_as_its_only_param(rules: list[Any]) -> None:
    for rule in rules:
        assert list(rule.params.keys()) == ["recipe"], rule.name


def test_every_rule_runs_a_script_of_its_own(rules: list[Any]) -> None:
    for rule in rules:
        match = re.match(r"python \{resources\.scripts\}/(\w+\.py) ", rule.shellcmd)
        assert match, f"{rule.name}: the scripts' folder must be a format field, or moving the checkout stales all"
        assert (ROOT / "scripts" / match[1]).is_file(), rule.name
        assert match[1].removesuffix(".py") not in sys.stdlib_module_names
        assert str(ROOT) not in rule.shellcmd


@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.stem)
def test_rule_files_open_with_their_contract(path: Path) -> None:
    text = path.read_text()
    assert text.startswith('"""')
    if path.stem != "common":
        docstring = text.split('"""')[1]
        assert "\nINPUTS\n" in docstring
        assert "\nOUTPUTS\n" in docstring
    assert "lambda" not in text, "name the function and put it in common.smk"


def test_parsing_imports_nothing_heavy() -> None:
    code = "import eyrie.config, eyrie.datasets, eyrie.recipes, eyrie.formats.publish, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "polars", "pandas", "numpy", "datasets", "pyarrow"}
    assert not heavy & set(loaded.stdout.split())


def _snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    return subprocess.run([*command, "--cores", "1", *arguments], cwd=folder, capture_output=True, text=True)


def test_a_config_error_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    raw = yaml.safe_load((ROOT / "config" / "smoke.yaml").read_text())
    raw["tokenize"]["max_lenght"] = raw["tokenize"].pop("max_length")
    (tmp_path / "typo.yaml").write_text(yaml.safe_dump(raw))
    result = _snakemake(tmp_path, "-n", "--configfile", "typo.yaml")
    assert result.returncode == 1
    said = result.stdout + result.stderr
    assert "typo.yaml: tokenize.max_lenght: no such option; did you mean 'max_length'?\n" in said
    assert "Traceback" not in said
    assert "pydantic" not in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("adapter: human-eval", "adapter: human-evl", "datasets.smoke-code: no dataset adapter 'human-evl'; did you"),
        ("part: prompts", "prt: prompts", "datasets.smoke-chat: adapter chitchat: no such option 'prt'; did you mean"),
        ("run: smoke", "run: smoke\nrun: other", "slip.yaml:"),
    ],
)
def test_a_slip_is_found_when_the_run_is_planned(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = (ROOT / "config" / "smoke.yaml").read_text()
    assert old in text
    (tmp_path / "slip.yaml").write_text(text.replace(old, new, 1))
    result = _snakemake(tmp_path, "-n", "--configfile", "slip.yaml")
    assert result.returncode == 1
    assert said in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_a_configfile_replaces_the_default_as_a_whole(tmp_path: Path) -> None:
    shutil.copy(ROOT / "config.yaml", tmp_path)
    jobs = dry_run(tmp_path, ROOT / "config" / "smoke.yaml")
    assert {job for job in jobs if job.startswith("ingest ")} == {
        f"ingest smoke-{name}/s000{shard}"
        for name, shards in (("code", 2), ("chat", 1), ("dialogue", 2))
        for shard in range(shards)
    }


def test_the_doctor_looks_again_whenever_it_is_asked_and_no_run_waits_for_it(tmp_path: Path) -> None:
    smoke, page = ROOT / "config" / "smoke.yaml", "results/smoke/doctor.md"
    for _ in range(2):
        (tmp_path / page).unlink(missing_ok=True)
        result = _snakemake(tmp_path, "--configfile", str(smoke), "--", page)
        assert result.returncode == 0, result.stderr
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert text.startswith("# Doctor: smoke\n\n0 red, ")
        assert "| workflow-state | green |" in text, "the page in the making is no half-made output"
        assert dry_run(tmp_path, smoke, targets={page}) == {"doctor"}
    assert "doctor" not in dry_run(tmp_path, smoke)
