"""The merge: which rows train, which are held out, what is left out and why, and the draft vocabulary."""

from eyrie.merge.rows import SPLITS, split_of
from eyrie.merge.stage import merge

__all__ = ["SPLITS", "merge", "split_of"]
