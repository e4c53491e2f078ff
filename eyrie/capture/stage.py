"""The hidden stage: states of every row of one token shard, checked twice before they are published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.capture.base import Capturer, plan_batches
from eyrie.config import Hidden, Target
from eyrie.errors import EyrieError
from eyrie.formats.hidden import HiddenLayout, HiddenShard, HiddenWriter
from eyrie.formats.manifest import RowCounts, verified_manifest
from eyrie.formats.publish import publish
from eyrie.formats.tokens import read_tokens
from eyrie.machine import choose_device, choose_dtype, name_of, use_threads
from eyrie.progress import Progress
from eyrie.stopwatch import Stopwatch
from eyrie.targets.card import TargetCard, default_layers, read_card, read_config, resolve

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE_ROWS = 3
SAMPLE_LABELS = 512
LEAST_AGREEMENT = 0.9
TOLERANCE = {"float32": 0.02, "bfloat16": 0.25}
"""Largest relative error of a token's state, by the less exact of compute and storage dtype's arithmetic: bfloat16
storage alone costs 0.004, bfloat16 arithmetic over many layers about 0.05; a neighbouring layer differs by far more."""


@dataclass(frozen=True)
class TokenRows:
    """What capture needs of a token shard. ``spans`` are half-open ranges of label positions, per row."""

    row_ids: list[str]
    ids: list[list[int]]
    spans: list[list[tuple[int, int]]]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    @property
    def labels(self) -> list[int]:
        """Supervised labels of each row."""
        return [sum(end - start for start, end in spans) for spans in self.spans]

    def label_ids(self, row: int) -> list[int]:
        """Token ids of the row's labels."""
        return [self.ids[row][place] for place in self.label_positions(row)]

    def label_positions(self, row: int) -> list[int]:
        """Positions of the row's labels."""
        return [place for start, end in self.spans[row] for place in range(start, end)]

    def final_positions(self, row: int, whole: bool) -> list[int]:
        """Positions whose final states are kept: before each label, or before each token but the first."""
        if whole:
            return list(range(len(self.ids[row]) - 1))
        return [place - 1 for place in self.label_positions(row)]


def capture(
    recipe: dict[str, Any], *, tokens: Path, target: Path, model: str, out: Path, batch_tokens: int, device: str,
    threads: int,
) -> None:  # fmt: skip
    """Publish the hidden shard of one token shard.

    Args:
        recipe: ``hidden`` (layers, storage dtype, which final states) and ``target`` (revision, dtype,
            trust_remote_code).
        tokens: token shard, verified against its manifest.
        target: the run's target card.
        model: folder or hub id of the target.
        out: where the hidden shard goes.
        batch_tokens: tokens computed together, padding included.
        device: torch device, or ``auto``.
        threads: CPU threads.

    Raises:
        EyrieError: the token shard belongs to another target or stage, a state is not finite, or the captured states
            fail a check; nothing is published then.
    """
    card = read_card(target)
    manifest = verified_manifest(tokens, stage="tokenize", identity=card.identity())
    rows = read_rows(tokens)
    if len(rows.ids) != manifest.rows.kept:
        raise EyrieError(
            f"{tokens}: holds {len(rows.ids)} rows, its manifest says {manifest.rows.kept}; "
            f"rebuild it with `snakemake -f {tokens}`"
        )
    options, chosen = Hidden.model_validate(recipe["hidden"]), Target.model_validate(recipe["target"])
    whole = options.final_states == "all"
    layout = HiddenLayout(
        lengths=rows.lengths, finals=[length - 1 for length in rows.lengths] if whole else rows.labels,
        hidden_size=card.hidden_size, layers=boundary_ids(options, card), dtype=options.storage_dtype,
        target_sha=card.target, tokens_sha=manifest.sha256, whole=whole,
    )  # fmt: skip
    use_threads(threads)
    device = choose_device(device)
    compute = name_of(choose_dtype(chosen.dtype, device, many_rows=True))
    name = f"{tokens.parent.name}/{tokens.name}"
    identity = {**card.identity(), "layers": json.dumps(layout.layers)}
    with publish(out, stage="hidden", recipe=recipe, inputs={name: manifest.sha256}, identity=identity) as draft:
        capturer = open_target(chosen, model, card, layout, compute, device)
        with HiddenWriter(draft.path, layout) as writer:
            pace = run(capturer, rows, writer, batch_tokens, tokens)
        shard = HiddenShard.open(draft.path, target_sha=card.target, tokens_sha=manifest.sha256, layers=layout.layers)
        check_rows(shard, rows, capturer, TOLERANCE[compute], tokens)
        greedy = bool(manifest.facts.get("greedy"))
        draft.facts = {
            "layers": list(layout.layers),
            "storage_dtype": layout.dtype,
            "compute_dtype": compute,
            "greedy_agreement": check_answers(shard, rows, capturer, tokens) if greedy else None,
        }
        draft.rows = RowCounts(read=len(rows.ids), kept=len(shard))
        draft.tokens = {"total": shard.tokens, "supervised": sum(rows.labels)}
        draft.stats = {**pace, "threads": threads, "device": device, "batch_tokens": batch_tokens}


def boundary_ids(options: Hidden, card: TargetCard) -> tuple[int, int, int]:
    """The layers to capture. Raises :class:`EyrieError` when the config's are not ascending ids of this target."""
    layers = options.layers or default_layers(card.num_layers)
    if not 0 <= layers[0] < layers[1] < layers[2] < card.num_layers:
        raise EyrieError(
            f"hidden.layers: {list(layers)} must be three ascending ids from 0 to {card.num_layers - 1} "
            f"(the target has {card.num_layers} layers); mend the config"
        )
    return layers


def read_rows(tokens: Path) -> TokenRows:
    """Rows of a token shard, every span checked.

    Raises:
        EyrieError: naming the row whose spans are out of range, out of order, or start at its first token.
    """
    table = read_tokens(tokens, ["row_id", "input_ids", "spans"])
    spans = [[(span["start"], span["end"]) for span in row] for row in table["spans"].to_list()]
    rows = TokenRows(table["row_id"].to_list(), table["input_ids"].to_list(), spans)
    for row_id, ids, row_spans in zip(rows.row_ids, rows.ids, spans, strict=True):
        edges = [edge for span in row_spans for edge in span]
        if edges != sorted(edges) or not row_spans or edges[0] < 1 or edges[-1] > len(ids):
            raise EyrieError(
                f"{tokens}: row {row_id} of {len(ids)} tokens has the label spans {row_spans}, expected ascending "
                f"ranges within 1 to {len(ids)}; rebuild it with `snakemake -f {tokens}`"
            )
    return rows


def open_target(
    chosen: Target, model: str, card: TargetCard, layout: HiddenLayout, compute: str, device: str
) -> Capturer:
    """Load the target, after a cheap look that it is still the one of the card."""
    import torch

    from eyrie.capture.transformers import TransformersCapturer

    folder = resolve(model, chosen.revision)
    config = read_config(folder)
    for key, expected in (
        ("num_hidden_layers", card.num_layers), ("hidden_size", card.hidden_size), ("vocab_size", card.vocab_size)
    ):  # fmt: skip
        if config[key] != expected:
            raise EyrieError(
                f"{folder}: has {key} {config[key]}, the run's target card says {expected}; "
                "rebuild the card with `snakemake -R identify`"
            )
    return TransformersCapturer(
        folder, layout.layers, getattr(torch, layout.dtype), getattr(torch, compute), device,
        trust_remote_code=chosen.trust_remote_code,
    )  # fmt: skip


def run(capturer: Capturer, rows: TokenRows, writer: HiddenWriter, batch_tokens: int, tokens: Path) -> dict[str, float]:
    """Capture every row into ``writer``; returns times and rate.

    Raises:
        EyrieError: naming the row whose states are not finite.
    """
    lengths = rows.lengths
    batches = plan_batches(lengths, batch_tokens)
    stopwatch, total = Stopwatch(), sum(lengths)
    with Progress(f"capture {tokens.parent.name}/{tokens.stem}", total, "tokens") as progress:
        for batch in batches:
            for row, (aux_TA, final_TH) in zip(batch, capturer.states([rows.ids[r] for r in batch]), strict=True):
                if not (aux_TA.isfinite().all() and final_TH.isfinite().all()):
                    raise EyrieError(
                        f"{tokens}: the states of row {rows.row_ids[row]} are not finite; "
                        "compute in float32 (target.dtype: float32)"
                    )
                writer.write(row, aux_TA, final_TH[rows.final_positions(row, writer.layout.whole)])
                progress.advance(lengths[row])
    padded = sum(len(batch) * lengths[batch[0]] for batch in batches)
    return {
        **stopwatch.figures(),
        "tokens_per_cpu_second": round(total / max(stopwatch.cpu_seconds, 1e-3), 1),
        "padding": round(padded / total - 1, 4),
    }


def check_rows(shard: HiddenShard, rows: TokenRows, capturer: Capturer, tolerance: float, tokens: Path) -> None:
    """Compare a sample of the shard's rows with states that another path computes for the row alone.

    Raises:
        EyrieError: naming the row and the state that differ.
    """
    by_length = sorted(range(len(rows.ids)), key=lambda row: (len(rows.ids[row]), row))
    count = min(SAMPLE_ROWS, len(by_length))
    for row in (by_length[k * len(by_length) // count] for k in range(count)):
        aux_TA, final_FH = shard.row(row)
        other_TA, other_TH = capturer.alone(rows.ids[row])
        pairs = {
            f"layer {layer}": (have, want)
            for layer, have, want in zip(
                shard.layers, aux_TA.chunk(len(shard.layers), -1), other_TA.chunk(len(shard.layers), -1), strict=True
            )
        }
        pairs["the final state"] = (final_FH, other_TH[rows.final_positions(row, shard.whole)])
        for what, (have, want) in pairs.items():
            worst = relative_error(have, want)
            if not worst <= tolerance:
                raise EyrieError(
                    f"{tokens}: row {rows.row_ids[row]}: {what} differs by {worst:.3g} from the same row run alone "
                    f"(allowed {tolerance:g}); set target.dtype: float32, and report it if that does not help"
                )


def relative_error(have_NH: Tensor, want_NH: Tensor) -> float:
    """Largest of the tokens' ``|have - want| / |want|``; 0 for no tokens."""
    have_NH, want_NH = have_NH.float(), want_NH.float()
    error_N = (have_NH - want_NH).norm(dim=-1) / want_NH.norm(dim=-1).clamp(min=1e-6)
    return float(error_N.max()) if len(error_N) else 0.0


def check_answers(shard: HiddenShard, rows: TokenRows, capturer: Capturer, tokens: Path) -> float:
    """Share of a sample of labels that the head chooses again from the stored final states.

    Raises:
        EyrieError: fewer than :data:`LEAST_AGREEMENT` of them, so these answers are not this target's.
    """
    import torch

    labels = torch.tensor([token for row in range(len(rows.ids)) for token in rows.label_ids(row)])
    states = torch.tensor(
        [
            shard.final_offsets[row] + n
            for row in range(len(rows.ids))
            for n in ([place - 1 for place in rows.label_positions(row)] if shard.whole else range(rows.labels[row]))
        ]
    )
    places = spread(len(labels), SAMPLE_LABELS)
    agreement = (capturer.best_tokens(shard.final_MH[states[places]]) == labels[places]).double().mean().item()
    if agreement < LEAST_AGREEMENT:
        raise EyrieError(
            f"{tokens}: captured states do not reproduce the target's own greedy answers: {agreement:.0%} of "
            f"{len(places)} labels agree; another model or dtype made the answers, generate them again"
        )
    return round(agreement, 4)


def spread(count: int, most: int) -> Sequence[int]:
    """At most ``most`` of ``range(count)``, evenly spaced."""
    taken = min(count, most)
    return [k * count // taken for k in range(taken)]
