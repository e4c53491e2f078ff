"""The training loop: steps, validations, resumable checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie.config import Drafter
from eyrie.drafters.eagle3 import Eagle3
from eyrie.errors import EyrieError
from eyrie.formats.publish import atomic, write_json
from eyrie.llama.weights import rotary
from eyrie.progress import Progress
from eyrie.train.data import Row, collate, plan_epoch
from eyrie.train.loss import StepSums, Teacher, ttt_loss, whole_tiles
from eyrie.train.optim import DrafterOptimizer


@dataclass
class State:
    """All that a resumed run needs beside the tensors."""

    step: int = 0
    tokens_seen: int = 0
    best: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Trainer:
    """Trains ``drafter`` in place; :meth:`run` returns the metrics and leaves the best weights in the drafter.

    Attributes:
        embed_VH: the target's embeddings, float32, frozen; training runs on their device.
        identity: what a checkpoint must agree on to be resumed (recipe, inputs).
    """

    drafter: Eagle3
    embed_VH: Tensor
    teacher: Teacher
    train_rows: Sequence[Row]
    validation_rows: Sequence[Row]
    options: Drafter
    checkpoints: Path | None = None
    identity: str = ""

    def __post_init__(self) -> None:
        self.lengths = [len(row.ids_T) for row in self.train_rows]
        per_epoch = len(self._epoch(0))
        self.total_steps = max(1, round(self.options.epochs * per_epoch))
        longest = max(len(row.ids_T) for row in [*self.train_rows, *self.validation_rows])
        config = self.drafter.config
        self.optimizer = DrafterOptimizer(
            self.drafter, self.options, self.total_steps, config.head_dim, self.drafter.compute
        )
        tables = rotary(whole_tiles(longest) + self.options.ttt_steps, config.head_dim, config.rope_theta)
        self.cos_TD, self.sin_TD = (table.to(self.embed_VH.device) for table in tables)
        self.best_weights = self._weights()
        self.state = State()

    def run(self) -> list[dict[str, Any]]:
        """Train to the end, from the last checkpoint if there is one."""
        self._resume()
        with Progress("train", self.total_steps, "steps", done=self.state.step) as progress:
            for step, batch in self._remaining():
                loss = self._step(step, batch)
                progress.advance(1, loss=f"{loss:.3f}", best=f"{self.state.best:.3f}")
                last = self.state.step == self.total_steps
                if last or self.state.step % self.options.evaluate_every == 0:
                    self._validate()
                if not last and self.state.step % self.options.checkpoint_every == 0:
                    self._save()
        self.drafter.load_state_dict(self.best_weights, strict=False)
        return self.state.metrics

    def _epoch(self, epoch: int) -> list[list[int]]:
        return plan_epoch(self.lengths, self.options.batch_tokens, self.options.seed, epoch)

    def _remaining(self) -> Any:
        """``(step, row numbers)`` of every step still to do."""
        step, epoch = 0, 0
        while step < self.total_steps:
            for batch in self._epoch(epoch):
                if step >= self.total_steps:
                    return
                if step >= self.state.step:
                    yield step, batch
                step += 1
            epoch += 1

    def _loss(self, rows: Sequence[Row]) -> tuple[Tensor, list[StepSums]]:
        device = self.embed_VH.device
        batch = collate(rows).to(device)
        # what the loss makes on its way is made where the drafter is; on the CPU that is the default
        with device if device.type != "cpu" else nullcontext():
            return ttt_loss(
                self.drafter, batch, self.embed_VH, self.teacher, self.cos_TD, self.sin_TD,
                self.options.ttt_steps, self.options.ttt_decay,
            )  # fmt: skip

    def _step(self, step: int, batch: list[int]) -> float:
        rows = [self.train_rows[i] for i in batch]
        loss, sums = self._loss(rows)
        loss.backward()
        norm = self.optimizer.step(step)
        if not torch.isfinite(loss) or norm != norm:
            raise EyrieError(
                f"step {step}: loss {float(loss.detach())}, gradient norm {norm}: training diverged; "
                "lower the drafter's learning_rate and muon_learning_rate"
            )
        self.state.step = step + 1
        self.state.tokens_seen += sum(row.labels for row in rows)
        self._log("train", sums, float(loss.detach()), self.optimizer.rate(step) * self.options.learning_rate)
        return float(loss.detach())

    @torch.no_grad()
    def _validate(self) -> None:
        totals = [StepSums() for _ in range(self.options.ttt_steps)]
        for batch in _validation_batches(self.validation_rows, self.options.batch_tokens):
            _, sums = self._loss([self.validation_rows[i] for i in batch])
            for total, part in zip(totals, sums, strict=False):
                total.add(part)
        loss = sum(self.options.ttt_decay**k * s.loss / max(s.weight, 1e-6) for k, s in enumerate(totals))
        self._log("validation", totals, loss, None)
        length = simulated_acceptance_length(totals)
        if length > self.state.best:
            self.state.best = length
            self.best_weights = self._weights()

    def _log(self, split: str, sums: list[StepSums], loss: float, rate: float | None) -> None:
        record: dict[str, Any] = {
            "step": self.state.step, "split": split, "tokens_seen": self.state.tokens_seen, "loss": loss,
        }  # fmt: skip
        for k in range(self.options.ttt_steps):
            record[f"accuracy_{k}"] = sums[k].correct / sums[k].labels if k < len(sums) and sums[k].labels else None
        record["simulated_acceptance_length"] = simulated_acceptance_length(sums) if split == "validation" else None
        record["learning_rate"] = rate
        self.state.metrics.append(record)

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.drafter.named_parameters()}

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        tensors = {f"weights.{name}": t for name, t in self._weights().items()}
        tensors |= {f"best.{name}": t for name, t in self.best_weights.items()}
        tensors |= {f"optimizer.{name}": t for name, t in self.optimizer.state().items()}
        file = self.checkpoints / f"step-{self.state.step:08d}.safetensors"
        with atomic(file) as part:
            save_file(tensors, part)
        # the JSON names the tensors that belong to it, so a kill between the two leaves the older pair in force
        write_json(self.checkpoints / "latest.json", {"identity": self.identity, "file": file.name, **vars(self.state)})
        for old in self.checkpoints.glob("step-*.safetensors"):
            if old != file:
                old.unlink()

    def _resume(self) -> None:
        """Continue from the checkpoint, unless it belongs to other data or another recipe."""
        latest = self.checkpoints / "latest.json" if self.checkpoints else None
        if latest is None or not latest.exists():
            return
        record = json.loads(latest.read_text())
        file = latest.with_name(record.pop("file"))
        if record.pop("identity") != self.identity or not file.exists():
            return
        tensors = load_file(file)
        self.drafter.load_state_dict(_section(tensors, "weights."), strict=False)
        self.best_weights = _section(tensors, "best.")
        self.optimizer.restore(_section(tensors, "optimizer."))
        self.state = State(**record)


def _section(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _validation_batches(rows: Sequence[Row], batch_tokens: int) -> list[list[int]]:
    return plan_epoch([len(row.ids_T) for row in rows], batch_tokens, 0, 0)


def simulated_acceptance_length(sums: Sequence[StepSums]) -> float:
    """``1 + sum_k P(steps 0..k all right)``: what a chain of as many drafts would gain, teacher forced.

    The share is taken over all labels of the step, those outside the draft vocabulary counting as wrong.
    """
    return 1.0 + sum(s.run / s.labels for s in sums if s.labels)
