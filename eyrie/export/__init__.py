"""Export: a trained drafter in the layout that a serving engine loads, proved by reading it back."""

from eyrie.export.stage import export

__all__ = ["export"]
