"""The stages that make a drafter of answers, and measure it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from eyrie.config.checks import CheckName
from eyrie.config.section import Fraction, Section, machine, named


class Tokenize(Section):
    """Conversations to token rows."""

    max_length: int = Field(2048, ge=16, description="tokens per row, prompt included; longer rows are dropped")
    truncated: Literal["drop", "keep"] = Field(
        "drop", description="what to do with answers cut by max_tokens (finish_reason length)"
    )


class Merge(Section):
    """Which rows train, which are held out, and the draft vocabulary."""

    validation_fraction: Fraction = Field(0.04, description="share of the prompts that choose the best checkpoint")
    test_fraction: Fraction = Field(0.08, description="share of the prompts held out for the benchmark")
    draft_vocab_size: int = Field(32_000, ge=16, description="target tokens that the drafter can propose")
    draft_vocab_from: str | None = Field(
        None,
        description="keep the draft vocabulary of this drafter (folder or safetensors file) instead of counting one",
    )
    decontamination_ngram: int = Field(
        13, ge=1, description="words; a row sharing an n-gram this long with a benchmark prompt is left out"
    )

    @model_validator(mode="after")
    def _some_rows_train(self) -> Merge:
        if self.validation_fraction + self.test_fraction >= 1.0:
            raise ValueError("validation_fraction + test_fraction must stay under 1: no conversation would train")
        return self

    @model_validator(mode="after")
    def _one_vocabulary(self) -> Merge:
        if self.draft_vocab_from and "draft_vocab_size" in self.model_fields_set:
            raise ValueError("draft_vocab_from brings its own size: give it or draft_vocab_size, not both")
        return self

    @property
    def draft_vocab_file(self) -> str | None:
        """The safetensors file that ``draft_vocab_from`` means; a drafter's folder stands for its weights."""
        source = self.draft_vocab_from
        return source if source is None or source.endswith(".safetensors") else f"{source}/model.safetensors"


class Hidden(Section):
    """Auxiliary hidden states."""

    layers: tuple[int, int, int] | None = Field(
        None, description="boundary ids (residual entering layer k); default [2, N//2, N-3]"
    )
    storage_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="dtype on disk")
    final_states: Literal["answers", "all"] = Field(
        "answers",
        description="final states kept: before answer tokens, or everywhere (for prompt_weight)",
    )
    batch_tokens: int = machine(4096, "tokens per capture batch", ge=16)


class Drafter(Section):
    """One named training of a drafter; several can share all that stands above them."""

    algorithm: Literal["eagle3"] = Field("eagle3", description="registered drafter algorithm")
    ttt_steps: int = Field(3, ge=1, le=16, description="training-time-test steps: how deep drafting is rehearsed")
    ttt_decay: float = Field(0.8, gt=0.0, le=1.0, description="loss weight of step k is ttt_decay**k")
    prompt_weight: float = Field(
        0.0,
        ge=0.0,
        description="loss weight of prompt positions beside answers' 1; soft labels alone",
    )
    epochs: float = Field(1.0, gt=0.0, description="passes over the training rows")
    batch_tokens: int = Field(2048, ge=16, description="tokens per optimiser step")
    learning_rate: float = Field(1e-3, gt=0.0, description="AdamW: norms and the head")
    muon_learning_rate: float = Field(2e-2, ge=0.0, description="Muon: matrices; 0 trains them with AdamW")
    warmup_fraction: Fraction = Field(0.05, description="share of the steps with a rising rate")
    max_grad_norm: float = Field(1.0, gt=0.0, description="global gradient norm is clipped here")
    init: Literal["target", "random"] = Field(
        "target", description="target: start from the target's last layer and head rows; random: from scratch"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of the matrix products; weights and optimiser stay float32, the export is bfloat16; auto is "
        "bfloat16 where the machine multiplies it fast (CUDA, AMX, AVX512-bf16), else float32",
    )
    seed: int = Field(0, ge=0, description="row order and random initialisation")
    evaluate_every: int = Field(200, ge=1, description="optimiser steps between two validations")
    checkpoint_every: int = machine(100, "optimiser steps between two resumable checkpoints", ge=1)


class Suite(Section):
    """A benchmark suite: where its prompts come from and how it is driven."""

    dataset: str | None = Field(
        None, description="adapter of an external suite (decontaminated); default: the run's own test split"
    )
    options: dict[str, str | int | float | bool] = Field({}, description="options of that adapter")
    prompts_per_dataset: int = Field(8, ge=1, description="prompts taken from each dataset, by hash order")
    max_tokens: int = Field(128, ge=2, description="completion tokens per prompt")
    draft_tokens: int = Field(3, ge=1, le=16, description="K: tokens drafted per verify, a chain")
    ngram_size: int = Field(3, ge=1, description="longest n-gram that prompt lookup matches")
    timed_prompts: int = Field(12, ge=1, description="prompts that are also timed (spread over the datasets)")
    repeats: int = Field(3, ge=1, description="interleaved timings per prompt")


class Bench(Section):
    """How exported drafters are measured."""

    suites: dict[str, Suite] = Field({"held-out": Suite()}, description="benchmark suites by name")

    @field_validator("suites")
    @classmethod
    def _names(cls, value: dict[str, Any]) -> dict[str, Any]:
        return named(value)


class Doctor(Section):
    """What the checks of the machine may be overruled in."""

    allow: tuple[CheckName, ...] = machine((), "checks whose red verdict is known and accepted")
