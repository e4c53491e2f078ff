"""The registry of dataset adapters: who knows how to read which source.

An adapter is a generator that takes a :class:`Source` and yields raw rows for
:func:`eyrie.conversation.normalise`, in an order that is the same on every machine. It may yield a
:class:`~eyrie.conversation.Reject` in place of a row that its own options exclude, so that the row is counted.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyrie.conversation import Reject
from eyrie.errors import EyrieError

Option = str | int | float | bool
Raw = dict[str, Any] | Reject


@dataclass(frozen=True)
class Source:
    """What an adapter is asked for: its options (defaults filled in), the local file if any, and the kind of rows."""

    options: Mapping[str, Any]
    kind: Literal["answered", "native"] = "answered"
    path: str | None = None


Read = Callable[[Source], Iterator[Raw]]


@dataclass(frozen=True)
class Adapter:
    """A registered adapter; ``options`` holds every option with its default (the default's type is the type)."""

    name: str
    read: Read
    options: Mapping[str, Option]

    def open(
        self,
        options: Mapping[str, Option],
        kind: Literal["answered", "native"] = "answered",
        path: str | None = None,
    ) -> Iterator[Raw]:
        """Stream the raw rows.

        Raises:
            EyrieError: an option that the adapter does not have, or of another type.
        """
        for key, value in options.items():
            if key not in self.options:
                near = difflib.get_close_matches(key, self.options, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(self.options) or 'none'}"
                raise EyrieError(f"adapter {self.name}: no such option {key!r}; {hint}")
            if type(value) is not type(self.options[key]):
                wanted = type(self.options[key]).__name__
                raise EyrieError(f"adapter {self.name}: option {key!r} must be of type {wanted}, got {value!r}")
        return self.read(Source({**self.options, **options}, kind, path))


ADAPTERS: dict[str, Adapter] = {}


def adapter(name: str, **options: Option) -> Callable[[Read], Read]:
    """Register a generator function as the adapter ``name`` with these options and defaults."""

    def register(read: Read) -> Read:
        if name in ADAPTERS:
            raise ValueError(f"adapter {name!r} is registered twice")
        ADAPTERS[name] = Adapter(name, read, options)
        return read

    return register


def find_adapter(name: str) -> Adapter:
    """The adapter called ``name``. Raises :class:`EyrieError` with the nearest name when there is none."""
    if name not in ADAPTERS:
        near = difflib.get_close_matches(name, ADAPTERS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(ADAPTERS))}"
        raise EyrieError(f"no dataset adapter {name!r}; {hint}")
    return ADAPTERS[name]
