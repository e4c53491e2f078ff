"""What the report reads, and what it says about files that are not as they should be."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import FakeRun

from eyrie.errors import EyrieError
from eyrie.formats.manifest import manifest_path, stats_path
from eyrie.report.collect import collect


def test_steps_sum_the_manifests_of_their_shards(fake_run: FakeRun) -> None:
    run = collect(fake_run.raw, fake_run.folder)
    code = run.datasets[0]
    assert code.responses is not None
    made = [fake_run.read(fake_run.folder / "responses" / "code" / f"s000{k}.jsonl.zst") for k in (0, 1)]
    assert code.responses.kept == sum(m.rows.kept for m in made)
    assert code.completion_tokens == sum(m.tokens["completion"] for m in made) == 2 * 12_061
    assert code.responses.facts["truncated"] == sum(m.facts["truncated"] for m in made)
    assert "budget_filled" not in code.responses.facts, "a flag is no count"
    assert code.truncated_tokens == code.responses.facts["truncated"] * 192
    assert run.step("prompts").expected == 12
    assert run.step("responses").expected == 10, "a native dataset has no responses"


def test_times_come_from_stats_else_from_snakemake(fake_run: FakeRun) -> None:
    run = collect(fake_run.raw, fake_run.folder)
    assert run.drafters[0].weights.cpu_seconds == 812.0
    assert run.index.cpu_seconds == 2.75, "one job makes the three merged files, so it is counted once"
    assert run.bench_cpu_seconds == 118.25
    assert run.datasets[0].prompts.cpu_seconds is None
    weights = fake_run.folder / "drafters" / "eagle3" / "model.safetensors"
    stats_path(weights).write_text("not json")
    assert collect(fake_run.raw, fake_run.folder).drafters[0].weights.cpu_seconds is None


def test_the_published_validation_is_the_first_of_the_highest(fake_run: FakeRun) -> None:
    drafter = collect(fake_run.raw, fake_run.folder).drafters[0]
    assert drafter.best is not None
    assert drafter.best.acceptance_length == max(p.acceptance_length or 0 for p in drafter.validation)
    assert len(drafter.train) == 420
    assert len(drafter.validation) == 7
    assert len(drafter.train[0].accuracy) == 3


def test_an_empty_folder_is_a_run_where_all_is_missing(tmp_path: Path) -> None:
    run = collect(FakeRun(tmp_path).raw, tmp_path / "results" / "demo-135m")
    assert run.card is None
    assert run.merged is None
    assert run.headline is None
    assert len(run.step("hidden").missing) == run.step("hidden").expected == 12


def test_the_headline_prefers_a_drafter_to_deploy_to_a_faster_one(tmp_path: Path) -> None:
    raw = {**FakeRun(tmp_path / "a").raw, "drafters": {"fast": {}, "sound": {}}}
    fake = FakeRun(tmp_path / "b", raw).everything()
    fake.bench(
        "fast", "held-out", speedup={"median": 2, "low": 2, "high": 2}, verdict={"deploy": False, "sentence": "No."}
    )
    lead = collect(fake.raw, fake.folder).headline
    assert lead is not None
    assert lead[0].name == "sound"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("bench/eagle3/held-out.json", '{"acceptance_length": "many"}', "acceptance_length"),
        ("bench/eagle3/held-out.json", "{", "snakemake -f"),
        ("merged/summary.json", "[]", "snakemake -f"),
        ("drafters/eagle3/metrics.parquet", "PAR1", "no readable metrics"),
        ("tokens/code/s0000.parquet.manifest.json", "{}", "not a manifest"),
        ("target.json", "{}", "no target card"),
    ],
)
def test_a_malformed_file_is_named_with_what_to_do(fake_run: FakeRun, name: str, text: str, says: str) -> None:
    (fake_run.folder / name).write_text(text)
    with pytest.raises(EyrieError, match=says) as caught:
        collect(fake_run.raw, fake_run.folder)
    assert name.removesuffix(".manifest.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_summary_that_vanished_is_named(fake_run: FakeRun) -> None:
    summary = fake_run.folder / "merged" / "summary.json"
    summary.unlink()
    assert manifest_path(summary).exists()
    with pytest.raises(EyrieError, match=r"summary\.json: missing though its manifest is there"):
        collect(fake_run.raw, fake_run.folder)
