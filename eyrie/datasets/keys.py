"""A set of hashed strings that costs 16 to 32 bytes a string."""

from __future__ import annotations

import hashlib
from array import array


class KeySet:
    """Strings seen so far, as 64-bit hashes in an open-addressing table.

    A source of ten million rows takes 270 MB here, where a set of the strings takes over a gigabyte. Two of ten million
    different strings are taken for the same with a probability of 3 in a million.
    """

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 << 12))
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def add(self, text: str) -> bool:
        """Remember ``text``; False when it was there already."""
        key = (
            int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1
        )
        if not self._place(self._table, key):
            return False
        self._used += 1
        if 2 * self._used > len(self._table):
            larger = array("Q", bytes(16 * len(self._table)))
            for old in self._table:
                if old:
                    self._place(larger, old)
            self._table = larger
        return True

    @staticmethod
    def _place(table: array[int], key: int) -> bool:
        """Put ``key`` into its slot; False when it stands there."""
        mask = len(table) - 1
        at = key & mask
        while table[at]:
            if table[at] == key:
                return False
            at = (at + 1) & mask
        table[at] = key
        return True
