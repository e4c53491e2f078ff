"""What the doctor reads from the files of a run."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eyrie.doctor.run_facts import all_facts, cheap_facts, parameters
from eyrie.export.sglang import to_config, to_tensors
from eyrie.formats.publish import write_json
from eyrie.servers.spec import Files, Spec, State, dump_spec
from tests.doctor.desk import config
from tests.export.test_sglang import card_of, make_drafter
from tests.report.fake_run import FakeRun


def exported(run: FakeRun) -> Path:
    """The fake run with a real export of a small drafter."""
    drafter, folder = make_drafter(), run.folder / "export" / "eagle3" / "sglang"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_tensors(drafter), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", to_config(drafter, card_of()))
    return folder


def test_a_run_that_has_made_nothing_says_nothing(tmp_path: Path) -> None:
    facts = all_facts(config(), tmp_path / "results" / "r", tmp_path / "servers", tmp_path / ".snakemake")
    assert facts == type(facts)()


def test_a_finished_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).everything()
    exported(run)
    (run.folder / "hidden" / "code").mkdir(parents=True, exist_ok=True)
    (run.folder / "hidden" / "code" / "s0000.safetensors").write_bytes(bytes(1234))
    write_json(run.folder / "serve" / "eagle3.json", {"acceptance_length": 1.5, "reference_acceptance_length": 1.6})
    facts = all_facts(run.config, run.folder, tmp_path / "servers", tmp_path / ".snakemake")
    assert (facts.identified, facts.hidden_size, facts.context) == (True, 576, 8192)
    assert facts.hidden_bytes == 1234
    assert facts.row_tokens > 10_000
    export = facts.exports["eagle3"]
    assert export.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (export.weights, export.vocabulary) == ("", "")
    assert (export.served, export.reference) == (1.5, 1.6)
    bench = json.loads((run.folder / "bench" / "eagle3" / "held-out.json").read_text())
    assert export.suites == {"held-out": bench["acceptance_length"]}
    assert bool(export.verdicts) == (not bench["verdict"]["deploy"])
    assert export.coverage is None or 0 < export.coverage <= 1


def test_generation_reads_no_drafter(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).everything()
    exported(run)
    facts = cheap_facts(run.config, run.folder)
    assert facts.hidden_size == 576
    assert facts.exports == {}


def test_faults_of_tensors_and_of_the_token_map_are_told_apart(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    path = exported(run) / "model.safetensors"
    good = load_file(path)

    def faults() -> tuple[str, str]:
        export = all_facts(run.config, run.folder, tmp_path, tmp_path / ".snakemake").exports["eagle3"]
        return export.weights, export.vocabulary

    save_file({name: tensor for name, tensor in good.items() if name != "fc.weight"}, path)
    assert "lacks the tensor 'fc.weight'" in faults()[0]
    assert faults()[1] == ""
    save_file(good | {"norm.weight": torch.full_like(good["norm.weight"], float("nan"))}, path)
    assert "'norm.weight' holds NaN" in faults()[0]
    save_file(good | {"d2t": good["d2t"] + torch.arange(len(good["d2t"]))}, path)
    assert faults()[0] == "", "a token map at fault is said once"
    assert "'d2t' is no map of offsets" in faults()[1]
    path.write_bytes(b"half")
    assert "truncated" in faults()[0]
    assert "its token map cannot be read" in faults()[1]


def test_the_size_of_a_drafter_is_that_of_a_real_one() -> None:
    drafter = make_drafter()
    norms = sum(p.numel() for name, p in drafter.named_parameters() if "norm" in name)
    assert parameters(card_of(), 24) == sum(p.numel() for p in drafter.parameters()) - norms


def test_servers_and_snakemake_leave_traces(tmp_path: Path) -> None:
    files = Files(tmp_path / "servers" / "host-abc")
    files.folder.mkdir(parents=True)
    files.write_state(State(phase="stopped", pool_tokens=8192))
    state = tmp_path / ".snakemake"
    for name in ("results/r/tokens/code/s0000.parquet", "results/r/doctor.md"):
        mark = state / "incomplete" / base64.b64encode(name.encode()).decode()
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    facts = all_facts(config(), tmp_path / "r", tmp_path / "servers", state)
    assert [(pool.server, pool.planned, pool.offered) for pool in facts.pools] == [("host-abc", None, 8192)]
    assert facts.incomplete == ("results/r/tokens/code/s0000.parquet",), "the page in the making is none"
    assert not facts.locked
    files.spec.write_text(dump_spec(Spec(command=("x",), planned_pool_tokens=9000)))
    (state / "locks").mkdir()
    (state / "locks" / "0.output.lock").touch()
    facts = all_facts(config(), tmp_path / "r", tmp_path / "servers", state)
    assert facts.pools[0].planned == 9000
    assert facts.locked
