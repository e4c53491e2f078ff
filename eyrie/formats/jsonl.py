"""JSON lines in zstd frames: the format for what a person wants to read (``zstdcat x.jsonl.zst | less``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from eyrie.errors import EyrieError


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one frame; the bytes depend on the rows alone."""
    with path.open("wb") as raw, zstandard.ZstdCompressor(level=9).stream_writer(raw) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Stream the rows of a ``.jsonl`` or ``.jsonl.zst`` file.

    Raises:
        EyrieError: naming the file and the line, when it is truncated or holds something that is no JSON object.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            lines = _lines(raw) if path.suffix == ".zst" else iter(raw)
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise EyrieError(f"{path}:{number}: holds {type(row).__name__}, expected a JSON object per line")
                yield row
    except FileNotFoundError:
        raise EyrieError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, zstandard.ZstdError, EOFError) as error:
        raise EyrieError(f"{path}:{number}: broken or truncated ({error}); make the file again") from error


def _lines(raw: BinaryIO) -> Iterator[bytes]:
    """Lines of all frames; the library's own reader takes a cut frame for the end, so frames are followed here."""
    frame, frames, rest = None, 0, b""
    while chunk := raw.read(1 << 17):
        while chunk:
            if frame is None:
                frame, frames = zstandard.ZstdDecompressor().decompressobj(), frames + 1
            *whole, rest = (rest + frame.decompress(chunk)).split(b"\n")
            yield from whole
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or not frames:
        raise EOFError("the last frame has no end")
    if rest:
        raise EOFError("the last line has no end")
