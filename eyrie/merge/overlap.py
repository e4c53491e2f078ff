"""Which texts share a long run of words with texts that must stay unseen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

MIX = 6364136223846793005  # odd, so that multiplying by it loses nothing modulo 2**64
# Han and kana are written without spaces, so each of their characters counts as a word.
SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}"
WORD = rf"[{SPACELESS}]|[\w--[{SPACELESS}]]+"
FILTER_BITS = 32  # of the filter per run: three lookups in a hundred go on to the exact search


def ngrams(texts: pl.Series, size: int) -> tuple[np.ndarray, np.ndarray]:
    """All runs of ``size`` words: int64 ``[R]``, positions in ``texts``, and uint64 ``[R]``, hashes of the runs.

    Words are compared without case and compatibility forms; punctuation and spacing do not count. Han and kana
    characters are words of their own. The order of the runs is no one's business.
    """
    import numpy as np
    import polars as pl

    numbers = pl.Series("number", np.arange(len(texts)))
    plain = texts.str.len_bytes() == texts.str.len_chars()
    found = [
        _ngrams(numbers.filter(plain), texts.filter(plain), size),
        _ngrams(numbers.filter(~plain), texts.filter(~plain).str.normalize("NFKC"), size),  # dear, and idle on ASCII
    ]
    rows, runs = zip(*found, strict=True)
    return np.concatenate(rows), np.concatenate(runs)


def _ngrams(numbers: pl.Series, texts: pl.Series, size: int) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    lists = texts.str.to_lowercase().str.extract_all(WORD)
    lengths = lists.list.len()
    filled = lengths >= size
    if not filled.any():
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    words = lists.filter(filled).explode().hash(seed=0).to_numpy()
    rows = np.repeat(numbers.filter(filled).to_numpy(), lengths.filter(filled).to_numpy())
    whole = rows[: len(rows) - size + 1] == rows[size - 1 :]
    return rows[: len(whole)][whole], rolling(words, size)[whole]


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

        self._sorted = np.unique(np.concatenate([np.zeros(0, np.uint64), *parts]))
        bits = max(10, (FILTER_BITS * len(self._sorted)).bit_length())
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(2 ** (bits - 3), np.uint8)
        places = self._sorted >> self._shift
        if len(places):
            byte, bit = places >> np.uint64(3), np.uint8(1) << (places & np.uint64(7)).astype(np.uint8)
            starts = np.flatnonzero(np.diff(byte, prepend=byte[0] + np.uint64(1)))
            self._table[byte[starts]] = np.bitwise_or.reduceat(bit, starts)

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
