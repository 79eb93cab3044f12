"""Protects processes from being taken for hung after a pause of everything, the one that looks included."""

from __future__ import annotations

from manylora.system.own_clock import OwnClock


def test_a_gap_counts_only_as_a_look_may_take() -> None:
    times = iter([100.0, 100.5, 102.0, 702.0, 702.25])
    clock = OwnClock(2.0, lambda: next(times))
    assert [clock.read() for _ in range(4)] == [0.5, 2.0, 4.0, 4.25]
