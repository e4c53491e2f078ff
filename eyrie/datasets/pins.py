"""Commits of hub datasets: asked for once, written into the config, and demanded before anything is downloaded.

A branch of the hub moves: the shards of one dataset would come from two states of it, and a push would make paid
answers stale. So ingest reads a hub dataset by its commit or not at all. Only YAML's own marks say where a file is
edited, so every other byte of it stays, comments and layout included.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from eyrie.config import Config, Dataset, load_config, parse_config
from eyrie.config.section import COMMIT
from eyrie.datasets.registry import Hub, find_adapter
from eyrie.errors import EyrieError
from eyrie.formats.publish import atomic

COMMAND = "python scripts/pin_datasets.py"
PATIENCE = 30.0  # seconds for one answer of the hub
Edit = tuple[int, int, str]  # the characters from here to there become this text


def hub_of(dataset: Dataset) -> Hub | None:
    """Where on the hub the dataset stands, its adapter's preset included; None for packages, files and folders.

    Raises:
        EyrieError: no such adapter.
    """
    adapter = find_adapter(dataset.adapter)
    if dataset.path is not None or "repo" not in adapter.places:
        return None
    hub = named_hub(dataset).over(adapter.hub)
    return hub if hub.repo else None


def named_hub(dataset: Dataset) -> Hub:
    """What the section itself says of the place on the hub."""
    return Hub(dataset.repo, dataset.subset, dataset.split, dataset.revision, dataset.files)


def is_pinned(hub: Hub) -> bool:
    """Whether the revision is a commit (40 hex digits), which nobody can move."""
    return COMMIT.fullmatch(hub.revision or "") is not None


def refuse_unpinned(dataset: Dataset, name: str) -> None:
    """Raise :class:`EyrieError` for a hub dataset without a commit, before anything of it is downloaded."""
    try:
        hub = hub_of(dataset)
    except EyrieError as error:
        raise EyrieError(f"dataset {name}: {error}") from error
    if hub is not None and not is_pinned(hub):
        held = f"its revision {hub.revision!r} can move" if hub.revision else "it has no revision"
        raise EyrieError(
            f"dataset {name}: {hub.repo} is not pinned to a commit ({held}); run `{COMMAND} CONFIG` with the config of "
            f"this run, which writes datasets.{name}.revision, or download it and give `path`"
        )


def pin_datasets(path: Path, say: Callable[[str], None]) -> None:
    """Write the commit of every hub dataset of a config into that file; a commit that it names already stays.

    A branch or a tag becomes the commit that it stands for now, no revision that of the default branch.

    Args:
        path: the config (YAML). It is replaced as a whole; all bytes but the pins' stay.
        say: takes one line for each dataset.

    Raises:
        EyrieError: the hub cannot be reached or the file cannot be edited (nothing is written then), or the hub
            refused single datasets (the others are written).
    """
    config = load_config(path)
    pins: dict[str, str] = {}
    lines = []
    refused = 0
    for name, dataset in config.datasets.items():
        hub = hub_of(dataset)
        if hub is None:
            lines.append(f"{name}: not of the hub")
        elif is_pinned(hub):
            whose = "" if dataset.revision else ", its adapter's pin"
            lines.append(f"{name}: {hub.repo} stays at {hub.revision}{whose}")
        else:
            try:
                pins[name], note = _ask(str(hub.repo), hub.revision)
                lines.append(f"{name}: {hub.repo} is pinned to {pins[name]}{note}")
            except _Refused as fault:
                refused += 1
                lines.append(f"{name}: {hub.repo} is NOT pinned: {fault}")
    if pins:
        _write(path.resolve(), config, pins)
    for line in lines:  # not earlier: until the file is written, nothing is pinned
        say(line)
    if refused:
        raise EyrieError(f"{path}: {refused} of its datasets not pinned; mend what their lines say and run this again")


class _Refused(Exception):
    """The hub's answer about one dataset; the others may fare better."""


def _ask(repo: str, revision: str | None) -> tuple[str, str]:
    """The commit that the revision stands for, and a remark for a dataset whose files need a login."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = HfApi()
    terms = f"accept its terms at {hub.endpoint}/datasets/{repo} and log in with `hf auth login`"
    try:
        info = hub.dataset_info(repo, revision=revision, timeout=PATIENCE)
    except GatedRepoError as error:  # before the next one, whose subclass it is
        raise _Refused(f"it is gated; {terms}") from error
    except RepositoryNotFoundError as error:
        raise _Refused(
            "the hub has no such dataset, or a private one; mend `repo`, or log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise _Refused(f"it has no revision {revision!r}; mend or remove `revision`") from error
    except DisabledRepoError as error:
        raise _Refused("the hub has disabled it; choose another `repo`") from error
    except HFValidationError as error:
        raise _Refused("this is no name on the hub; for a folder set `path` in place of `repo`") from error
    except OfflineModeIsEnabled as error:
        raise EyrieError(f"{hub.endpoint}: offline mode is on; unset HF_HUB_OFFLINE; nothing was written") from error
    except Exception as error:  # the client's own kinds, the connection's, and answers that are none
        said = " ".join(str(error).split())[:200]
        raise EyrieError(
            f"{hub.endpoint}: no answer about {repo} ({type(error).__name__}: {said}); mend the connection or set "
            "HF_ENDPOINT to a mirror, and run this again; nothing was written"
        ) from error
    if not COMMIT.fullmatch(info.sha or ""):
        raise _Refused(f"the hub named no commit, but {info.sha!r}; set `revision` by hand")
    return str(info.sha), f"; it is gated: {terms}" if info.gated else ""


def _write(path: Path, config: Config, pins: dict[str, str]) -> None:
    """Publish the file with its pins, once it is sure that the new text says the old config and the pins."""
    text = path.read_bytes().decode("utf-8")  # read_text would turn Windows' line ends into others
    expected = config.model_dump()
    for name, commit in pins.items():
        expected["datasets"][name]["revision"] = commit
    try:
        made = pinned_text(text, pins)
        agrees = made is not None and parse_config(yaml.safe_load(made)).model_dump() == expected
    except (EyrieError, yaml.YAMLError):
        made, agrees = None, False
    if made is None or not agrees:
        by_hand = ", ".join(f"datasets.{name}.revision: {commit}" for name, commit in pins.items())
        raise EyrieError(f"{path}: is written in a way that cannot be edited safely; set by hand {by_hand}")
    with atomic(path) as part:
        part.write_bytes(made.encode("utf-8"))
        shutil.copymode(path, part)


def pinned_text(text: str, pins: dict[str, str]) -> str | None:
    """The YAML text with ``datasets.<name>.revision`` inserted or replaced; None where a section is not in the text."""
    edits: set[Edit] = set()  # two names may stand for one section (an alias), which is edited once
    sections = _entries(_entries(yaml.compose(text, Loader=yaml.SafeLoader)).get("datasets", (None, None))[1])
    for name, commit in pins.items():
        section = sections.get(name, (None, None))[1]
        if not isinstance(section, yaml.MappingNode):
            return None
        edits.add(_edit(text, section, commit))
    for start, end, new in sorted(edits, reverse=True):  # from the end, so that the marks before it stay true
        text = text[:start] + new + text[end:]
    return text


def _entries(node: yaml.Node | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Keys of a mapping with the nodes of key and value."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}


def _edit(text: str, section: yaml.MappingNode, commit: str) -> Edit:
    """The edit that gives one section its pin: in place of an old one, else a line below ``repo`` or ``adapter``."""
    entries = _entries(section)
    pin = commit if yaml.safe_load(commit) == commit else f'"{commit}"'  # forty decimal digits would be a number
    if "revision" in entries:
        old = entries["revision"][1]
        start, end = old.start_mark.index, old.end_mark.index
        return start, end, pin if start < end else f" {pin}"
    key, value = entries.get("repo") or entries.get("adapter") or next(iter(entries.values()))
    if section.flow_style:
        return key.start_mark.index, key.start_mark.index, f"revision: {pin}, "
    end = text.find("\n", value.end_mark.index)
    end = len(text) if end < 0 else end
    line_end = "\r\n" if "\r\n" in text else "\n"
    margin = " " * key.start_mark.column
    if value.start_mark.line != key.start_mark.line or value.end_mark.line != key.start_mark.line:
        return key.start_mark.index, key.start_mark.index, f"revision: {pin}{line_end}{margin}"
    end -= text[:end].endswith("\r")
    return end, end, f"{line_end}{margin}revision: {pin}"
