"""Config files: YAML in which no key stands twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from eyrie.errors import EyrieError


def read_options(path: Path) -> dict[str, Any]:
    """The mapping that a config file holds.

    Raises:
        EyrieError: no such file, no YAML, or a key that stands twice in one mapping, with its line.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        _refuse_twins(root, path, set())
        loaded = loader.construct_document(root) if root else None
    except FileNotFoundError as error:
        raise EyrieError(f"{path}: no such file; give the config of a run, such as config.yaml") from error
    except yaml.MarkedYAMLError as error:
        line = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else str(path)
        raise EyrieError(f"{line}: {error.problem}; mend this line, or the one before it") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EyrieError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from error
    if not isinstance(loaded, dict):
        raise EyrieError(f"{path}: must hold a mapping of options, as config.yaml does")
    return loaded


def _refuse_twins(node: yaml.Node | None, path: Path, visited: set[int]) -> None:
    """YAML lets the last of two equal keys win in silence: a dataset copied and not renamed would replace the first."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in visited:
        return
    visited.add(id(node))
    keys: set[str] = set()
    for item in node.value:
        key, value = item if isinstance(node, yaml.MappingNode) else (None, item)
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                line = key.start_mark.line + 1
                raise EyrieError(
                    f"{path}:{line}: {key.value!r} stands here a second time; rename or remove one of them"
                )
            keys.add(key.value)
        _refuse_twins(value, path, visited)
