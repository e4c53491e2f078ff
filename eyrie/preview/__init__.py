"""The preview: random rows of each dataset as the drafter will be trained on them, for a person to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyrie.config import load_config
from eyrie.formats.manifest import verified_manifest
from eyrie.formats.publish import write_text


def write_preview(
    recipe: dict[str, Any], *, config: Path, run_dir: Path, model: str, out: Path, rows: int, seed: int
) -> None:
    """Write one HTML page that needs nothing else; equal inputs and an equal seed give equal bytes.

    Args:
        recipe: the ``preview`` recipe (the target's section).
        config: ``config.resolved.yaml`` of the run.
        run_dir: ``results/<run>``, with token shards and the merged index.
        model: folder or hub id of the tokenizer.
        out: the page to write.
        rows: rows shown of each dataset.
        seed: which rows; the choice is by hash of the row's id, so it does not move when other rows come or go.

    Raises:
        EyrieError: the config is at fault, or a file is missing, malformed or made for another target.
    """
    from eyrie.preview.page import render_preview
    from eyrie.preview.rows import chosen_rows
    from eyrie.render.chat_template import load_tokenizer
    from eyrie.report.collect import collect_data
    from eyrie.targets.card import read_card, resolve

    checked = load_config(config)
    card = read_card(run_dir / "target.json")
    for name in ("index.parquet", "vocab.safetensors", "summary.json"):
        verified_manifest(run_dir / "merged" / name, stage="merge", identity=card.identity())
    trusted = recipe.get("target", {}).get("trust_remote_code", False)
    tokenizer = load_tokenizer(resolve(model, card.revision), trust_remote_code=trusted)
    chosen = chosen_rows(run_dir, tokenizer, card, rows, seed)
    datasets, merged = collect_data(checked, run_dir)
    write_text(out, render_preview(checked, datasets, merged, chosen, seed))
