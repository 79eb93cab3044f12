"""Protects requests from a replica that stands still: the router must notice, and only then."""

from __future__ import annotations

from manylora.fleet.routing import Reports


def test_a_replica_that_stops_reporting_is_silent_until_it_reports_again() -> None:
    reports = Reports(3.0)
    for second in range(10):
        reports.note({"a": second, "b": min(second, 4)}, float(second))
        assert reports.silent == (frozenset({"b"}) if second >= 7 else frozenset())
    reports.note({"a": 10, "b": 5}, 10.0)
    assert reports.silent == frozenset()


def test_when_nobody_is_heard_nobody_is_silent() -> None:
    reports = Reports(3.0)
    reports.note({"a": 1, "b": 1}, 0.0)
    reports.note({"a": 1, "b": 1}, 100.0)
    assert reports.silent == frozenset()


def test_a_new_replica_has_its_time_and_one_that_went_is_forgotten() -> None:
    reports = Reports(3.0)
    reports.note({"a": 1}, 0.0)
    reports.note({"a": 2, "new": -1}, 10.0)
    assert reports.silent == frozenset()
    reports.note({"a": 3, "new": -1}, 13.0)
    assert reports.silent == frozenset({"new"})
    reports.note({"a": 4}, 14.0)
    assert reports.silent == frozenset()
