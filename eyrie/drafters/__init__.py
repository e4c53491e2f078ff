"""Drafters: one module per algorithm, and where the next one registers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from eyrie.errors import EyrieError

if TYPE_CHECKING:
    from eyrie.drafters.eagle3 import Eagle3, Eagle3Config


def save_drafter(drafter: Eagle3, folder: Path) -> None:
    """Write ``model.safetensors`` (matrices and norms bfloat16, ``d2t`` int64, ``t2d`` bool) and ``config.json``."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {n: t.bfloat16() if t.is_floating_point() else t for n, t in drafter.state_dict().items()}
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(drafter.config.model_dump_json(indent=1) + "\n")
    assert all(t.dtype in (torch.bfloat16, torch.int64, torch.bool) for t in state.values())


def load_drafter(folder: Path) -> tuple[Eagle3, Eagle3Config]:
    """Read what :func:`save_drafter` wrote; weights become float32.

    Raises:
        EyrieError: a file is missing, the config does not parse, or names and shapes do not match it exactly.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from eyrie.drafters.eagle3 import Eagle3, Eagle3Config

    weights = folder / "model.safetensors"
    for file in (folder / "config.json", weights):
        if not file.exists():
            raise EyrieError(f"{file}: missing; train the drafter again with `snakemake -f {file}`")
    try:
        config = Eagle3Config.model_validate(json.loads((folder / "config.json").read_text()))
    except ValueError as error:
        raise EyrieError(f"{folder}/config.json: not a drafter's config ({' '.join(str(error).split())})") from error
    try:
        state = load_file(weights)
    except SafetensorError as error:
        raise EyrieError(f"{weights}: unreadable ({error}); train the drafter again") from error
    drafter = Eagle3(config)
    try:
        drafter.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise EyrieError(f"{folder}/model.safetensors: {' '.join(str(error).split())}") from error
    return drafter, config
