"""The journal: every answer that was paid for, one line each, appended the moment it is finished.

It lies beside the outputs and is none itself, so neither a killed job nor a deleted output loses an answer. A line is a
JSON object whose first member is the CRC-32 of the object without that member. Line 1 says the journal's generation:
how many earlier journals of this shard were set aside because its answers were asked for afresh.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from eyrie.errors import EyrieError
from eyrie.locks import take

log = logging.getLogger(__name__)

FORMAT = 1
SYNC_ROWS, SYNC_SECONDS = 64, 2.0
_PREFIX = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Journal:
    """An open journal, locked against every other process until it is closed.

    A row reaches the kernel before :meth:`append` returns, so killing the process loses none; it reaches the disk
    with the next batch (``SYNC_ROWS`` rows or ``SYNC_SECONDS``) and at the close, so a power cut loses a few.

    Args:
        path: the file; made when it is missing.
        afresh: set an existing journal that holds answers aside as ``<path>.<number>`` and start an empty one.

    Attributes:
        generation: how many journals were set aside before this one.
        records: whole records that were there when it was opened, in the order they were written. Take them out
            when they have been read: a journal can be larger than what is needed of it.
        count: whole records in the file now.

    Raises:
        EyrieError: another process holds it, the file is no journal, or the disk is full.
    """

    def __init__(self, path: Path, *, afresh: bool = False) -> None:
        self.path, self._file = path, -1
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path)
        try:
            self._open()
            if afresh and self.records:
                self._set_aside()
                self._open()
        except BaseException:
            self._close_files()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, record: dict[str, Any]) -> None:
        """Write one record behind the last; a record that does not fit on the disk leaves no trace."""
        try:
            self._write(encode(record))
            self._unsynced += 1
            if self._unsynced >= SYNC_ROWS or time.monotonic() - self._synced_at >= SYNC_SECONDS:
                self._sync()
        except OSError as error:
            raise self._explained(error) from error
        self.count += 1

    def close(self) -> None:
        if self._file < 0:
            return
        try:
            self._sync()
        except OSError as error:
            raise self._explained(error) from error
        finally:
            self._close_files()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._unsynced, self._synced_at = 0, time.monotonic()
        data = self.path.read_bytes()
        self._size = data.rfind(b"\n") + 1
        if self._size < len(data):
            os.ftruncate(self._file, self._size)
        lines = data[: self._size].split(b"\n")[:-1]
        whole = [record for record in map(decode, lines) if record is not None]
        if lines and not whole:
            raise EyrieError(f"{self.path}: is no journal of answers; move it away and run again")
        if damaged := len(lines) - len(whole):
            log.warning("%s: %d damaged lines are ignored; those prompts are answered again", self.path, damaged)
        self.generation = max(_earlier(self.path), default=0)
        if whole and "journal" in whole[0]:
            self.generation = whole.pop(0)["generation"]
        self.records, self.count = whole, len(whole)
        if not lines:
            self._begin()

    def _begin(self) -> None:
        try:
            self._write(encode({"journal": FORMAT, "generation": self.generation}))
            self._sync()
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._explained(error) from error

    def _set_aside(self) -> None:
        number = max([self.generation, *_earlier(self.path)]) + 1
        kept = self.path.with_name(f"{self.path.name}.{number}")
        os.close(self._file)
        self._file = -1
        self.path.rename(kept)
        log.info("%s: set aside as %s; its prompts are answered afresh", self.path, kept.name)

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        while left:
            left = left[os.write(self._file, left) :]
        self._size += len(line)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._unsynced, self._synced_at = 0, time.monotonic()

    def _explained(self, error: OSError) -> Exception:
        """What to raise for ``error``; half a line, if one was written, is taken back."""
        with suppress(OSError):
            os.ftruncate(self._file, self._size)
        if error.errno not in _FULL_DISK:
            return error
        return EyrieError(
            f"{self.path}: cannot grow ({os.strerror(error.errno or 0)}); free some space and run the same command "
            f"again; the {self.count} answers in it are kept"
        )

    def _close_files(self) -> None:
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1


def encode(record: dict[str, Any]) -> bytes:
    """One line with its checksum, the line end included."""
    body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    return b'{"crc32":"%08x",' % zlib.crc32(body) + body[1:] + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a line without its end; None when the line is not what :func:`encode` wrote."""
    prefix = _PREFIX.match(line)
    if prefix is None:
        return None
    body = b"{" + line[prefix.end() :]
    return json.loads(body) if zlib.crc32(body) == int(prefix[1], 16) else None


def _earlier(path: Path) -> list[int]:
    """Numbers of the journals of this shard that were set aside."""
    numbers = [other.suffix[1:] for other in path.parent.glob(f"{path.name}.*")]
    return [int(number) for number in numbers if number.isdigit()]


def _lock(path: Path) -> int:
    """Hold ``.<name>.lock`` beside ``path``; the kernel lets go of it when the process ends, however it ends."""
    lock = take(path.with_name(f".{path.name}.lock"), seconds=0.0)
    if lock is None:
        raise EyrieError(
            f"{path}: another process is answering this shard; wait for it to end, or stop it, and run again"
        )
    return lock
