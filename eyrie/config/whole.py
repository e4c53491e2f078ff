"""The whole of ``config.yaml``: its sections together, and how a file becomes them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from eyrie.config.engines import Engine, Server
from eyrie.config.files import read_options
from eyrie.config.section import RUN, Section, named, section_of
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

    @field_validator("run")
    @classmethod
    def _run_is_a_folder(cls, value: str) -> str:
        if not RUN.fullmatch(value):
            raise ValueError(f"{value!r} is no folder name: use letters, digits, '-', '_' and '.'")
        return value

    @field_validator("datasets", "drafters")
    @classmethod
    def _names(cls, value: dict[str, Any]) -> dict[str, Any]:
        return named(value)

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


def load_config(path: Path) -> Config:
    """Read and check a config file.

    Raises:
        EyrieError: no such file, no YAML, a key that stands twice, or the faults of :func:`parse_config`.
    """
    return parse_config(read_options(path), str(path))


def parse_config(raw: dict[str, Any], source: str = "config") -> Config:
    """Check a mapping of options (Snakemake's ``config``).

    Args:
        source: what a fault is reported under: the file that the options come from.

    Raises:
        EyrieError: naming the dotted path of each fault, and the nearest right key for a typo.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        faults = dict.fromkeys(_explain(fault) for fault in _of_their_own(error.errors()))
        raise EyrieError(f"{source}: {'; '.join(faults)}") from error


def _of_their_own(faults: Sequence[Any]) -> list[Any]:
    """The faults without those that a dataset has of the run's ``sampling`` or ``engine.gates``: one mend for all."""
    shared = {fault["loc"][-2:] for fault in faults if fault["loc"][:1] != ("datasets",)}
    return [
        fault
        for fault in faults
        if not (fault["loc"][:1] == ("datasets",) and fault["loc"][2:3] in (("sampling",), ("gates",)))
        or fault["loc"][-2:] not in shared
    ]


def _explain(fault: Any) -> str:
    """One fault of pydantic as ``dotted.path: what is wrong and how to mend it``."""
    path = [str(part) for part in fault["loc"]]
    dotted = ".".join(path)
    if fault["type"] == "extra_forbidden":
        known = _known_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(sorted(known))}"
        return f"{dotted}: no such option; {hint}"
    if fault["type"] == "missing":
        if isinstance(fault["loc"][-1], int):
            return f"{'.'.join(path[:-1])}: too few values; docs/config.md says how many"
        return f"{dotted}: is required; add it to the config"
    if fault["type"] in ("model_type", "dict_type"):
        if fault["input"] is None:
            return f"{dotted}: holds nothing; give it options, or {{}} for the defaults"
        return f"{dotted}: must be a mapping of options, got {fault['input']!r}"
    if fault["type"] == "value_error":  # said by Eyrie itself, values included
        said = str(fault["msg"]).removeprefix("Value error, ")
        return f"{dotted}: {said}" if dotted else said
    message = fault["msg"][0].lower() + fault["msg"][1:]
    if fault["type"] == "int_parsing":
        message = "must be a whole number, written out (1000000 or 1_000_000)"
    return f"{dotted}: {message}, got {fault['input']!r}"


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
