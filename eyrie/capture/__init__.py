"""Hidden-state capture: run the target over token rows and keep the states that a drafter learns from."""

from eyrie.capture.stage import capture

__all__ = ["capture"]
