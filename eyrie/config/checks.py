"""The closed list of the doctor's checks, which ``doctor.allow`` is held against (:mod:`eyrie.doctor.checks`)."""

from __future__ import annotations

from typing import Literal

CheckName = Literal[
    "gpu-held",
    "gpu-unseen",
    "gpu-peers",
    "nccl-settings",
    "attention-backend",
    "fp8-cache",
    "memory-headroom",
    "pool-size",
    "host-cache",
    "build-memory",
    "draft-algorithm",
    "draft-weights",
    "draft-vocabulary",
    "draft-context",
    "break-even",
    "acceptance-gap",
    "tokenizer",
    "disk",
    "answerers",
    "workflow-state",
    "gpu-health",
    "host-limits",
]
