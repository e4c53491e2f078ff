"""JSON lines in zstd frames: the format for what a person wants to read (``zstdcat x.jsonl.zst | less``)."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from eyrie.errors import EyrieError

CHUNK = 1 << 17  # bytes read at once
LONGEST_ROW = 1 << 28  # characters; a row of an array that has no end by then is broken


@contextmanager
def jsonl_writer(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes one row to ``path``: one zstd frame, whose bytes depend on the rows alone."""
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
    with path.open("wb") as raw, zstandard.ZstdCompressor(level=9).stream_writer(raw) as file:

        def write(row: dict[str, Any]) -> None:
            file.write(encoder.encode(row).encode() + b"\n")

        yield write


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one frame; the bytes depend on the rows alone."""
    with jsonl_writer(path) as write:
        for row in rows:
            write(row)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Stream the rows of a ``.jsonl`` file, plain, ``.zst`` or ``.gz``; a ``.json`` file may hold one array.

    Raises:
        EyrieError: naming the file and the line, when it is truncated or holds something that is no JSON object.
    """
    try:
        raw = path.open("rb")
    except FileNotFoundError:
        raise EyrieError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise EyrieError(f"{path}: is a folder, expected a file") from None
    with raw:
        yield from json_rows(raw, str(path))


def json_rows(raw: BinaryIO, name: str) -> Iterator[dict[str, Any]]:
    """Stream the rows of an open file; ``name`` says how it is compressed and is what an error names.

    Each row is parsed by itself, so what a column holds in one row says nothing about the next, and memory holds one
    chunk and one row.

    Raises:
        EyrieError: as :func:`read_jsonl`.
    """
    number = 0
    try:
        for value in _values(raw, name):
            number += 1
            if value is None:
                continue
            if not isinstance(value, dict):
                found = type(value).__name__
                raise EyrieError(f"{name}:{number}: holds {found}, expected a JSON object per line")
            yield value
    except (ValueError, RecursionError, zstandard.ZstdError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise EyrieError(f"{name}:{number + 1}: broken or truncated ({error}); make the file again") from error


def _values(raw: BinaryIO, name: str) -> Iterator[Any]:
    """What each line (or element of the array) holds, None for an empty line."""
    if name.endswith(".zst"):
        chunks = _frames(raw)
    elif name.endswith(".gz"):
        chunks = _chunks(gzip.GzipFile(fileobj=raw))  # type: ignore[arg-type]
    else:
        chunks = _chunks(raw)
    if name.removesuffix(".zst").removesuffix(".gz").endswith(".json"):
        first = b""
        while not first.strip() and (chunk := next(chunks, b"")):
            first += chunk
        chunks = chain([first], chunks)
        if first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from _elements(chunks)
            return
    for line in _lines(chunks, whole=name.endswith(".zst")):
        yield json.loads(line) if line.strip() else None


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _frames(raw: BinaryIO) -> Iterator[bytes]:
    """Bytes of all zstd frames; the library's own reader takes a cut frame for the end, so frames are followed here."""
    frame, frames = None, 0
    while chunk := raw.read(CHUNK):
        while chunk:
            if frame is None:
                frame, frames = zstandard.ZstdDecompressor().decompressobj(), frames + 1
            yield frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or not frames:
        raise EOFError("the last frame has no end")


def _lines(chunks: Iterable[bytes], *, whole: bool) -> Iterator[bytes]:
    """Lines of the chunks; with ``whole`` the last one must have its end."""
    rest: list[bytes] = []
    for chunk in chunks:
        if b"\n" not in chunk:
            rest.append(chunk)
            continue
        head, *lines, tail = chunk.split(b"\n")
        yield b"".join([*rest, head])
        yield from lines
        rest = [tail]
    if last := b"".join(rest):
        if whole:
            raise EOFError("the last line has no end")
        yield last


def _elements(chunks: Iterator[bytes]) -> Iterator[Any]:
    """Elements of one JSON array, parsed one by one as their text arrives."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, at, separator = "", 0, "["

    def more() -> bool:
        nonlocal text, at
        text, at = text[at:], 0
        wanted = max(CHUNK, len(text))  # twice as much each time: a long row is not parsed once per chunk
        have = len(text)
        while len(text) - have < wanted and (chunk := next(chunks, b"")):
            text += utf8.decode(chunk)
        return len(text) > have

    def sign() -> str:
        """The next character that is no space, stepped over."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text):
                at += 1
                return text[at - 1]
            if not more():
                raise EOFError("the array has no end")

    while sign() == separator:
        if sign() == "]" and separator == "[":
            return
        at -= 1
        separator = ","
        while True:
            try:
                value, end = decoder.raw_decode(text, at)
                break
            except ValueError:
                if len(text) - at > LONGEST_ROW or not more():
                    raise
        at = end
        yield value
    if text[at - 1] != "]":
        raise ValueError(f"expected ',' or ']', found {text[at - 1]!r}")
