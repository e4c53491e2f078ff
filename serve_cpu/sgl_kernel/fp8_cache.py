"""Lets SGLang keep its key-value cache in fp8 although there are no AMX kernels.

SGLang stores keys and values as float8 in plain torch and leaves reading them to ``sgl_kernel``, whose attention here
does so. It only refuses where it finds no AMX, because its own kernels need that. This plug-in answers the one question
that stands in the way; asked anywhere else, SGLang still finds no AMX and runs its layers in plain torch.
"""

from __future__ import annotations

import sys

FP8 = "fp8_e4m3"
"""The only fp8 cache that SGLang has on a CPU; it refuses fp8_e5m2 there."""
ASKED = "sglang.srt.mem_cache.kv_cache_configurator.cpu_has_amx_support"


def allow() -> None:
    """SGLang's plug-in hook, called in each of its processes; a server with another cache is left alone."""
    if not any(FP8 in argument for argument in sys.argv):  # each process has the server's arguments
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ASKED, lambda: True, HookType.REPLACE)
