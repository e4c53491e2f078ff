"""What all sections have in common."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def machine(default: Any, description: str, **checks: Any) -> Any:
    """A field that says where or how work runs; it is left out of every recipe."""
    return Field(default, description=description, json_schema_extra={"machine": True}, **checks)


def named(value: dict[str, Any]) -> dict[str, Any]:
    """A mapping of names to sections, each name fit for a file name. Raises :class:`ValueError`."""
    if not value:
        raise ValueError("name at least one")
    for name in value:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name: use lower-case letters, digits, '-', '_' and '.'")
    return value


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable once checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def section_of(annotation: Any) -> type[Section] | None:
    """The section inside ``annotation`` (bare, optional, or the value of a mapping), if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = section_of(argument)
        if found is not None:
            return found
    return None
