"""Stand-in for ``sgl_kernel`` on a CPU, in plain torch: what SGLang 0.5.23 calls while it serves a dense model.

It is no build of the sgl-kernel project. It holds the functions that SGLang imports by name with
``SGLANG_USE_CPU_ENGINE=1``, and two attention operators. Everything else is absent on purpose: without
``convert_weight_packed`` SGLang concludes that there are no AMX kernels and runs linear layers, norms, rotary
embeddings and activations in plain torch itself.
"""

from sgl_kernel import attention, fp8_cache
from sgl_kernel.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.tree import build_draft_decode_metadata_cpu, build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.0.0+eyrie.cpu"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

attention.register()
fp8_cache.register()
