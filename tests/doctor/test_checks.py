"""Every check, green and otherwise, on recorded machines."""

from __future__ import annotations

from typing import Any

import pytest

from eyrie.doctor.checks import CHECKS
from eyrie.doctor.readings import Readings
from tests.doctor.desk import GIB, MIB, examined, recorded, with_gpu


def words_of(value: object) -> str:
    return value[:40] if isinstance(value, str) else ""


EIGHT: dict[str, Any] = {"server": {"tensor_parallel": 8}}
TWO: dict[str, Any] = {"server": {"tensor_parallel": 2}}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 8192}


def drafter(context: int | None = None, **facts: Any) -> Readings:
    return recorded("cpu", run={"context": context, "exports": {"eagle3": {"config": EAGLE3, **facts}}})


def holding(**holder: Any) -> Readings:
    held = {"pid": 7, "bytes": 9 * GIB, "user": "eve", "name": "python", **holder}
    return with_gpu("h200", 0, used=9 * GIB, holders=[held])


GREEN: list[tuple[str, Readings, dict[str, Any], str]] = [
    ("gpu-held", recorded("h200"), {}, "GPU 0: 139.8 GiB of 140.4 GiB free; 0 other processes"),
    ("gpu-held", recorded("zombie", visible=[2]), {}, "1 other processes with little memory"),
    ("gpu-unseen", holding(), {}, "at most 0 MiB belong to no listed process"),
    ("gpu-health", recorded("pcie8"), EIGHT, "8 of 8 GPUs are used (NVIDIA RTX PRO 6000"),
    ("gpu-peers", recorded("pcie8"), EIGHT, "12 x NODE, 16 x SYS; kernel flags: amd_iommu=on iommu=pt pci=realloc=off"),
    ("gpu-peers", recorded("pcie8", trials=[{"environment": {}, "seconds": 2.5}]), EIGHT, "an all-reduce took 2.5 s"),
    ("nccl-settings", recorded("pcie8"), {"server": {"tensor_parallel": 8, "preset": "pcie-latency"}}, "LEVEL=SYS"),
    ("attention-backend", recorded("pcie8"), {"server": {"flags": {"attention-backend": "flashinfer"}}}, "flashinfer"),
    ("attention-backend", recorded("h200"), {"server": {"flags": {"attention-backend": "fa3"}}}, "capability 9.0"),
    ("fp8-cache", recorded("pcie8"), {}, "stay in the model's dtype"),
    ("memory-headroom", recorded("pcie8"), {"server": {"memory_fraction": 0.88}}, "leaves 5.6 GiB"),
    ("memory-headroom", recorded("pcie8"), {}, "SGLang leaves what it thinks right"),
    ("pool-size", recorded("cpu", run={"pools": [{"server": "s", "planned": 1000, "offered": 900}]}), {}, "900 tokens"),
    ("host-cache", recorded("pcie8"), {"server": {"host_cache_gb": 48, "tensor_parallel": 8}}, "48 GB for each of 8"),
    ("build-memory", recorded("pcie8"), {}, "20 compilers of 5 GiB at once"),
    ("draft-algorithm", drafter(served=1.6), {}, "eagle3: EAGLE-3 architecture"),
    ("draft-weights", drafter(), {}, "tensors and config as the layout demands"),
    ("draft-vocabulary", drafter(coverage=0.975), {}, "covers 97.5%"),
    ("draft-context", drafter(context=8192), {}, "8,192 positions are served"),
    ("break-even", drafter(suites={"held-out": 2.5}), {}, "advises to deploy, acceptance length {eagle3: {held-out"),
    ("acceptance-gap", drafter(served=1.58, reference=1.59), {}, "1.58 on the server, 1.59 in the reference"),
    ("tokenizer", recorded("cpu", run={"identified": True}), {}, "passed"),
    ("disk", recorded("cpu", run={"hidden_size": 576}), {}, "at least 4.3 GiB of hidden states for 1,000,000 tokens"),
    (
        "answerers",
        recorded("cpu", reached={"http://a:1": True}),
        {"engine": {"kind": "sglang", "urls": ["http://a:1"]}},
        "1 servers listen",
    ),
    (
        "answerers",
        recorded("cpu", environment={"OPENROUTER_API_KEY": "set"}),
        {"engine": {"kind": "openrouter", "model": "m", "max_dollars": 1, "openrouter": {"providers": ["A"]}}},
        "OPENROUTER_API_KEY is set",
    ),
    ("workflow-state", recorded("cpu"), {}, "Snakemake 9.27.1, no half-made output"),
    ("host-limits", recorded("cpu"), {}, "1,024 files may be open"),
]

RED: list[tuple[str, Readings, dict[str, Any], str, str]] = [
    (
        "gpu-held",
        recorded("zombie"),
        TWO,
        "GPU 0: pid 31877 (sglang::schedul, user ml) holds 72,126 MiB, orphaned: whoever started it is gone; "
        "GPU 1: pid 31878 (sglang::schedul, user ml) holds 72,130 MiB, ended but not reaped",
        "end it if nobody needs it: `kill 31877`",
    ),
    ("gpu-held", holding(), {}, "holds 9,216 MiB", "wait until pid 7 is done"),
    ("gpu-held", holding(state="zombie"), {}, "ended but not reaped", "end the parent of pid 7"),
    ("gpu-held", holding(state="hidden"), {}, "not visible from here", "on the host, outside this container"),
    ("gpu-unseen", with_gpu("h200", 0, used=72 * GIB), {}, "GPU 0: 73,728 MiB", "in other containers"),
    (
        "gpu-health",
        recorded("cpu", gpus_unreadable="version mismatch", driver_broken=True),
        {},
        "mismatch",
        "nvidia-smi",
    ),
    ("gpu-health", recorded("cpu"), {"engine": {"device": "cuda"}}, "shows none", "set engine.device to auto or cpu"),
    ("gpu-health", recorded("h200", visible=[]), {"server": {"device": "cuda"}}, "hides all", "unset CUDA_VISIBLE"),
    ("gpu-health", recorded("h200"), TWO, "tensor_parallel is 2 and 1 GPUs are visible", "lower server.tensor"),
    ("gpu-health", with_gpu("pcie8", 3, uncorrected=2), EIGHT, "GPU 3: 2 memory errors", "leave it out"),
    ("gpu-peers", recorded("low-host"), TWO, "/dev/shm holds 64 MiB for 2 ranks", "give it 512 MiB"),
    (
        "gpu-peers",
        recorded(
            "pcie8",
            trials=[
                {"environment": {}, "said": "no end within 30 s"},
                {"environment": {"NCCL_P2P_DISABLE": "1"}, "seconds": 3.0},
            ],
        ),
        EIGHT,
        "did not end well (no end within 30 s)",
        "set server.preset to pcie-throughput",
    ),
    ("gpu-peers", recorded("pcie8", trials=[{"environment": {}, "said": "x"}] * 2), EIGHT, "neither did", "NCCL_DEBUG"),
    (
        "nccl-settings",
        recorded(
            "pcie8",
            environment={"NCCL_P2P_LEVEL": "SYS"},
            links=[{"a": 0, "b": 1, "path": "SYS", "peer": False}],
        ),
        TWO,
        "1 pairs of GPUs have no peer access",
        "pcie-throughput",
    ),
    (
        "attention-backend",
        recorded("pcie8"),
        {"server": {"flags": {"decode-attention-backend": "trtllm_mla"}}},
        "decode-attention-backend is trtllm_mla, which has no kernels for compute capability 12.0",
        "take flashinfer or triton",
    ),
    ("attention-backend", recorded("pcie8"), {"server": {"flags": {"attention-backend": "fa3"}}}, "12.0", "leave"),
    ("attention-backend", recorded("h200"), {"server": {"flags": {"attention-backend": "cutlass_mla"}}}, "9.0", "take"),
    ("fp8-cache", recorded("pcie8"), {"server": {"kv_cache": "fp8"}}, "random text", "leave server.kv_cache at auto"),
    (
        "memory-headroom",
        recorded("pcie8"),
        {"server": {"memory_fraction": 0.93}},
        "leaves 0.9 GiB for a long prefill",
        "lower server.memory_fraction to 0.88",
    ),
    (
        "pool-size",
        recorded("cpu", run={"pools": [{"server": "s", "planned": 349_377, "offered": 1_741}]}),
        {},
        "s: 1,741 tokens, planned 349,377",
        "raise server.memory_fraction",
    ),
    (
        "host-cache",
        recorded("low-host"),
        {"server": {"host_cache_gb": 48, "tensor_parallel": 2}},
        "leave under 10 GiB of the 4 GiB that are free on this host; no swap",
        "0 would fit",
    ),
    ("build-memory", recorded("low-host"), {}, "1 compilers of 5 GiB at once, 4.0 GiB free", "add swap"),
    ("build-memory", recorded("h200"), {"server": {"build_jobs": 32}}, "32 compilers", "server.build_jobs to 8"),
    ("draft-algorithm", drafter(config={"architectures": ["LlamaForCausalLM"]}), {}, "no EAGLE-3 drafter", "export"),
    ("draft-algorithm", drafter(served=1.0), {}, "acceptance length 1.00 on the server", "a wiring fault"),
    ("draft-algorithm", recorded("cpu", environment={"SGLANG_SIMULATE_ACC_LEN": "3"}), {}, "fakes", "unset SGLANG"),
    ("draft-weights", drafter(weights="x: lacks the tensor 'fc.weight'"), {}, "fc.weight", "-R export"),
    ("draft-vocabulary", drafter(vocabulary="x: 'd2t' is no map"), {}, "'d2t' is no map", "-R export"),
    ("acceptance-gap", drafter(served=1.2, reference=1.6), {}, "1.20 on the server", "suspect the chat template"),
    (
        "tokenizer",
        recorded("cpu", run={"identified": True, "tokenizer_faults": ["chat turns are rejected: x"]}),
        {},
        "chat turns are rejected",
        "instruction-tuned",
    ),
    (
        "disk",
        recorded("pcie8", run={"hidden_size": 7168}),
        {"datasets": {"code": {"token_budget": 160_000_000}}},
        "results/r (xfs): 6,000.0 GiB free, 9,400.4 GiB needed: at least 8,544.9 GiB",
        "lower the token budgets",
    ),
    (
        "answerers",
        recorded("cpu"),
        {"engine": {"kind": "openrouter", "model": "m", "max_dollars": 1, "openrouter": {"providers": ["A"]}}},
        "the environment has no OPENROUTER_API_KEY",
        "export OPENROUTER_API_KEY",
    ),
    (
        "workflow-state",
        recorded("cpu", versions={"snakemake": "8.30.0"}),
        {},
        "Snakemake 8.30.0, needed is 9.27",
        "host",
    ),
    (
        "host-limits",
        recorded("cpu", host={"open_files": 256}),
        {"engine": {"kind": "sglang", "urls": ["http://a:1"], "concurrency": 512}},
        "256 files may be open, 640 are needed",
        "ulimit -n 4096",
    ),
    ("host-limits", recorded("cpu", host={"clock": "1970-01-01T00:05:00Z"}), {}, "clock says 1970-01-01", "set it"),
]

YELLOW: list[tuple[str, Readings, dict[str, Any], str]] = [
    ("gpu-held", holding(ours=True), {}, "holds 9,216 MiB"),
    ("gpu-unseen", with_gpu("h200", 0, used=600 * MIB, holders_known=False), {}, "the driver does not say here"),
    ("gpu-health", recorded("cpu", gpus_unreadable="NVML Shared Library Not Found"), {}, "Shared Library Not Found"),
    ("gpu-health", with_gpu("h200", 0, throttled=["heat"]), {}, "GPU 0: heat"),
    ("gpu-peers", recorded("pcie8", host={"kernel_flags": ["amd_iommu=on"]}), EIGHT, "no trial was run"),
    (
        "nccl-settings",
        recorded("pcie8", environment={"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1"}),
        EIGHT,
        "the level has no effect",
    ),
    (
        "nccl-settings",
        recorded("pcie8", environment={"NCCL_P2P_DISABLE": "0"}),
        {"server": {"tensor_parallel": 8, "preset": "pcie-throughput"}},
        "NCCL_P2P_DISABLE of the shell is overruled",
    ),
    ("fp8-cache", recorded("h200"), {"server": {"kv_cache": "fp8"}}, "answers and acceptance get worse"),
    ("memory-headroom", recorded("pcie8"), {"server": {"memory_fraction": 0.9}}, "leaves 3.7 GiB"),
    ("build-memory", recorded("pcie8"), {"server": {"build_jobs": 40}}, "40 compilers"),
    ("draft-vocabulary", drafter(coverage=0.5), {}, "covers 50.0%"),
    ("draft-context", drafter(context=131_072), {}, "knows 8,192 positions, 131,072 are served"),
    ("break-even", drafter(suites={"s": 1.5}, verdicts={"s": "Do not deploy: x"}), {}, "eagle3 on s: Do not deploy"),
    ("acceptance-gap", drafter(suites={"s": 1.5}, trained=2.0), {}, "1.50 in the benchmark, 2.00 simulated"),
    ("tokenizer", recorded("cpu", run={"identified": True, "tokenizer_notes": ["odd"]}), {}, "odd"),
    (
        "disk",
        recorded("cpu", disks=[{"path": "results/r", "free": 60 * GIB, "total": 90 * GIB, "kind": "nfs4"}]),
        {},
        "lies on nfs4",
    ),
    ("answerers", recorded("cpu"), {"engine": {"kind": "sglang", "urls": ["http://a:1"]}}, "1 of 1 servers do not"),
    ("workflow-state", recorded("cpu", run={"incomplete": ["a/b"]}), {}, "1 outputs are half-made: a/b"),
]


@pytest.mark.parametrize(("name", "readings", "changes", "words"), GREEN, ids=words_of)
def test_green(name: str, readings: Readings, changes: dict[str, Any], words: str) -> None:
    found = examined(name, readings, **changes)
    assert (found.verdict, found.mend) == ("green", ""), found
    assert words in found.evidence


@pytest.mark.parametrize(("name", "readings", "changes", "words", "mend"), RED, ids=words_of)
def test_red(name: str, readings: Readings, changes: dict[str, Any], words: str, mend: str) -> None:
    found = examined(name, readings, **changes)
    assert found.verdict == "red", found
    assert words in found.evidence
    assert mend in found.mend
    assert "\n" not in found.evidence + found.mend


@pytest.mark.parametrize(("name", "readings", "changes", "words"), YELLOW, ids=words_of)
def test_yellow(name: str, readings: Readings, changes: dict[str, Any], words: str) -> None:
    found = examined(name, readings, **changes)
    assert found.verdict == "yellow", found
    assert words in found.evidence
    assert found.mend


def test_every_check_was_seen_green_and_otherwise() -> None:
    names = {check.name for check in CHECKS}
    assert {name for name, *_ in GREEN} == names
    warn_alone = {"draft-context", "break-even"}
    assert {name for name, *_ in RED} == names - warn_alone
    assert warn_alone <= {name for name, *_ in YELLOW}


def test_what_does_not_apply_says_why() -> None:
    for check in CHECKS:
        found = examined(check.name, recorded("cpu"))
        assert found.verdict in ("green", "not applicable"), found
        assert found.evidence


def test_a_machine_of_eight_gpus_without_faults_has_no_red() -> None:
    verdicts = {check.name: examined(check.name, recorded("pcie8"), **EIGHT).verdict for check in CHECKS}
    assert set(verdicts.values()) <= {"green", "not applicable"}, verdicts
    assert verdicts["gpu-peers"] == "green"


def test_a_container_that_cannot_tell_whose_memory_it_is_warns_alone() -> None:
    """There a server of ours, or the job beside this one, looks like memory that nobody holds."""
    inside = {"host": {"sees_all": False}}
    gpu = recorded("h200").gpus[0].model_copy(update={"used": 72 * GIB}).model_dump()
    unseen = examined("gpu-unseen", recorded("h200", gpus=[gpu], **inside))
    assert (unseen.verdict, "the driver does not say here" in unseen.evidence) == ("yellow", True)
    holder = {"pid": 7, "bytes": 72 * GIB, "state": "hidden"}
    held = recorded("h200", gpus=[{**gpu, "holders": [holder]}], **inside)
    assert examined("gpu-held", held).verdict == "yellow"
    seen = recorded("h200", gpus=[{**gpu, "holders": [{**holder, "state": "running"}]}], **inside)
    assert examined("gpu-held", seen).verdict == "red", "a process that is seen here is no riddle"


def test_gpus_of_another_job_are_none_of_our_business() -> None:
    assert examined("gpu-held", recorded("zombie", visible=[5, 0])).verdict == "green"
    assert examined("gpu-held", recorded("zombie"), engine={"device": "cpu"}, server={"device": "cpu"}).verdict == (
        "not applicable"
    )
