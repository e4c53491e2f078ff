"""The closed list of checks, in the order of the page."""

from __future__ import annotations

from eyrie.doctor.checks import drafters, gpus, host, serving
from eyrie.doctor.finding import Check

CHECKS = (
    Check("gpu-held", "GPU memory held by processes that Eyrie did not start", True, gpus.gpu_held),
    Check("gpu-unseen", "GPU memory that no listed process holds", True, gpus.gpu_unseen),
    Check("gpu-health", "driver, ECC errors, held-down clocks, enough GPUs", True, gpus.gpu_health),
    Check("gpu-peers", "topology, IOMMU, /dev/shm, an all-reduce", True, gpus.gpu_peers),
    Check("nccl-settings", "NCCL variables of the shell and of `server.preset`", True, gpus.nccl_settings),
    Check("attention-backend", "attention kernels against the compute capability", True, serving.attention_backend),
    Check("fp8-cache", "`server.kv_cache`", True, serving.fp8_cache),
    Check("memory-headroom", "`server.memory_fraction` against free memory", True, serving.memory_headroom),
    Check("pool-size", "offered key-value tokens against `server.pool_tokens`", False, serving.pool_size),
    Check("host-cache", "`server.host_cache_gb` against host memory", True, serving.host_cache),
    Check("build-memory", "compilers at once against host memory and swap", True, serving.build_memory),
    Check("draft-algorithm", "architecture of the exported drafter, served acceptance", False,
          drafters.draft_algorithm),
    Check("draft-weights", "names, shapes, dtypes and values of exported tensors", False, drafters.draft_weights),
    Check("draft-vocabulary", "the exported token map, its coverage", False, drafters.draft_vocabulary),
    Check("draft-context", "positions of the drafter against those served", False, drafters.draft_context),
    Check("break-even", "the benchmark's verdict", False, drafters.break_even),
    Check("acceptance-gap", "acceptance in training, in the benchmark, on the server", False,
          drafters.acceptance_gap),
    Check("tokenizer", "the self-test in the target card", True, host.tokenizer),
    Check("disk", "free space against hidden states and training, kind of file system", True, host.disk),
    Check("answerers", "keys in the environment, ports of `engine.urls`", True, host.answerers),
    Check("workflow-state", "Snakemake's version, half-made outputs, lock", False, host.workflow_state),
    Check("host-limits", "open files, the clock", True, host.host_limits),
)  # fmt: skip
