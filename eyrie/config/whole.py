"""The whole of ``config.yaml``: its sections together, and how a file becomes them."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from eyrie.config.engines import Engine, Server
from eyrie.config.section import NAME, Section, section_of
from eyrie.config.sources import Dataset, Sampling, Target
from eyrie.config.stages import Bench, Doctor, Drafter, Hidden, Merge, Tokenize
from eyrie.errors import EyrieError


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
    doctor: Doctor = Doctor()

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
    def _inherit(cls, raw: Any) -> Any:
        """A dataset's ``sampling`` and ``gates`` override single keys of the run's, so they are merged first."""
        if not isinstance(raw, dict) or not isinstance(raw.get("datasets"), dict):
            return raw
        engine = raw.get("engine") or {}
        shared = {"sampling": raw.get("sampling"), "gates": engine.get("gates") if isinstance(engine, dict) else None}
        datasets = {}
        for name, dataset in raw["datasets"].items():
            for key, ours in shared.items():
                if isinstance(dataset, dict) and isinstance(ours, dict) and isinstance(dataset.get(key, {}), dict):
                    dataset = {**dataset, key: {**ours, **dataset.get(key, {})}}
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

    @model_validator(mode="after")
    def _answers_fit_the_server(self) -> Config:
        bound = self.server.most_tokens() if self.engine.managed else None
        for name, dataset in self.datasets.items():
            if bound and dataset.kind == "answered" and dataset.sampling.max_tokens >= bound[1]:
                raise ValueError(
                    f"datasets.{name}.sampling.max_tokens ({dataset.sampling.max_tokens}) leaves no room for a prompt "
                    f"within server.{bound[0]} ({bound[1]}): raise the one or lower the other"
                )
        return self

    @model_validator(mode="after")
    def _prompt_states_are_kept(self) -> Config:
        for name, drafter in self.drafters.items():
            if drafter.prompt_weight and self.hidden.final_states != "all":
                raise ValueError(
                    f"drafters.{name}.prompt_weight ({drafter.prompt_weight}) learns from states that "
                    "hidden.final_states: answers does not keep: set hidden.final_states: all"
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
