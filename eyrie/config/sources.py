"""The target, and the datasets that it answers or that answer for it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from eyrie.config.section import COMMIT, Section, machine


class GgufSource(Section):
    """A GGUF file inside an installed Python package, converted once to the folder ``target.model`` names."""

    package: str = Field(description="import name of the package that ships the file")
    file: str = Field(description="file name of the GGUF inside the package")


class Target(Section):
    """The target model: the large model that is served and that the drafter imitates."""

    model: str = Field(description="local Hugging Face folder, or a hub id such as Qwen/Qwen3-8B")
    revision: str | None = Field(None, description="hub revision; pin it for a hub id")
    gguf: GgufSource | None = Field(None, description="convert this GGUF into `model` first")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="compute dtype; auto is bfloat16 where the machine multiplies it fast (CUDA, AMX; for capture "
        "AVX512-bf16 too), else float32",
    )
    thinking: bool | None = Field(
        None, description="ask the chat template for reasoning, or for none; default: what the template does by itself"
    )
    trust_remote_code: bool = Field(
        False, description="run model code shipped with the weights; a hub id then needs a commit as `revision`"
    )

    @model_validator(mode="after")
    def _trusts_one_commit(self) -> Target:
        on_hub = self.model.count("/") == 1 and not self.model.startswith((".", "~", "/")) and self.gguf is None
        pinned = COMMIT.fullmatch(self.revision or "")
        if self.trust_remote_code and on_hub and not pinned and not Path(self.model).is_dir():
            raise ValueError(
                f"trust_remote_code runs code of {self.model}: set target.revision to the commit that you have read "
                "(40 hex digits); a branch can change under you"
            )
        return self


class Sampling(Section):
    """How the target answers."""

    temperature: float = Field(0.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus mass")
    max_tokens: int = Field(256, ge=1, description="completion tokens per answer, reasoning included")
    seed: int = Field(0, ge=0, description="seed of the first answer; a forced regeneration moves it on")


class Gates(Section):
    """Shares of the answers of a shard above which the stage stops instead of publishing. Answers are kept."""

    truncated: float = machine(1.0, "answers cut by max_tokens", ge=0.0, le=1.0)
    refused: float = machine(
        0.1, "prompts without an answer: refused, filtered, or failed again and again", ge=0.0, le=1.0
    )
    drifted: float = machine(0.1, "answers whose text, encoded again, has another count of tokens", ge=0.0, le=1.0)
    unparsed: float = machine(0.1, "answers whose reasoning or tool calls the server did not parse", ge=0.0, le=1.0)


class Dataset(Section):
    """A named source of conversations."""

    adapter: str = Field(description="name of a registered adapter (eyrie/datasets)")
    kind: Literal["answered", "native"] = Field(
        "answered", description="answered: the target writes the responses; native: the data holds them"
    )
    path: str | None = Field(
        None, description="local file (.jsonl, .json, .parquet; .zst, .gz) or folder, in place of the hub"
    )
    repo: str | None = Field(None, description="hub dataset; default: the one that the adapter was written for")
    subset: str | None = Field(None, description="the hub dataset's configuration (the hub calls it subset)")
    split: str | None = Field(None, description="the hub dataset's split")
    revision: str | None = Field(
        None, description="commit of the hub dataset (40 hex digits); scripts/pin_datasets.py writes it"
    )
    files: str | None = Field(None, description="glob of the files to read inside the hub dataset")
    options: dict[str, str | int | float | bool] = Field({}, description="options of the adapter itself")
    token_budget: int = Field(ge=1, description="completion tokens this dataset may hold; prompt tokens never count")
    tokens_per_shard: int = Field(1_000_000, ge=1, description="completion tokens one shard may hold")
    prompts_per_shard: int = Field(4_000, ge=1, description="prompts one shard owns; enough to fill its tokens")
    max_prompt_chars: int = Field(20_000, ge=1, description="longer prompts are rejected as `prompt_too_long`")
    turns: int | None = Field(
        None,
        ge=1,
        description="answer turn by turn: so many user turns at most, each behind the target's own answers to the ones "
        "before; default: the last user turn alone, behind the answers that the data holds",
    )
    tools: Literal["require", "drop"] = Field(
        "require", description="drop: use a tool dataset's questions without its tool declarations"
    )
    weight: float = Field(1.0, gt=0.0, description="how often a row is drawn in training, relative to 1")
    token_cap: int | None = Field(
        None, ge=1, description="completion tokens that the merge may take of this dataset; default: all"
    )
    sampling: Sampling = Field(Sampling(), description="overrides of the run's sampling for this dataset")
    gates: Gates = machine(Gates(), "overrides of engine.gates for this dataset")

    @model_validator(mode="after")
    def _one_place(self) -> Dataset:
        named = [key for key in ("repo", "revision", "files") if getattr(self, key)]
        if self.path and named:
            raise ValueError(f"path and {named[0]} name two sources: remove one of them")
        return self

    @model_validator(mode="after")
    def _turns_are_answered(self) -> Dataset:
        if self.turns is not None and self.kind == "native":
            raise ValueError(
                "turns is for kind answered: a native dataset gives a row for each of its answers; take it out"
            )
        return self

    @property
    def shards(self) -> list[str]:
        """Names of the shards that hold the budget: ``s0000``, ``s0001``, ..."""
        return [f"s{k:04d}" for k in range(-(-self.token_budget // self.tokens_per_shard))]

    def shard_budget(self, shard: str) -> int:
        """Completion tokens that ``shard`` may hold: full shards first, the rest in the last."""
        return min(self.tokens_per_shard, self.token_budget - int(shard[1:]) * self.tokens_per_shard)
