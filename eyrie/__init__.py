"""Eyrie raises drafters: small draft models that make a large language model answer faster."""

__version__ = "0.1.0"
