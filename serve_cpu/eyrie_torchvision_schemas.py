"""Operator schemas that torchvision expects its own compiled library to bring.

SGLang imports torchvision whatever the model. The registry's torchvision is built for CUDA; beside a CPU build of torch
its library cannot be loaded, and ``import torchvision`` fails at the first operator it looks up. Two schemas without a
kernel are enough for the import. Calling one of them still fails, as it should: there is nothing to run.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCHEMAS = ("nms", "qnms")
_keep: list[object] = []


def define_missing() -> None:
    """Define the schemas unless torchvision is absent or its own library loads."""
    import torch

    found = importlib.util.find_spec("torchvision")
    if _keep or found is None or found.origin is None:
        return
    library = Path(found.origin).with_name("_C.so")
    try:
        torch.ops.load_library(str(library))
        return
    except OSError:
        pass
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    for name in SCHEMAS:
        fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep.append(fragment)  # dropping it would take the schemas back
