"""Hidden shards: the target's states for every row of one token shard, in one safetensors file.

Rows lie unpadded behind each other, in the order of the token shard:

``aux``            ``[N, 3H]``  residual stream entering the three captured layers, low | middle | high, per token
``final``          ``[M, H]``   state after the final norm, where the next token is a supervised label, or everywhere
                   but at the row's last token
``row_offsets``    ``[R + 1]``  int64: row r owns ``aux[row_offsets[r] : row_offsets[r + 1]]``
``final_offsets``  ``[R + 1]``  int64: the same for ``final``

The metadata says which layers, which target and which token shard, so that a reader can refuse what does not belong.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eyrie.errors import EyrieError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT = "eyrie-hidden-2"
BYTES = {"bfloat16": 2, "float32": 4}
CODES = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class HiddenLayout:
    """All that fixes a shard's size and header before the first state is computed.

    Attributes:
        lengths: tokens of each row.
        finals: final states kept of each row.
        hidden_size: width H of one state.
        layers: boundary ids, ascending; id k names the residual stream entering layer k.
        dtype: ``bfloat16`` or ``float32``.
        target_sha: sha256 of the target, as in its card.
        tokens_sha: sha256 of the token shard.
        whole: final states are kept before every token but a row's first, not only before labels.
    """

    lengths: Sequence[int]
    finals: Sequence[int]
    hidden_size: int
    layers: tuple[int, ...]
    dtype: str
    target_sha: str
    tokens_sha: str
    whole: bool = False

    def metadata(self) -> dict[str, str]:
        """What stands in the safetensors header."""
        return {
            "format": FORMAT,
            "layers": json.dumps(list(self.layers)),
            "dtype": self.dtype,
            "target": self.target_sha,
            "tokens": self.tokens_sha,
            "finals": "all" if self.whole else "answers",
        }


class HiddenWriter:
    """Writes rows straight to their place in the file, in any order; nothing but the row at hand is in memory.

    The whole file is allocated at the start, so a full disk is found before any state is computed.

    Raises:
        OSError: ENOSPC with the file's name.
        RuntimeError: a row is written twice or with a wrong shape, or the context ends with rows missing: a bug.
    """

    def __init__(self, path: Path, layout: HiddenLayout) -> None:
        self.path, self.layout = path, layout
        self.row_offsets = [0, *accumulate(layout.lengths)]
        self.final_offsets = [0, *accumulate(layout.finals)]
        self._missing = set(range(len(layout.lengths)))
        self._aux_bytes = len(layout.layers) * layout.hidden_size * BYTES[layout.dtype]
        self._final_bytes = layout.hidden_size * BYTES[layout.dtype]

    def __enter__(self) -> HiddenWriter:
        import numpy as np

        offsets = np.array([*self.row_offsets, *self.final_offsets], dtype="<i8").tobytes()
        head = self._header()
        self._aux_start = len(head) + len(offsets)
        self._final_start = self._aux_start + self.row_offsets[-1] * self._aux_bytes
        end = self._final_start + self.final_offsets[-1] * self._final_bytes
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(self._file, 0, end)
            self._put(0, head + offsets)
        except OSError as error:
            os.close(self._file)
            raise self._named(error) from error
        return self

    def write(self, row: int, aux_TA: Tensor, final_FH: Tensor) -> None:
        """Store one row: ``aux_TA`` ``[length, 3H]`` and ``final_FH`` ``[finals, H]``, both of the layout's dtype."""
        layout = self.layout
        wide = len(layout.layers) * layout.hidden_size
        expected = ((layout.lengths[row], wide), (layout.finals[row], layout.hidden_size))
        if (tuple(aux_TA.shape), tuple(final_FH.shape)) != expected:
            raise RuntimeError(f"row {row}: shapes {tuple(aux_TA.shape)}, {tuple(final_FH.shape)}, expected {expected}")
        if row not in self._missing:
            raise RuntimeError(f"row {row} is written twice")
        try:
            self._put(self._aux_start + self.row_offsets[row] * self._aux_bytes, self._bytes(aux_TA))
            self._put(self._final_start + self.final_offsets[row] * self._final_bytes, self._bytes(final_FH))
        except OSError as error:
            raise self._named(error) from error
        self._missing.remove(row)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        if kind is None and self._missing:
            raise RuntimeError(f"{len(self._missing)} rows were never written, the first is {min(self._missing)}")

    def _header(self) -> bytes:
        """Length and JSON, padded so that the data begins at a multiple of 8 bytes."""
        rows, layout = len(self.layout.lengths), self.layout
        shapes = {
            "row_offsets": ("I64", [rows + 1], 8 * (rows + 1)),
            "final_offsets": ("I64", [rows + 1], 8 * (rows + 1)),
            "aux": (
                CODES[layout.dtype],
                [self.row_offsets[-1], len(layout.layers) * layout.hidden_size],
                self.row_offsets[-1] * self._aux_bytes,
            ),
            "final": (
                CODES[layout.dtype],
                [self.final_offsets[-1], layout.hidden_size],
                self.final_offsets[-1] * self._final_bytes,
            ),
        }
        header: dict[str, Any] = {"__metadata__": layout.metadata()}
        end = 0
        for name, (code, shape, size) in shapes.items():
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _bytes(self, tensor: Tensor) -> memoryview:
        import torch

        if tensor.dtype != getattr(torch, self.layout.dtype):
            raise RuntimeError(f"{self.path}: got states of {tensor.dtype}, expected {self.layout.dtype}")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data

    def _put(self, place: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            done = os.pwrite(self._file, view, place)
            view, place = view[done:], place + done

    def _named(self, error: OSError) -> OSError:
        """A full disk with the name of the file, for the one-line message."""
        if error.errno != errno.ENOSPC:
            return error
        return OSError(error.errno, os.strerror(error.errno), str(self.path))


@dataclass(frozen=True)
class HiddenShard:
    """An open hidden shard; its tensors are views of the memory-mapped file, so only rows that are used are read.

    Attributes:
        path: the file.
        layers: boundary ids, ascending.
        dtype: storage dtype.
        aux_NA: ``[N, 3H]`` (A = 3H), all rows behind each other.
        final_MH: ``[M, H]``.
        row_offsets, final_offsets: ``R + 1`` numbers each.
        whole: every row holds final states before all its tokens but the first, not only before labels.
    """

    path: Path
    layers: tuple[int, ...]
    dtype: torch.dtype
    aux_NA: Tensor
    final_MH: Tensor
    row_offsets: list[int]
    final_offsets: list[int]
    whole: bool

    @classmethod
    def open(
        cls, path: Path, *, target_sha: str, tokens_sha: str, layers: tuple[int, ...] | None = None
    ) -> HiddenShard:
        """Map the shard and check that it belongs to this target, these token rows and (if given) these layers.

        Raises:
            EyrieError: it is missing, truncated or no hidden shard, or was captured from something else.
        """
        again = f"capture it again with `snakemake -f {path}`"
        metadata, tensors = _read(path, again)
        expected = {"target": target_sha, "tokens": tokens_sha}
        if layers is not None:
            expected["layers"] = json.dumps(list(layers))
        what = {"target": "another target", "tokens": "other token rows", "layers": "other layers"}
        for key, value in expected.items():
            if metadata[key] != value:
                raise EyrieError(
                    f"{path}: was captured from {what[key]} ({metadata[key][:16]}, expected {value[:16]}); {again}"
                )
        shard = cls(
            path=path,
            layers=tuple(json.loads(metadata["layers"])),
            dtype=tensors["aux"].dtype,
            aux_NA=tensors["aux"],
            final_MH=tensors["final"],
            row_offsets=tensors["row_offsets"].tolist(),
            final_offsets=tensors["final_offsets"].tolist(),
            whole=metadata["finals"] == "all",
        )
        if not shard._consistent():
            raise EyrieError(f"{path}: its row offsets do not fit its tensors; {again}")
        return shard

    def __len__(self) -> int:
        """Rows."""
        return len(self.row_offsets) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.row_offsets[-1]

    @property
    def hidden_size(self) -> int:
        return self.final_MH.shape[1]

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """``aux_TA`` ``[T, 3H]`` and ``final_FH`` ``[finals, H]`` of one row, as views in storage dtype."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: has {len(self)} rows, asked for row {index}")
        start, end = self.row_offsets[index : index + 2]
        first, last = self.final_offsets[index : index + 2]
        return self.aux_NA[start:end], self.final_MH[first:last]

    def _consistent(self) -> bool:
        rows, finals = self.row_offsets, self.final_offsets
        return (
            len(rows) == len(finals) > 0
            and rows[0] == finals[0] == 0
            and rows == sorted(rows)
            and finals == sorted(finals)
            and (rows[-1], finals[-1]) == (len(self.aux_NA), len(self.final_MH))
            and self.aux_NA.shape[1] == len(self.layers) * self.final_MH.shape[1]
            and not (self.whole and finals[-1] != rows[-1] - len(self))
        )


def _read(path: Path, again: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    names = {"aux", "final", "row_offsets", "final_offsets"}
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            found = set(file.keys())
            if metadata.get("format") != FORMAT or found != names:
                raise EyrieError(f"{path}: is no hidden shard of format {FORMAT}; {again}")
            return metadata, {name: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise EyrieError(f"{path}: missing; {again}") from None
    except (SafetensorError, OSError) as error:
        raise EyrieError(f"{path}: truncated or no safetensors file ({error}); {again}") from error
