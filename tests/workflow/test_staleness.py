"""The staleness contract: change one thing, and exactly these jobs run. One test per line of the table in the docs."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from smoke_run import ROOT, Workspace
from snakemake.settings.types import WorkflowSettings
from snakemake_interface_executor_plugins.settings import ExecMode

from eyrie import recipes
from eyrie.config import load_config, parse_config

ANSWERED = ["smoke-code/s0000", "smoke-code/s0001", "smoke-chat/s0000"]
NATIVE = ["smoke-dialogue/s0000", "smoke-dialogue/s0001"]
SHARD = "smoke-code/s0000"
RESPONSES = "results/smoke/responses/smoke-code/s0000.jsonl.zst"
PROMPTS = "data/prompts/smoke-code/s0000.jsonl.zst"
PREVIEW = "results/smoke/preview.html"


def jobs(rule: str, *names: str) -> set[str]:
    return {f"{rule} {name}" for name in names}


REPORT = {"report", "all"}
BENCH = jobs("bench", "eagle3/held-out", "shallow/held-out") | REPORT
EXPORT = jobs("export", "eagle3", "shallow") | BENCH
TRAIN = jobs("train", "eagle3", "shallow") | EXPORT
MERGE = {"merge"} | TRAIN
CAPTURE = jobs("hidden", *ANSWERED, *NATIVE)
TOKENS = jobs("tokenize", *ANSWERED, *NATIVE) | CAPTURE | MERGE


def shard_and_below(*names: str) -> set[str]:
    return jobs("tokenize", *names) | jobs("hidden", *names) | MERGE


def test_a_second_run_has_nothing_to_do(run: Workspace) -> None:
    result = run.snakemake()
    assert result.returncode == 0
    assert "Nothing to be done" in result.stdout + result.stderr
    assert run.dry_run() == set()


def test_comments_readme_and_a_moved_checkout(run: Workspace, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    for name in ("rules", "scripts", "envs", "eyrie", "profiles"):
        shutil.copytree(ROOT / name, moved / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", moved)
    for source in [moved / "Snakefile", *moved.rglob("*.smk"), *moved.rglob("*.py")]:
        source.write_text(source.read_text() + "\n# A comment costs nothing.\n")
    (moved / "README.md").write_text("other words")
    assert run.dry_run(root=moved) == set()


def test_one_forced_response_shard(run: Workspace) -> None:
    expected = {f"generate {SHARD}!"} | shard_and_below(SHARD)
    assert run.dry_run(forcerun={RESPONSES}) == expected


def test_forcing_the_rule_asks_for_all_answers_by_name(run: Workspace) -> None:
    expected = {f"generate {name}!" for name in ANSWERED} | shard_and_below(*ANSWERED)
    assert run.dry_run(forcerun={"generate"}) == expected


def test_forcing_everything_asks_for_no_answers_by_name(run: Workspace) -> None:
    expected = {"convert_target", "identify_target"} | jobs("ingest", *ANSWERED, *NATIVE) | jobs("generate", *ANSWERED)
    assert run.dry_run(forceall=True) == expected | TOKENS


def test_one_response_shard_remade_with_identical_bytes(run: Workspace) -> None:
    assert run.dry_run(targets={RESPONSES}, forcetargets=True) == {f"generate {SHARD}!"}
    before = _sha256(run.folder / RESPONSES)
    result = run.snakemake("--force", RESPONSES)
    assert result.returncode == 0, result.stderr
    assert _sha256(run.folder / RESPONSES) == before
    assert run.dry_run() == set()
    assert len(list((run.folder / "results/smoke/journal/smoke-code").glob("s0000*"))) == 2, "the old journal is kept"


@pytest.mark.parametrize(("said", "mark"), [("", ""), (f"{RESPONSES} train", "!"), ("generate", "!")])
def test_a_job_on_another_machine_does_what_the_person_said(
    run: Workspace, monkeypatch: pytest.MonkeyPatch, said: str, mark: str
) -> None:
    """Snakemake starts jobs on other machines with --force, which must not count as asking for new answers."""
    monkeypatch.setenv("EYRIE_FORCED", said)
    remote = WorkflowSettings(exec_mode=ExecMode.REMOTE)
    jobs = run.dry_run(targets={RESPONSES}, forcetargets=True, workflow_settings=remote)
    assert jobs == {f"generate {SHARD}{mark}"}


def test_a_raised_budget_touches_the_last_shard_and_new_ones(run: Workspace) -> None:
    config = run.config()
    config["datasets"]["smoke-code"]["token_budget"] = 800
    changed = ["smoke-code/s0001", "smoke-code/s0002"]
    expected = jobs("ingest", "smoke-code/s0002") | jobs("generate", *changed) | shard_and_below(*changed)
    assert run.dry_run(config) == expected


def test_a_raised_budget_of_a_native_dataset(run: Workspace) -> None:
    config = run.config()
    config["datasets"]["smoke-dialogue"]["token_budget"] = 800
    changed = ["smoke-dialogue/s0001", "smoke-dialogue/s0002"]
    assert run.dry_run(config) == jobs("ingest", "smoke-dialogue/s0002") | shard_and_below(*changed)


def test_prompts_ingested_again_with_the_same_bytes(run: Workspace) -> None:
    expected = jobs("ingest", SHARD) | jobs("generate", SHARD) | shard_and_below(SHARD)
    assert run.dry_run(forcerun={PROMPTS}) == expected
    journal = run.folder / "results/smoke/journal/smoke-code/s0000.jsonl"
    paid, before = journal.read_bytes(), _sha256(run.folder / RESPONSES)
    result = run.snakemake("--forcerun", PROMPTS, "--", RESPONSES)
    assert result.returncode == 0, result.stderr
    assert journal.read_bytes() == paid, "no answer is bought twice"
    assert _sha256(run.folder / RESPONSES) == before
    assert run.dry_run() == set()


def test_a_dataset_is_added(run: Workspace) -> None:
    config = run.config()
    config["datasets"]["more"] = {**config["datasets"]["smoke-chat"], "token_budget": 300}
    added = jobs("ingest", "more/s0000") | jobs("generate", "more/s0000") | shard_and_below("more/s0000")
    assert run.dry_run(config) == added


def test_a_dataset_is_removed(run: Workspace) -> None:
    config = run.config()
    del config["datasets"]["smoke-chat"]
    assert run.dry_run(config) == MERGE


def test_the_cap_of_a_dataset(run: Workspace) -> None:
    config = run.config()
    config["datasets"]["smoke-chat"]["token_cap"] = 300
    assert run.dry_run(config) == MERGE


def test_the_drafter_whose_vocabulary_is_kept(run: Workspace) -> None:
    config = run.config()
    config["merge"].pop("draft_vocab_size")
    config["merge"]["draft_vocab_from"] = "earlier"
    (run.folder / "earlier").mkdir()
    (run.folder / "earlier" / "model.safetensors").write_bytes(b"weights")
    assert run.dry_run(config) == MERGE


def test_the_preview_is_made_when_asked_for_and_no_run_waits_for_it(
    run: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.dry_run(targets={PREVIEW}) == {"preview"}
    result = run.snakemake("--", PREVIEW)
    assert result.returncode == 0, result.stderr
    assert "smoke: rows as they are trained on" in (run.folder / PREVIEW).read_text(encoding="utf-8")
    assert run.dry_run(targets={PREVIEW}) == set()
    config = run.config()
    config["merge"]["test_fraction"] = 0.3
    assert run.dry_run(config, targets={PREVIEW}) == {"merge", "preview"}
    shard = {f"generate {SHARD}!", f"tokenize {SHARD}", "merge", "preview"}
    assert run.dry_run(targets={PREVIEW}, forcerun={RESPONSES}) == shard
    monkeypatch.setitem(recipes.REVISIONS, "preview", recipes.REVISIONS["preview"] + 1)
    assert run.dry_run(targets={PREVIEW}) == {"preview"}
    assert run.dry_run() == set()


def test_sampling_of_one_dataset(run: Workspace) -> None:
    config = run.config()
    config["datasets"]["smoke-chat"]["sampling"] = {"temperature": 0.7}
    changed = ["smoke-chat/s0000"]
    assert run.dry_run(config) == jobs("generate", *changed) | shard_and_below(*changed)


def test_maximum_sequence_length(run: Workspace) -> None:
    config = run.config()
    config["tokenize"]["max_length"] += 64
    assert run.dry_run(config) == TOKENS


def test_another_target_model(run: Workspace) -> None:
    config = run.config()
    folder = run.folder / "another"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    config["target"] = {"model": "another"}
    assert run.dry_run(config) == {"identify_target"} | jobs("generate", *ANSWERED) | TOKENS


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "config.json"])
def test_template_tokenizer_or_config_of_the_target(run: Workspace, name: str) -> None:
    path = f"data/targets/smollm2-135m/{name}"
    with run.changed(path, (run.folder / path).read_bytes() + b"\n"):
        assert run.dry_run() == {"identify_target"} | jobs("generate", *ANSWERED) | TOKENS
    assert run.dry_run() == set()


@pytest.mark.parametrize(("option", "value"), [("layers", [2, 14, 26]), ("storage_dtype", "float32")])
def test_captured_layers_and_storage(run: Workspace, option: str, value: object) -> None:
    config = run.config()
    config["hidden"] = {option: value}
    assert run.dry_run(config) == CAPTURE | TRAIN


@pytest.mark.parametrize(("option", "value"), [("learning_rate", 5e-4), ("epochs", 2), ("ttt_steps", 4)])
def test_training_of_one_drafter(run: Workspace, option: str, value: float) -> None:
    config = run.config()
    config["drafters"]["shallow"][option] = value
    expected = {"train shallow", "export shallow", "bench shallow/held-out"} | REPORT
    assert run.dry_run(config) == expected


def test_benchmark_settings(run: Workspace) -> None:
    config = run.config()
    config["bench"]["suites"]["held-out"]["draft_tokens"] = 4
    assert run.dry_run(config) == BENCH


def test_where_jobs_run(run: Workspace) -> None:
    config = run.config()
    config["engine"] = {"batch_size": 7, "device": "cpu"}
    config["hidden"] = {"batch_tokens": 512}
    config["drafters"]["eagle3"]["checkpoint_every"] = 3
    assert run.dry_run(config, cores=16) == set()


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("generate", jobs("generate", *ANSWERED) | shard_and_below(*ANSWERED)),
        ("tokenize", TOKENS),
        ("merge", MERGE),
        ("hidden", CAPTURE | TRAIN),
        ("train", TRAIN),
        ("export", EXPORT),
        ("bench", BENCH),
        ("report", REPORT),
    ],
)
def test_a_raised_stage_revision(
    run: Workspace, monkeypatch: pytest.MonkeyPatch, stage: str, expected: set[str]
) -> None:
    monkeypatch.setitem(recipes.REVISIONS, stage, recipes.REVISIONS[stage] + 1)
    assert run.dry_run() == expected


def test_a_touched_manifest_with_the_same_bytes(run: Workspace) -> None:
    (run.folder / f"{RESPONSES}.manifest.json").touch()
    assert run.dry_run() == set()


def test_a_lost_shard_is_remade_only_when_it_is_needed(run: Workspace) -> None:
    hidden = run.folder / "results/smoke/hidden/smoke-code/s0000.safetensors"
    aside = hidden.with_suffix(".aside")
    hidden.rename(aside)
    try:
        assert run.dry_run() == set(), "nothing downstream is stale"
        config = run.config()
        config["drafters"]["shallow"]["seed"] = 9
        expected = jobs("hidden", SHARD) | TRAIN
        assert run.dry_run(config) == expected, "training needs it, so it is captured again"
    finally:
        aside.rename(hidden)


def test_the_resolved_config_records_what_ran(run: Workspace) -> None:
    resolved = load_config(run.folder / "results/smoke/config.resolved.yaml")
    assert resolved == parse_config(run.config())


def test_every_shard_is_accounted_for(run: Workspace) -> None:
    for name in ANSWERED:
        manifest = json.loads((run.folder / f"results/smoke/responses/{name}.jsonl.zst.manifest.json").read_text())
        assert manifest["tokens"]["completion"] > 0


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
