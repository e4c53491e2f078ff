"""Which texts share a long run of words with texts that must stay unseen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

MIX = 6364136223846793005  # odd, so that multiplying by it loses nothing modulo 2**64
# Han and kana are written without spaces, so each of their characters counts as a word.
SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}"
END_MARKS = ".?!\u2026 "
WORD = rf"[{SPACELESS}]|[\w--[{SPACELESS}]]+"
CHUNK = 1 << 20  # runs that are put into the filter at a time
FILTER_BITS = 32  # of the filter per run: three lookups in a hundred go on to the exact search


class Words(NamedTuple):
    """What texts are compared by.

    Attributes:
        row: for each run of words the position of its text, int64 ``[R]``.
        run: its hash, uint64 ``[R]``. The order of the runs is no one's business.
        short_row: positions of short texts, int64 ``[S]``.
        short: hashes of those texts, uint64 ``[S]``.
    """

    row: np.ndarray
    run: np.ndarray
    short_row: np.ndarray
    short: np.ndarray


def words_of(texts: pl.Series, size: int, least: int) -> Words:
    """All runs of ``size`` words, and as a whole the texts of fewer words, but not of fewer than ``least``.

    Words are compared without case and compatibility forms; punctuation and spacing do not count. Han and kana
    characters are words of their own. In a short text (it is often a formula) only spacing, and the marks at its ends,
    do not count.
    """
    import numpy as np
    import polars as pl

    numbers = pl.Series("number", np.arange(len(texts)))
    plain = texts.str.len_bytes() == texts.str.len_chars()
    found = [
        _words_of(numbers.filter(plain), texts.filter(plain), size, least),
        # dear, and idle on ASCII
        _words_of(numbers.filter(~plain), texts.filter(~plain).str.normalize("NFKC"), size, least),
    ]
    return Words(*map(np.concatenate, zip(*found, strict=True)))


def _words_of(numbers: pl.Series, texts: pl.Series, size: int, least: int) -> Words:
    import numpy as np

    texts = texts.str.to_lowercase()
    lists = texts.str.extract_all(WORD)
    lengths = lists.list.len()
    filled, short = lengths >= size, (lengths >= least) & (lengths < size)
    row, run = np.zeros(0, np.int64), np.zeros(0, np.uint64)
    if filled.any():
        words = lists.filter(filled).explode().hash(seed=0).to_numpy()
        rows = np.repeat(numbers.filter(filled).to_numpy(), lengths.filter(filled).to_numpy())
        whole = rows[: len(rows) - size + 1] == rows[size - 1 :]
        row, run = rows[: len(whole)][whole], rolling(words, size)[whole]
    wholes = texts.filter(short).str.replace_all(r"\s+", " ").str.strip_chars(END_MARKS)
    return Words(row, run, numbers.filter(short).to_numpy(), wholes.hash(seed=0).to_numpy())


def rolling(words: np.ndarray, size: int) -> np.ndarray:
    """Hash of ``words[i : i + size]`` for every i: uint64 ``[len(words) - size + 1]`` from uint64 ``[len(words)]``.

    Blocks of doubling width are joined, hash(ab) = hash(a) * MIX**len(b) + hash(b), so that the work grows with the
    logarithm of ``size``.
    """
    import numpy as np

    count = len(words) - size + 1
    run, covered = np.zeros(count, np.uint64), 0
    block, width = words, 1
    while True:
        power = np.uint64(pow(MIX, width, 2**64))
        if size & width:
            run = run * power + block[covered : covered + count]
            covered += width
        if covered == size:
            return run
        block = block[:-width] * power + block[width:]
        width *= 2


class Runs:
    """A set of run hashes that answers for a hundred million lookups.

    Most lookups end at one bit of a table indexed by a hash's leading bits; what passes is searched exactly.
    """

    def __init__(self, parts: Iterable[np.ndarray]) -> None:
        import numpy as np

        self._sorted = _distinct(list(parts))
        bits = max(10, (FILTER_BITS * len(self._sorted)).bit_length())
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(2 ** (bits - 3), np.uint8)
        for first in range(0, len(self._sorted), CHUNK):
            places = self._sorted[first : first + CHUNK] >> self._shift
            byte, bit = places >> np.uint64(3), np.uint8(1) << (places & np.uint64(7)).astype(np.uint8)
            starts = np.flatnonzero(np.diff(byte, prepend=byte[0] + np.uint64(1)))
            self._table[byte[starts]] |= np.bitwise_or.reduceat(bit, starts)

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, run: int) -> bool:
        import numpy as np

        return bool(self.among(np.array([run], np.uint64))[0])

    def among(self, runs: np.ndarray) -> np.ndarray:
        """bool per hash of ``runs`` (uint64)."""
        import numpy as np

        places = runs >> self._shift
        bits = self._table[places >> np.uint64(3)] >> (places & np.uint64(7)).astype(np.uint8)
        found = (bits & np.uint8(1)).view(np.bool_)
        likely = np.flatnonzero(found)
        at = np.minimum(np.searchsorted(self._sorted, runs[likely]), max(0, len(self) - 1))
        found[likely] = self._sorted[at] == runs[likely] if len(self) else False
        return found


def _distinct(parts: list[np.ndarray]) -> np.ndarray:
    """All values, ascending, each once; what np.unique does, with half the memory."""
    import numpy as np

    values = np.concatenate([np.zeros(0, np.uint64), *parts])
    values.sort()
    again = np.zeros(len(values), np.bool_)
    again[1:] = values[1:] == values[:-1]
    return values[~again] if again.any() else values
