"""The train stage: from the merged index and the hidden shards to a published drafter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyrie.config import Drafter
from eyrie.drafters import save_drafter
from eyrie.drafters.eagle3 import Eagle3, Eagle3Config, start_at_random, start_from_target
from eyrie.errors import EyrieError
from eyrie.formats.hidden import HiddenShard
from eyrie.formats.manifest import Manifest, RowCounts, verified_manifest
from eyrie.formats.publish import atomic, publish
from eyrie.machine import choose_device, choose_dtype, name_of, use_threads
from eyrie.recipes import canonical_json
from eyrie.stopwatch import Stopwatch
from eyrie.targets.card import TargetCard, read_card, resolve
from eyrie.targets.ends import TargetEnds, read_ends
from eyrie.train.data import Row
from eyrie.train.loop import Trainer
from eyrie.train.loss import Teacher
from eyrie.train.warmstart import fit_features


def train(
    recipe: dict[str, Any], *, merged: Path, tokens: Sequence[Path], hidden: Sequence[Path], target: Path, model: str,
    out: Path, checkpoints: Path, checkpoint_every: int, device: str, threads: int,
) -> None:  # fmt: skip
    """Train one drafter and publish ``model.safetensors``, ``config.json`` and ``metrics.parquet`` in ``out``.

    A killed training continues from its last checkpoint in ``checkpoints`` and gives the same drafter; a checkpoint of
    another recipe or other inputs is ignored.

    Raises:
        EyrieError: an input was made for another target, other layers or other token rows, or training diverged.
    """
    use_threads(threads)
    stopwatch = Stopwatch()
    options = Drafter.model_validate({**recipe["drafter"], "checkpoint_every": checkpoint_every})
    card = read_card(target)
    manifests = {
        "index.parquet": verified_manifest(merged / "index.parquet", stage="merge", identity=card.identity()),
        "vocab.safetensors": verified_manifest(merged / "vocab.safetensors", stage="merge", identity=card.identity()),
    }
    splits, layers = read_rows(merged / "index.parquet", tokens, hidden, card, manifests, options.prompt_weight)
    if not splits["train"] or not splits["validation"]:
        raise EyrieError(
            f"{merged / 'index.parquet'}: {len(splits['train'])} training and {len(splits['validation'])} validation; "
            "raise the token budgets or the fractions in merge"
        )
    ends = read_ends(resolve(model, card.revision), card.num_layers)
    drafter = new_drafter(card, ends, merged / "vocab.safetensors", layers, options)
    fitted = fit_features(drafter, splits["train"]) if options.init == "target" else 0.0
    ids = drafter.target_ids()
    place = torch.device(choose_device(device))
    compute = choose_dtype(options.dtype, place.type, many_rows=True)
    drafter.compute_in(compute)
    teacher = Teacher(ends.head_VH[ids].to(place, compute), ids.to(place), card.vocab_size)
    inputs = {name: manifest.sha256 for name, manifest in manifests.items()}
    mine = {"recipe": recipe, "inputs": inputs, "compute": str(compute)}
    trainer = Trainer(
        drafter.to(place), ends.embed_VH.float().to(place), teacher,
        splits["train"], splits["validation"], options, checkpoints,
        identity=hashlib.sha256(canonical_json(mine).encode()).hexdigest(),
    )  # fmt: skip
    metrics = trainer.run()
    with atomic(out / "metrics.parquet") as part:
        pl.DataFrame(metrics, schema=metrics_schema(options.ttt_steps)).write_parquet(part, compression="zstd")
    staged = out / ".staged"
    save_drafter(drafter, staged)
    (staged / "config.json").replace(out / "config.json")
    used = sum(len(rows) for rows in splits.values())
    with publish(
        out / "model.safetensors", stage="train", recipe=recipe, inputs=inputs, identity=card.identity()
    ) as draft:
        (staged / "model.safetensors").replace(draft.path)
        draft.rows = RowCounts(read=used, kept=used)
        draft.tokens = {"seen": trainer.state.tokens_seen, "train": sum(row.labels for row in splits["train"])}
        draft.facts = {
            "steps": trainer.total_steps,
            "compute_dtype": name_of(compute),
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "fitted_variance": round(fitted, 4),
            "simulated_acceptance_length": round(trainer.state.best, 4),
        }
        draft.stats = {**stopwatch.figures(), "threads": threads}
    staged.rmdir()


def read_rows(
    index: Path, tokens: Sequence[Path], hidden: Sequence[Path], card: TargetCard, manifests: dict[str, Manifest],
    prompt_weight: float,
) -> tuple[dict[str, list[Row]], tuple[int, int, int]]:  # fmt: skip
    """Rows by split, hidden states memory-mapped; every shard's manifest is checked and added to ``manifests``.

    Only rows that train weigh their prompts: a validation is about answers.
    """
    table = pl.read_parquet(index)
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    layers: tuple[int, ...] = ()
    for token_file, hidden_file in zip(tokens, hidden, strict=True):
        dataset, shard = token_file.parent.name, token_file.stem
        mine = table.filter((pl.col("dataset") == dataset) & (pl.col("shard") == shard))
        manifest = verified_manifest(token_file, stage="tokenize", identity=card.identity())
        manifests[f"{dataset}/{token_file.name}"] = manifest
        manifests[f"{dataset}/{hidden_file.name}"] = verified_manifest(
            hidden_file, stage="hidden", identity={"target": card.target}
        )
        states = HiddenShard.open(hidden_file, target_sha=card.target, tokens_sha=manifest.sha256)
        if layers and states.layers != layers:
            raise EyrieError(
                f"{hidden_file}: holds layers {states.layers}, the shards before it {layers}; "
                f"capture it again with `snakemake -f {hidden_file}`"
            )
        if prompt_weight and not states.whole:
            raise EyrieError(
                f"{hidden_file}: keeps no final states of prompts, which prompt_weight asks for; set "
                f"hidden.final_states: all and capture it again with `snakemake -f {hidden_file}`"
            )
        layers = states.layers
        rows = pl.read_parquet(token_file, columns=["input_ids", "spans", "finish_reason"])
        for entry in mine.iter_rows(named=True):
            ids, spans, reason = rows.row(entry["row"])
            aux_TA, final_FH = states.row(entry["row"])
            splits[entry["split"]].append(
                Row(
                    ids_T=torch.tensor(ids),
                    spans=tuple((span["start"], span["end"]) for span in spans),
                    aux_TA=aux_TA,
                    final_FH=final_FH,
                    weight=entry["weight"],
                    answered=reason != "native",
                    whole=states.whole,
                    prompt_weight=prompt_weight if entry["split"] == "train" else 0.0,
                )
            )
    low, middle, high = layers
    return {name: [row for row in rows if row.labels] for name, rows in splits.items()}, (low, middle, high)


def new_drafter(
    card: TargetCard, ends: TargetEnds, vocabulary: Path, layers: tuple[int, int, int], options: Drafter
) -> Eagle3:
    """A drafter shaped after one layer of the target, over the draft vocabulary that the merge chose."""
    vocab: dict[str, Tensor] = load_file(vocabulary)
    config = Eagle3Config(
        hidden_size=card.hidden_size,
        intermediate_size=card.intermediate_size,
        num_attention_heads=card.num_attention_heads,
        num_key_value_heads=card.num_key_value_heads,
        head_dim=card.head_dim,
        rms_norm_eps=card.rms_norm_eps,
        rope_theta=card.rope_theta,
        max_position_embeddings=card.max_position_embeddings,
        vocab_size=card.vocab_size,
        draft_vocab_size=len(vocab["d2t"]),
        layers=layers,
        ttt_steps=options.ttt_steps,
        target_sha=card.target,
    )
    drafter = Eagle3(config)
    drafter.d2t.copy_(vocab["d2t"])
    drafter.t2d.copy_(vocab["t2d"])
    generator = torch.Generator().manual_seed(options.seed)
    if options.init == "target":
        start_from_target(drafter, ends, generator)
    else:
        start_at_random(drafter, generator)
    return drafter


def metrics_schema(steps: int) -> dict[str, Any]:
    """Columns of ``metrics.parquet``."""
    return {
        "step": pl.Int64, "split": pl.String, "tokens_seen": pl.Int64, "loss": pl.Float64,
        **{f"accuracy_{k}": pl.Float64 for k in range(steps)},
        "simulated_acceptance_length": pl.Float64, "learning_rate": pl.Float64,
    }  # fmt: skip
