"""The registry of dataset adapters: who knows how to read which source.

An adapter is a generator that takes a :class:`Source` and yields raw rows for
:func:`eyrie.conversation.normalise`, in an order that is the same on every machine. It may yield a
:class:`~eyrie.conversation.Reject` in place of a row that its own options exclude, so that the row is counted.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eyrie.conversation import Reject
from eyrie.errors import EyrieError

Option = str | int | float | bool
Raw = dict[str, Any] | Reject
Kind = Literal["answered", "native"]


@dataclass(frozen=True)
class Hub:
    """Where a dataset stands on the Hugging Face hub; ``files`` is a glob inside it, None for what its card says."""

    repo: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    files: str | None = None

    def over(self, preset: Hub) -> Hub:
        """These fields, and where one is not set the preset's. Another repository takes nothing from the preset."""
        if self.repo not in {None, preset.repo}:
            return self
        chosen = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(preset, **chosen)


@dataclass(frozen=True)
class Source:
    """What an adapter is asked for: its options (defaults filled in), where the rows are, and the kind of rows.

    ``path``, a local file or folder, goes before ``hub``. Readers note in ``facts`` what they found out about the
    source (the commit that a hub name stood for); it becomes part of the manifest.
    """

    options: Mapping[str, Any]
    kind: Kind = "answered"
    path: str | None = None
    hub: Hub = Hub()
    facts: dict[str, str] = field(default_factory=dict)


Read = Callable[[Source], Iterator[Raw]]


@dataclass(frozen=True)
class Adapter:
    """A registered adapter.

    Attributes:
        options: every option with its default; the default's type is the type.
        places: which fields of the dataset's section say where it reads: ``path``, ``repo``; none for package data.
        hub: where it reads when the section does not say.
        licence: of the data that ``hub`` names.
    """

    name: str
    read: Read
    options: Mapping[str, Option]
    places: tuple[str, ...] = ()
    hub: Hub = Hub()
    licence: str = ""

    def open(
        self,
        options: Mapping[str, Option],
        kind: Kind = "answered",
        path: str | None = None,
        hub: Hub = Hub(),
        facts: dict[str, str] | None = None,
    ) -> Iterator[Raw]:
        """Stream the raw rows. Raises :class:`EyrieError` as :meth:`check` does."""
        self.check(options, path, hub)
        facts = {} if facts is None else facts
        if self.licence and path is None and hub.repo in {None, self.hub.repo}:
            facts["licence"] = self.licence
        return self.read(Source({**self.options, **options}, kind, path, hub.over(self.hub), facts))

    def check(self, options: Mapping[str, Option], path: str | None = None, hub: Hub = Hub()) -> None:
        """Refuse what the adapter cannot be asked for, without reading anything.

        Raises:
            EyrieError: an option that the adapter does not have, or of another type; a place that it does not read.
        """
        for key, value in options.items():
            if key not in self.options:
                near = difflib.get_close_matches(key, self.options, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(self.options) or 'none'}"
                raise EyrieError(f"adapter {self.name}: no such option {key!r}; {hint}")
            if type(value) is not type(self.options[key]):
                wanted = type(self.options[key]).__name__
                raise EyrieError(f"adapter {self.name}: option {key!r} must be of type {wanted}, got {value!r}")
        if path is not None and "path" not in self.places:
            raise EyrieError(f"adapter {self.name}: reads no `path`; remove it, or use adapter jsonl or columns")
        if hub != Hub() and "repo" not in self.places:
            raise EyrieError(f"adapter {self.name}: reads no hub dataset; remove `repo`, `subset`, `split`, `revision`")


ADAPTERS: dict[str, Adapter] = {}


def register(made: Adapter) -> None:
    """Add an adapter to the registry; its name must be new."""
    if made.name in ADAPTERS:
        raise ValueError(f"adapter {made.name!r} is registered twice")
    ADAPTERS[made.name] = made


def adapter(name: str, *, places: tuple[str, ...] = (), **options: Option) -> Callable[[Read], Read]:
    """Register a generator function as the adapter ``name`` with these options and defaults."""

    def registered(read: Read) -> Read:
        register(Adapter(name, read, options, places))
        return read

    return registered


def find_adapter(name: str) -> Adapter:
    """The adapter called ``name``. Raises :class:`EyrieError` with the nearest name when there is none."""
    if name not in ADAPTERS:
        near = difflib.get_close_matches(name, ADAPTERS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(ADAPTERS))}"
        raise EyrieError(f"no dataset adapter {name!r}; {hint}")
    return ADAPTERS[name]
