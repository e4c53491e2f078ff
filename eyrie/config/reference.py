"""What follows from the config model: the JSON schema for editors and the reference page for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from eyrie.config import Config, Section, section_of

_INTRO = """\
# Configuration

Every option of `config.yaml`. This page is generated from `eyrie/config/` by `python scripts/write_schema.py`, as is
`config/schema.json`, which editors use for completion and checks.

`<name>` stands for a name of your own. An option marked *machine* says where or how fast work runs, never what it
computes: changing it rebuilds nothing. Every other option is part of the recipe of the stages that it concerns, and
changing it rebuilds exactly those and what stands below them.

| option | type | default | meaning |
|---|---|---|---|
"""


def schema_text() -> str:
    """``config/schema.json``: the JSON schema of the config, with keys in a stable order."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def markdown_reference() -> str:
    """``docs/config.md``: one table row per option, in the order of the model."""
    return _INTRO + "".join(_row(path, field) for path, field in options(Config))


def options(section: type[Section], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf option below ``section`` with its dotted path; free names read ``<name>``."""
    for name, field in section.model_fields.items():
        dotted = f"{path}{name}"
        inner = section_of(field.annotation)
        if inner is None:
            yield dotted, field
            continue
        if get_origin(field.annotation) is dict:
            dotted += ".<name>"
        yield from options(inner, f"{dotted}.")


def is_machine(field: FieldInfo) -> bool:
    """Whether the field says where or how fast work runs, never what it computes."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("machine"))


def _row(path: str, field: FieldInfo) -> str:
    default = "**required**" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
    note = " *(machine)*" if is_machine(field) else ""
    meaning = (field.description or "") + note
    cells = (f"`{path}`", _type_text(field), default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type_text(field: FieldInfo) -> str:
    """``integer >= 1``, ``"drop" or "keep"``, ...: the type and its range, as a person would say it."""
    text = _annotation_text(field.annotation)
    bounds = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
    ranges = [
        f"{bounds[type(check).__name__]} {getattr(check, type(check).__name__.lower()):g}"
        for check in field.metadata
        if type(check).__name__ in bounds
    ]
    return " ".join([text, ", ".join(ranges)]).strip()


def _annotation_text(annotation: Any) -> str:
    plain = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    if annotation in plain:
        return plain[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if get_origin(annotation) is tuple and arguments[-1] is Ellipsis:
        return f"list of {_annotation_text(arguments[0])}"
    if get_origin(annotation) is tuple:
        return f"list of {len(arguments)} {_annotation_text(arguments[0])}s"
    if get_origin(annotation) is dict:
        return f"mapping of text to {_annotation_text(arguments[1])}"
    if arguments:
        return re.sub(r" or null$", ", or null", " or ".join(map(_annotation_text, arguments)))
    return str(annotation)
