"""Measuring a drafter: suites, the interleaved driver, statistics, break-even and verdict."""
