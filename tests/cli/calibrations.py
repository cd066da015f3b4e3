"""Calibrations with given counts of paths."""

from medusa_decoding.tuning.calibration import NONE, Calibration


def with_counts(paths, ranks=2, made=None):
    """Texts of one prompt, each with one counted position: as many with each path as `paths` says."""
    heads = len(next(iter(paths)))
    tail = ((NONE,) * heads,) * (heads - 1)
    return Calibration(
        heads, ranks, [[(path, *tail) for path, count in paths.items() for _ in range(count)]], made or {}
    )
