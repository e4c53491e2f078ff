"""All token shards -> an index of rows with their splits, and the draft vocabulary.

Nothing is copied: the index names rows by shard and position, so one shard made again leaves all others in place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyrie.config import Merge
from eyrie.errors import EyrieError
from eyrie.formats.manifest import RowCounts, sha256_of, verified_manifest
from eyrie.formats.publish import publish
from eyrie.merge.decontamination import Suites, decontaminate
from eyrie.merge.index import write_index
from eyrie.merge.rows import KEPT, SPLITS, Rows, read_rows
from eyrie.merge.summary import summarise
from eyrie.merge.vocabulary import Vocabulary, choose, keep, token_counts, write_vocabulary
from eyrie.targets.card import read_card

log = logging.getLogger(__name__)


def merge(recipe: dict[str, Any], *, target: Path, tokens: Sequence[Path], out: Path) -> None:
    """Publish ``index.parquet``, ``vocab.safetensors`` and ``summary.json`` in folder ``out``.

    What should be looked at before training is logged, one line each, and stands in ``summary.json``.

    Args:
        recipe: ``merge`` options, ``datasets`` as [[name, weight], ...] in config order, ``caps`` in completion tokens
            by dataset, external ``suites``.
        target: the run's target card.
        tokens: all token shards, ``.../<dataset>/<shard>.parquet``, verified against their manifests.
        out: folder of the three files.

    Raises:
        EyrieError: a shard of another target, a dataset without rows, a cap that holds no conversation, no row left to
            train on, or a draft vocabulary that does not fit the target.
    """
    import numpy as np

    card = read_card(target)
    options = Merge.model_validate(recipe["merge"])
    weights: dict[str, float] = dict(recipe["datasets"])
    identity = card.identity()
    inputs = {
        f"{path.parent.name}/{path.name}": verified_manifest(path, stage="tokenize", identity=identity).sha256
        for path in tokens
    }
    vocabulary = None
    if options.draft_vocab_file:
        file = Path(options.draft_vocab_file)
        vocabulary = keep(file, card)
        inputs["draft_vocab_from"] = sha256_of(file)
    rows = read_rows(tokens, list(weights), recipe["caps"], options)
    suites = Suites(recipe["suites"], options.decontamination_ngram)
    templates = decontaminate(rows, suites, options.decontamination_ngram)
    train = SPLITS.index("train")
    if not ((rows.reason == KEPT) & (rows.split == train)).any():
        raise EyrieError(
            f"{out}: no row is left to train on out of {len(rows)}; raise the token budgets, "
            "or lower merge.validation_fraction and merge.test_fraction"
        )
    counts = token_counts(rows, card.vocab_size)
    if vocabulary is None:
        frequency = np.sum([mine[train] for mine in counts.values()], axis=0)
        vocabulary = choose(frequency, options.draft_vocab_size, card)
    summary = summarise(rows, counts, vocabulary, weights, templates)
    for warning in summary["warnings"]:
        log.warning("warning: %s", warning)
    common: dict[str, Any] = {"stage": "merge", "recipe": recipe, "inputs": inputs, "identity": identity}
    _publish(out, rows, weights, vocabulary, summary, card.vocab_size, common)


def _publish(
    out: Path,
    rows: Rows,
    weights: dict[str, float],
    vocabulary: Vocabulary,
    summary: dict[str, Any],
    vocab_size: int,
    common: dict[str, Any],
) -> None:
    """The three files; ``common`` is what their manifests share."""
    tally = RowCounts(read=summary["rows"]["read"], kept=summary["rows"]["kept"], dropped=summary["left_out"])
    completion = {f"completion_{split}": summary["splits"][split]["completion_tokens"] for split in SPLITS}
    with publish(out / "index.parquet", **common) as draft:
        write_index(draft.path, rows, weights)
        draft.rows, draft.tokens = tally, completion
    with publish(out / "vocab.safetensors", **common) as draft:
        write_vocabulary(draft.path, vocabulary, vocab_size)
        draft.rows, draft.tokens = tally, completion
        draft.facts = {"draft_vocab_size": len(vocabulary.ids), "coverage": summary["draft_vocabulary"]["coverage"]}
    with publish(out / "summary.json", **common) as draft:
        draft.path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.rows, draft.tokens = tally, completion
