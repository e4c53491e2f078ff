"""The export stage: write a drafter in an engine's layout, read it back as the engine would, then publish it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from eyrie.errors import EyrieError
from eyrie.export.base import Layout
from eyrie.formats.manifest import RowCounts, sha256_of, verified_manifest
from eyrie.formats.publish import publish
from eyrie.targets.card import read_card


def export(recipe: dict[str, Any], *, drafter: Path, target: Path, out: Path) -> None:
    """Publish ``model.safetensors`` and ``config.json`` in ``out``, whose name is the engine's (``.../sglang``).

    Args:
        recipe: the stage's revision.
        drafter: folder of a trained drafter, verified against its manifest.
        target: the run's target card.
        out: folder to write.

    Raises:
        EyrieError: the drafter was trained for another target, its layers cannot be expressed for this engine, or
            what was written fails a gate; nothing is published then.
    """
    from safetensors.torch import save_file

    from eyrie.drafters import load_drafter
    from eyrie.export.base import check_same_drafter

    layout = layout_of(out.name)
    card = read_card(target)
    manifest = verified_manifest(drafter / "model.safetensors", stage="train", identity=card.identity())
    trained, config = load_drafter(drafter)
    if config.target_sha != card.target:
        raise EyrieError(f"{drafter / 'config.json'}: names another target than {target}; train the drafter again")
    tensors = layout.to_tensors(trained)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as made:
        folder = Path(made)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(layout.to_config(trained, card), indent=2) + "\n")
        check_same_drafter(trained, layout.read_back(folder), out)
        config_sha = sha256_of(folder / "config.json")
        (folder / "config.json").replace(out / "config.json")
        inputs = {f"{drafter.name}/model.safetensors": manifest.sha256}
        with publish(
            out / "model.safetensors", stage="export", recipe=recipe, inputs=inputs, identity=card.identity()
        ) as draft:
            (folder / "model.safetensors").replace(draft.path)
            draft.rows = RowCounts(read=len(trained.state_dict()), kept=len(tensors))
            draft.facts = {
                "engine": out.name,
                "layers": list(config.layers),
                "config_sha256": config_sha,
                "parameters": sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
            }


def layout_of(engine: str) -> Layout:
    """The layout of an engine by name. Raises :class:`EyrieError` for one that is not known."""
    from eyrie.export import sglang

    layouts: dict[str, Layout] = {"sglang": sglang}
    if engine not in layouts:
        raise EyrieError(f"export: no layout for engine {engine!r}; known are {', '.join(sorted(layouts))}")
    return layouts[engine]
