"""Who answers: engines, paid providers, and the server that Eyrie starts itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from eyrie.config.section import Section, machine
from eyrie.config.sources import Gates


class OpenRouter(Section):
    """Which of OpenRouter's providers may answer. Unpinned, one run would mix quantisations and templates."""

    providers: tuple[str, ...] = Field((), description="the only providers that may answer; required")
    quantizations: tuple[
        Literal["int4", "int8", "fp4", "mxfp4", "nvfp4", "fp6", "fp8", "mxfp8", "fp16", "bf16", "fp32", "unknown"], ...
    ] = Field((), description="the only quantisations that may answer; empty: any that the providers have")
    not_distillable: str | None = Field(
        None, description="why models whose author does not allow distillation may be used; default: they are refused"
    )


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
        description="transformers: in this process; sglang: the `urls` that speak SGLang's /generate, or "
        "without any a server that Eyrie starts as `server` says; openai: any OpenAI-compatible servers; openrouter: "
        "paid providers",
    )
    model: str | None = Field(None, description="the name under which the servers know the target")
    reasoning: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="reasoning effort to ask for; default: the server's own"
    )
    openrouter: OpenRouter = OpenRouter()
    batch_size: int = machine(64, "sequences decoded together", ge=1)
    device: str = machine("auto", "torch device; auto is cuda when there is one")
    urls: tuple[str, ...] = machine(
        (), "base URLs of your servers (for openai, ending in /v1); none, with kind sglang: Eyrie starts one"
    )
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

    @property
    def managed(self) -> bool:
        """Whether the answers come from a server that Eyrie starts."""
        return self.kind == "sglang" and not self.urls

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
    kv_cache_gate: float = machine(
        0.92, "share of greedy tokens that an fp8 cache must leave as they are before it answers; 0: not compared",
        ge=0.0, le=1.0,
    )  # fmt: skip
    flags: dict[str, str | int | float | bool] = Field(
        {},
        description="further SGLang arguments by name without dashes (several values: spaces between), checked "
        "against that version's list",
    )

    def with_recipe(self, recipe: dict[str, Any]) -> Server:
        """These options, with what changes an answer (``kv_cache``, ``flags``) taken from a recipe instead."""
        ours = {"kv_cache", "flags"}
        return Server.model_validate({**self.model_dump(exclude=ours), **recipe})

    def most_tokens(self) -> tuple[str, int] | None:
        """The option that bounds a request, prompt and answer, and its tokens; None when none does."""
        bounds = {name: getattr(self, name) for name in ("context_length", "pool_tokens") if getattr(self, name)}
        return min(bounds.items(), key=lambda bound: bound[1]) if bounds else None
