"""Numbers as people read them. Every function takes None for "not measured" and shows a dash."""

from __future__ import annotations

NONE = "\N{EN DASH}"


def count(value: float | None) -> str:
    """``12345`` -> ``12,345``."""
    return NONE if value is None else f"{round(value):,}"


def short(value: float | None) -> str:
    """Three significant digits with a suffix: ``156240`` -> ``156K``, ``1250000`` -> ``1.25M``."""
    if value is None:
        return NONE
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g}{unit}"
    return f"{round(value):,}"


def size(value: float | None) -> str:
    """Bytes in decimal units: ``93400000`` -> ``93.4 MB``."""
    if value is None:
        return NONE
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale * 0.9995:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:,.0f} {unit}"  # past TB
    return f"{round(value)} B"


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    """``1.3214`` -> ``1.32×``."""
    return NONE if value is None else f"{value:.2f}\N{MULTIPLICATION SIGN}"


def signed(value: float | None) -> str:
    """``0.35`` -> ``+0.35``; the minus is a typographic one."""
    return NONE if value is None else f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def share(value: float | None, digits: int = 1) -> str:
    """``0.8741`` -> ``87.4%``."""
    return NONE if value is None else f"{100 * value:.{digits}f}%"


def reason(name: str) -> str:
    """``cross_dataset_duplicate`` -> ``cross dataset duplicate``."""
    return name.replace("_", " ")


def plural(value: float, noun: str) -> str:
    """``1 row``, ``12 rows``."""
    return f"{count(value)} {noun}" + ("" if value == 1 else "s")
