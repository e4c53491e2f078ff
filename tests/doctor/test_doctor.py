"""The page, its twin, the refusal of generation, and the closed list of names."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import yaml

from eyrie.config import load_config, parse_config
from eyrie.config.checks import CheckName
from eyrie.doctor import require_healthy, write_doctor
from eyrie.doctor.checks import CHECKS
from eyrie.doctor.readings import Readings
from eyrie.errors import EyrieError
from eyrie.generate.stage import generate
from tests.doctor.desk import GIB, RECORDINGS, config, recorded, with_gpu
from tests.generate_desk import Desk, FakeEngine, FakeRenderer, questions, recipe_of

ROOT = Path(__file__).resolve().parents[2]
HELD = recorded("zombie")


def page(tmp_path: Path, name: str, **changes: object) -> tuple[str, dict[str, object]]:
    out = tmp_path / "doctor.md"
    places = {"run_dir": tmp_path / "results" / "r", "servers": tmp_path / "servers"}
    write_doctor(config(**changes), **places, out=out, readings=RECORDINGS / f"{name}.json")
    return out.read_text(), json.loads(out.with_suffix(".json").read_text())


def test_the_list_is_closed_and_the_docs_know_it() -> None:
    names = [check.name for check in CHECKS]
    assert sorted(names) == sorted(get_args(CheckName))
    assert len(set(names)) == len(names)
    table = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE) == names
    guarding = re.findall(r"^\| `([a-z0-9-]+)` \| yes \|", table, re.MULTILINE)
    assert guarding == [check.name for check in CHECKS if check.guards]


def test_allow_takes_names_of_the_list_alone() -> None:
    assert config(doctor={"allow": ["disk", "gpu-held"]}).doctor.allow == ("disk", "gpu-held")
    with pytest.raises(EyrieError, match=r"doctor\.allow\.0: input should be 'gpu-held', .*got 'gpu'"):
        config(doctor={"allow": ["gpu"]})


@pytest.mark.parametrize("name", [path.stem for path in sorted(RECORDINGS.glob("*.json"))])
def test_the_page_and_its_twin_hold_the_same_facts(tmp_path: Path, name: str) -> None:
    text, facts = page(tmp_path, name, server={"tensor_parallel": 2})
    checks = {check["name"]: check for check in facts["checks"]}  # type: ignore[attr-defined]
    assert list(checks) == [check.name for check in CHECKS]
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| (red|yellow|green|not applicable) \|", text, re.MULTILINE))
    assert rows == {name: check["verdict"] for name, check in checks.items()}
    summary = facts["summary"]
    for verdict in ("red", "yellow", "green", "not applicable"):
        count = list(rows.values()).count(verdict)
        assert f"{count} {verdict}" in text.splitlines()[2]
        assert summary[verdict] == count  # type: ignore[index]
    for check in checks.values():
        bad = check["verdict"] in ("red", "yellow")
        assert bool(check["mend"]) == bad
        assert (f"* **{check['verdict']}: {check['name']}**" in text) == bad
        assert check["mend"] in text
    assert Readings.model_validate(facts["readings"]) == recorded(name)


def test_what_others_named_cannot_break_the_page(tmp_path: Path) -> None:
    held = {"pid": 7, "bytes": 9 * GIB, "name": "a|b\n| x |<script>"}
    path = tmp_path / "r.json"
    path.write_text(with_gpu("h200", 0, holders=[held]).model_dump_json())
    out = tmp_path / "doctor.md"
    write_doctor(config(), run_dir=tmp_path, servers=tmp_path, out=out, readings=path)
    text = out.read_text()
    assert "a\\|b \\| x \\|&lt;script>" in text
    assert "<script" not in text


def test_the_default_config_has_no_red_on_this_machine(tmp_path: Path) -> None:
    chosen = load_config(ROOT / "config.yaml")
    out = tmp_path / "doctor.md"
    write_doctor(chosen, run_dir=tmp_path / "results" / "x", servers=tmp_path / "servers", out=out)
    red = [check for check in json.loads(out.with_suffix(".json").read_text())["checks"] if check["verdict"] == "red"]
    assert red == []
    require_healthy(chosen, tmp_path / "results" / "x")


def test_a_red_check_keeps_generation_from_starting(tmp_path: Path) -> None:
    with pytest.raises(EyrieError) as caught:
        require_healthy(config(), tmp_path, HELD)
    assert str(caught.value) == (
        "doctor: gpu-held: GPU 0: pid 31877 (sglang::schedul, user ml) holds 72,126 MiB, orphaned: whoever started it "
        "is gone; end it if nobody needs it: `kill 31877`; or choose other GPUs with CUDA_VISIBLE_DEVICES. Eyrie ends "
        "no process that it did not start. To start nevertheless, add gpu-held to doctor.allow"
    )


def test_what_is_allowed_by_name_is_said_and_passed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    require_healthy(config(doctor={"allow": ["gpu-held"]}), tmp_path, HELD)
    assert "doctor.allow: gpu-held is red and allowed: GPU 0: pid 31877" in caplog.text
    with pytest.raises(EyrieError, match="doctor: gpu-held"):
        require_healthy(config(doctor={"allow": ["disk"]}), tmp_path, HELD)


def test_generation_minds_its_own_business_alone(tmp_path: Path) -> None:
    """Neither the GPUs of a server that it does not use, nor what later stages made, keep it from answering."""
    require_healthy(config(server={"kv_cache": "fp8", "memory_fraction": 0.95}), tmp_path, recorded("pcie8"))
    urls = {"kind": "sglang", "urls": ["http://localhost:30000"]}
    require_healthy(config(engine=urls), tmp_path, HELD)
    faulty = {"exports": {"eagle3": {"weights": "x"}}}
    require_healthy(config(), tmp_path, recorded("cpu", run=faulty))


def test_a_server_of_ours_is_minded(tmp_path: Path) -> None:
    """Without URLs the answers come from a server that Eyrie starts, so its options count."""
    with pytest.raises(EyrieError, match="doctor: fp8-cache: "):
        require_healthy(config(engine={"kind": "sglang"}, server={"kv_cache": "fp8"}), tmp_path, recorded("pcie8"))


def test_the_stage_asks_before_the_engine_is_made_and_only_if_it_is_needed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, questions(8))

    def answer(readings: Readings, engine: FakeEngine) -> None:
        checkup = partial(require_healthy, config(), tmp_path, readings)
        generate(
            recipe_of(40), prompts=desk.prompts, target=desk.target, model="m", out=desk.out, journal=desk.journal,
            engine=lambda: engine, renderer=FakeRenderer(), checkup=checkup,
        )  # fmt: skip

    engine = FakeEngine()
    with pytest.raises(EyrieError, match="doctor: gpu-held: GPU 0"):
        answer(HELD, engine)
    assert not engine.asked
    assert not desk.out.exists()
    answer(recorded("h200"), engine)
    assert engine.asked
    answer(HELD, FakeEngine())  # all is in the journal: no machine is needed


def test_the_scripts_refuse_and_report(tmp_path: Path, tiny_target: Path) -> None:
    """More connections than this machine may open: generation says so in one line, the doctor writes its page."""
    desk = Desk(tmp_path / "results" / "r", questions(4))
    engine = {"kind": "sglang", "urls": ["http://127.0.0.1:1"], "concurrency": 1_000_000_000, "outage": 1.0}
    raw = {**yaml.safe_load((ROOT / "config" / "smoke.yaml").read_text()), "engine": engine}
    parse_config(raw)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))

    def script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts" / name), "--config", str(path), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )

    out = tmp_path / "results" / "r" / "responses" / "code" / "s0000.jsonl.zst"
    recipe = json.dumps(recipe_of(40) | {"engine": {"kind": "sglang"}})
    refused = script(
        "generate_responses.py", "--recipe", recipe, "--prompts", desk.prompts, "--target", desk.target, "--model",
        tiny_target, "--out", out, "--journal", desk.journal,
    )  # fmt: skip
    assert refused.returncode == 1
    assert re.search(r"^error: doctor: host-limits: \d+ files may be open, 1000000128 are needed", refused.stderr, re.M)
    assert "Traceback" not in refused.stderr
    assert not out.exists()
    made = script(
        "doctor.py", "--run-dir", tmp_path / "results" / "r", "--servers", tmp_path, "--out", tmp_path / "doctor.md"
    )
    assert made.returncode == 0, made.stderr
    assert "red: host-limits: " in made.stderr
    assert "**red: host-limits**, generation refuses to start: " in (tmp_path / "doctor.md").read_text()
