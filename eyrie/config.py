"""Every option of Eyrie: its type, default, unit and check.

This module is the only list of options. The JSON schema (``config/schema.json``) and ``docs/config.md`` are
generated from it. Fields marked ``machine=True`` say where or how fast work runs, never what it computes, and so
never enter a recipe (:mod:`eyrie.recipes`): changing one rebuilds nothing.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from eyrie.errors import EyrieError

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def machine(default: Any, description: str, **checks: Any) -> Any:
    """A field that says where or how work runs; it is left out of every recipe."""
    return Field(default, description=description, json_schema_extra={"machine": True}, **checks)


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable once checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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
        description="compute dtype; auto is bfloat16 where the machine multiplies it fast (CUDA, AMX), else float32",
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
    revision: str | None = Field(None, description="commit of the hub dataset; pin it, or a push changes your prompts")
    files: str | None = Field(None, description="glob of the files to read inside the hub dataset")
    options: dict[str, str | int | float | bool] = Field({}, description="options of the adapter itself")
    token_budget: int = Field(ge=1, description="completion tokens this dataset may hold; prompt tokens never count")
    tokens_per_shard: int = Field(1_000_000, ge=1, description="completion tokens one shard may hold")
    prompts_per_shard: int = Field(4_000, ge=1, description="prompts one shard owns; enough to fill its tokens")
    max_prompt_chars: int = Field(20_000, ge=1, description="longer prompts are rejected as `prompt_too_long`")
    tools: Literal["require", "drop"] = Field(
        "require", description="drop: use a tool dataset's questions without its tool declarations"
    )
    weight: float = Field(1.0, gt=0.0, description="how often a row is drawn in training, relative to 1")
    token_cap: int | None = Field(
        None, ge=1, description="completion tokens that the merge may take of this dataset; default: all"
    )
    sampling: Sampling = Field(Sampling(), description="overrides of the run's sampling for this dataset")

    @model_validator(mode="after")
    def _one_place(self) -> Dataset:
        named = [key for key in ("repo", "revision", "files") if getattr(self, key)]
        if self.path and named:
            raise ValueError(f"path and {named[0]} name two sources: remove one of them")
        return self

    @property
    def shards(self) -> list[str]:
        """Names of the shards that hold the budget: ``s0000``, ``s0001``, ..."""
        return [f"s{k:04d}" for k in range(-(-self.token_budget // self.tokens_per_shard))]

    def shard_budget(self, shard: str) -> int:
        """Completion tokens that ``shard`` may hold: full shards first, the rest in the last."""
        return min(self.tokens_per_shard, self.token_budget - int(shard[1:]) * self.tokens_per_shard)


class OpenRouter(Section):
    """Which of OpenRouter's providers may answer. Unpinned, one run would mix quantisations and templates."""

    providers: tuple[str, ...] = Field((), description="the only providers that may answer; required")
    quantizations: tuple[
        Literal["int4", "int8", "fp4", "mxfp4", "nvfp4", "fp6", "fp8", "mxfp8", "fp16", "bf16", "fp32", "unknown"], ...
    ] = Field((), description="the only quantisations that may answer; empty: any that the providers have")
    not_distillable: str | None = Field(
        None, description="why models whose author does not allow distillation may be used; default: they are refused"
    )


class Gates(Section):
    """Shares of the answers of a shard above which the stage stops instead of publishing. Answers are kept."""

    truncated: float = machine(1.0, "answers cut by max_tokens", ge=0.0, le=1.0)
    refused: float = machine(
        0.1, "prompts without an answer: refused, filtered, or failed again and again", ge=0.0, le=1.0
    )
    drifted: float = machine(0.1, "answers whose text, encoded again, has another count of tokens", ge=0.0, le=1.0)
    unparsed: float = machine(0.1, "answers whose reasoning or tool calls the server did not parse", ge=0.0, le=1.0)


_SERVED = ("sglang", "openai", "openrouter")
# Options of `engine` that mean something for some kinds alone, and those that a kind cannot do without.
ENGINE_FITS = {
    "batch_size": ("transformers",),
    "device": ("transformers",),
    "urls": ("sglang", "openai"),
    "model": ("openai", "openrouter"),
    "reasoning": ("openai", "openrouter"),
    "openrouter": ("openrouter",),
    "max_dollars": ("openrouter",),
    **dict.fromkeys(("concurrency", "timeout", "tries", "outage"), _SERVED),
    "gates": ("transformers", *_SERVED),
}
_WHERE = ("batch_size", "device", "urls", "concurrency", "timeout", "tries", "outage", "max_dollars", "gates")
ENGINE_NEEDS = {"openai": ("urls", "model"), "openrouter": ("model", "openrouter", "max_dollars")}


class Engine(Section):
    """Who answers. Where it runs is the machine's business and is in no recipe."""

    kind: Literal["transformers", "sglang", "openai", "openrouter"] = Field(
        "transformers",
        description="transformers: in this process; sglang: servers that speak SGLang's /generate; openai: any "
        "OpenAI-compatible servers; openrouter: paid providers",
    )
    model: str | None = Field(None, description="the name under which the servers know the target")
    reasoning: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="reasoning effort to ask for; default: the server's own"
    )
    openrouter: OpenRouter = OpenRouter()
    batch_size: int = machine(64, "sequences decoded together", ge=1)
    device: str = machine("auto", "torch device; auto is cuda when there is one")
    urls: tuple[str, ...] = machine((), "base URLs of your servers (for openai, ending in /v1)")
    concurrency: int = machine(64, "requests in flight at most, over all servers", ge=1)
    timeout: float = machine(900.0, "seconds for one answer", gt=0.0)
    tries: int = machine(6, "faults of its own after which a prompt ends as `refused`", ge=1)
    outage: float = machine(600.0, "seconds without any server that answers, after which the stage stops", gt=0.0)
    max_dollars: float | None = machine(None, "dollars that the run may spend, all its shards together", gt=0.0)
    gates: Gates = Gates()

    @field_validator("*")
    @classmethod
    def _fits_the_kind(cls, value: Any, info: ValidationInfo) -> Any:
        name, kind = str(info.field_name), info.data.get("kind")
        if name == "kind" or kind is None:
            return value
        given = value != cls.model_fields[name].get_default()
        if given and kind not in ENGINE_FITS[name]:
            raise ValueError(f"is for kind {' or '.join(ENGINE_FITS[name])}, and engine.kind is {kind}; take it out")
        if not given and name in ENGINE_NEEDS.get(kind, ()):
            raise ValueError(f"is required for kind {kind}; add it to the config")
        return value

    def with_recipe(self, recipe: dict[str, Any]) -> Engine:
        """These options, with what changes an answer (kind, model, pins) taken from a recipe instead."""
        ours = {name: getattr(self, name) for name, field in type(self).model_fields.items() if name in _WHERE}
        kind = recipe.get("kind", "transformers")
        return Engine.model_validate(
            {**{name: value for name, value in ours.items() if kind in ENGINE_FITS[name]}, **recipe}
        )

    @model_validator(mode="after")
    def _pins_are_there(self) -> Engine:
        if self.kind == "openrouter" and not self.openrouter.providers:
            raise ValueError("openrouter.providers is required for kind openrouter: name the providers to pin")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} is no base URL; write http://host:port")
        return self


class Server(Section):
    """The SGLang server that Eyrie starts itself, from an environment of its own (`make serve-cpu`)."""

    python: str = machine(".venv-serve/bin/python", "interpreter of the environment that holds SGLang")
    device: Literal["auto", "cpu", "cuda"] = machine("auto", "auto is cuda when there is one")
    tensor_parallel: int = machine(1, "GPUs that share one copy of the model", ge=1)
    preset: str | None = machine(None, "environment and arguments for special machines: pcie-latency, pcie-throughput")
    max_running_requests: int = machine(8, "requests decoded together", ge=1)
    context_length: int | None = machine(None, "longest request in tokens; default: what the model allows", ge=16)
    memory_fraction: float | None = machine(
        None, "share of device memory for weights and key-value pool; default: SGLang's choice", gt=0.0, lt=1.0
    )
    pool_tokens: int | None = machine(
        None, "key-value tokens the plan counts on; a server that offers under 0.9 of them is refused", ge=16
    )
    host_cache_gb: int = machine(0, "host memory per GPU for the hierarchical cache, in GB; 0 is off", ge=0)
    build_jobs: int | None = machine(
        None, "kernels compiled at once; default: by cores and free memory, so that nothing is killed for memory", ge=1
    )
    idle_s: float = machine(120.0, "seconds that an unused server is kept", ge=0.0)
    start_timeout_s: float = machine(900.0, "seconds from its start to its first answer", gt=0.0)
    kv_cache: Literal["auto", "fp8"] = Field(
        "auto", description="fp8 halves the key-value cache and may change answers; never chosen by itself"
    )
    flags: dict[str, str | int | float | bool] = Field(
        {},
        description="further SGLang arguments by name without dashes (several values: spaces between), checked "
        "against that version's list",
    )


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
    batch_tokens: int = machine(4096, "tokens per capture batch", ge=16)


class Drafter(Section):
    """One named training of a drafter; several can share all that stands above them."""

    algorithm: Literal["eagle3"] = Field("eagle3", description="registered drafter algorithm")
    ttt_steps: int = Field(3, ge=1, le=16, description="training-time-test steps: how deep drafting is rehearsed")
    ttt_decay: float = Field(0.8, gt=0.0, le=1.0, description="loss weight of step k is ttt_decay**k")
    epochs: float = Field(1.0, gt=0.0, description="passes over the training rows")
    batch_tokens: int = Field(2048, ge=16, description="tokens per optimiser step")
    learning_rate: float = Field(1e-3, gt=0.0, description="AdamW: norms and the head")
    muon_learning_rate: float = Field(2e-2, ge=0.0, description="Muon: matrices; 0 trains them with AdamW")
    warmup_fraction: Fraction = Field(0.05, description="share of the steps with a rising rate")
    max_grad_norm: float = Field(1.0, gt=0.0, description="global gradient norm is clipped here")
    init: Literal["target", "random"] = Field(
        "target", description="target: start from the target's last layer and head rows; random: from scratch"
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
    suites: dict[str, Suite] = Field({"held-out": Suite()}, description="benchmark suites by name")


class Config(Section):
    """The whole of ``config.yaml``."""

    run: str = Field(description="results/<run>/ holds all that depends on this config")
    target: Target
    engine: Engine = Engine()
    server: Server = Server()
    sampling: Sampling = Field(Sampling(), description="defaults for every answered dataset")
    datasets: dict[str, Dataset] = Field(description="datasets by name, in the order that settles duplicates")
    tokenize: Tokenize = Tokenize()
    merge: Merge = Merge()
    hidden: Hidden = Hidden()
    drafters: dict[str, Drafter] = Field({"eagle3": Drafter()}, description="drafters by name")
    bench: Bench = Bench()

    @field_validator("datasets", "drafters")
    @classmethod
    def _names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not value:
            raise ValueError("name at least one")
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name: use lower-case letters, digits, '-', '_' and '.'")
        return value

    @model_validator(mode="before")
    @classmethod
    def _inherit_sampling(cls, raw: Any) -> Any:
        """A dataset's ``sampling`` overrides single keys of the run's, so it is merged before validation."""
        if not isinstance(raw, dict) or not isinstance(raw.get("datasets"), dict):
            return raw
        shared = raw.get("sampling") or {}
        if not isinstance(shared, dict):
            return raw
        datasets = {}
        for name, dataset in raw["datasets"].items():
            if isinstance(dataset, dict) and isinstance(dataset.get("sampling", {}), dict):
                dataset = {**dataset, "sampling": {**shared, **dataset.get("sampling", {})}}
            datasets[name] = dataset
        return {**raw, "datasets": datasets}

    @model_validator(mode="after")
    def _answers_fit_rows(self) -> Config:
        for name, dataset in self.datasets.items():
            if dataset.kind == "answered" and dataset.sampling.max_tokens >= self.tokenize.max_length:
                raise ValueError(
                    f"datasets.{name}.sampling.max_tokens ({dataset.sampling.max_tokens}) leaves no room for a prompt "
                    f"within tokenize.max_length ({self.tokenize.max_length}): raise the one or lower the other"
                )
        return self


def load_config(*sources: Path | dict[str, Any]) -> Config:
    """Merge the sources (later ones win, mappings merge key by key) and check the result.

    Raises:
        EyrieError: naming the dotted path of each fault, and the nearest right key for a typo.
    """
    merged: dict[str, Any] = {}
    for source in sources:
        if isinstance(source, Path):
            try:
                loaded = yaml.safe_load(source.read_text())
            except (OSError, yaml.YAMLError) as error:
                raise EyrieError(f"{source}: cannot be read as YAML ({' '.join(str(error).split())})") from error
            if not isinstance(loaded, dict):
                raise EyrieError(f"{source}: must hold a mapping of options, as config.yaml does")
            source = loaded
        merged = deep_merge(merged, source)
    return parse_config(merged)


def parse_config(raw: dict[str, Any]) -> Config:
    """Validate an already merged mapping (Snakemake's ``config``). Raises :class:`EyrieError`."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        faults = "; ".join(_explain(fault) for fault in error.errors())
        raise EyrieError(f"config: {faults}") from error


def deep_merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge ``over`` into ``base``: mappings key by key, everything else replaced; a null removes the key."""
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = deep_merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _explain(fault: Any) -> str:
    """One fault of pydantic as ``dotted.path: what is wrong and how to mend it``."""
    path = [str(part) for part in fault["loc"]]
    dotted = ".".join(path) or "(top level)"
    if fault["type"] == "extra_forbidden":
        known = _known_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(sorted(known))}"
        return f"{dotted}: no such option; {hint}"
    if fault["type"] == "missing":
        return f"{dotted}: is required; add it to the config"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    silent = isinstance(fault["input"], dict) or message.startswith("is required")
    return f"{dotted}: {message}" + ("" if silent else f", got {fault['input']!r}")


def _known_keys(path: list[str]) -> list[str]:
    """Option names of the section at ``path``; free names (datasets, drafters, suites) are stepped over."""
    section: type[BaseModel] = Config
    step = iter(path)
    for part in step:
        field = section.model_fields.get(part)
        if field is None:
            return []
        inner = section_of(field.annotation)
        if inner is None:
            return []
        if "dict[" in str(field.annotation):
            next(step, None)
        section = inner
    return list(section.model_fields)


def section_of(annotation: Any) -> type[Section] | None:
    """The section inside ``annotation`` (bare, optional, or the value of a mapping), if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = section_of(argument)
        if found is not None:
            return found
    return None
