"""An fp8 (e4m3) key-value cache without AMX.

SGLang keeps such a cache on a CPU only where its own AMX kernels can read it, and asks for AMX just before it lays the
pool out. The attention of this package reads float8 like any other type, so that one question is answered with yes. It
cannot be answered for the whole of SGLang: everything else would then look for AMX kernels that are not here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ASKS = "sglang.srt.mem_cache.kv_cache_configurator"
QUESTION = "cpu_has_amx_support"


class _Answering(Loader):
    """Runs the module, then answers its question."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if not hasattr(module, QUESTION):
            raise ImportError(f"{ASKS} has no {QUESTION}; serve_cpu's sgl_kernel is written for SGLang 0.5.23")
        setattr(module, QUESTION, lambda: True)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == ASKS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Answering(spec.loader)
        return spec


def register() -> None:
    """Answer when SGLang imports the module that asks. It imports this package long before."""
    if ASKS not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
