"""How the loops of this package are compiled, and where the machine code is kept between processes.

numba keeps a compiled function beside its source and forgets it when *that file* changes; a loop that it calls in
another file is compiled into it all the same. So the folder bears the digest of every file that holds such loops, and
an edit of one of them can never leave an old copy of it inside another.
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import numba

PACKAGE = Path(__file__).parents[1]
SOURCES = ("llama/compiled.py", "llama/matmul.py", "llama/kernels.py", "drafters/decode.py")


def cache_folder() -> Path:
    """Where compiled loops of these very sources stand."""
    digest = hashlib.sha256(b"".join((PACKAGE / source).read_bytes() for source in SOURCES)).hexdigest()[:16]
    return Path(__file__).parent / "__pycache__" / f"loops-{digest}"


if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = str(cache_folder())

# division by zero gives inf as in numpy, so no branch stands in a loop; sums may be reordered for the vector units
kernel: Any = partial(numba.njit, cache=True, error_model="numpy", fastmath=True)
exact_kernel: Any = partial(numba.njit, cache=True, error_model="numpy")

# A loop that comes from the cache and calls a parallel one does not start numba's threads by itself, and then crashes.
numba.get_num_threads()
