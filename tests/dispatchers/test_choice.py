"""Which dispatcher is in force, and what happens when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_jobs import dispatchers
from django_jobs.dispatchers import announce, announce_cancel, get_dispatcher
from django_jobs.dispatchers.database import DatabaseDispatcher
from django_jobs.fields import uuid7
from tests.dispatchers import recording

if TYPE_CHECKING:
    from pytest_django import Settings


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next failure be logged, whatever an earlier test did."""
    monkeypatch.setattr(dispatchers, "_logged_at", float("-inf"))
    monkeypatch.setattr(dispatchers, "_unlogged", 0)


def test_the_database_is_the_default() -> None:
    assert isinstance(get_dispatcher(), DatabaseDispatcher)
    assert get_dispatcher() is get_dispatcher()


def test_a_dotted_path_with_options_names_a_third_partys_dispatcher(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": {"BACKEND": recording.RECORDING, "OPTIONS": {"a": 1}}}
    assert isinstance(get_dispatcher(), recording.RecordingDispatcher)
    assert get_dispatcher().options == {"a": 1}


def test_another_dispatcher_in_the_settings_closes_the_old_one(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": recording.RECORDING}
    old = get_dispatcher()
    settings.DJANGO_JOBS = {"DISPATCHER": "database"}
    assert get_dispatcher().kind == "database"
    assert isinstance(old, recording.RecordingDispatcher)
    assert old.closed


def test_other_settings_change_without_a_new_dispatcher(settings: Settings) -> None:
    before = get_dispatcher()
    settings.DJANGO_JOBS = {"CONCURRENCY": 3}
    assert get_dispatcher() is before


def test_other_caches_may_mean_another_server(settings: Settings) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": recording.RECORDING}
    old = get_dispatcher()
    settings.CACHES = {**settings.CACHES, "more": settings.CACHES["default"]}
    assert get_dispatcher() is not old
    assert isinstance(old, recording.RecordingDispatcher)
    assert old.closed


@pytest.mark.parametrize(
    "path", ["no.such.module", f"{recording.__name__}.Absent", f"{recording.__name__}.no_dispatcher"]
)
def test_a_path_that_leads_to_no_dispatcher_is_refused_by_name(settings: Settings, path: str) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": path}
    with pytest.raises(ImproperlyConfigured, match=rf"DISPATCHER is '{path}'.*expected"):
        get_dispatcher()


@pytest.mark.usefixtures("fresh_log")
def test_a_failing_dispatcher_is_logged_once_in_a_while_with_the_number_left_out(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": recording.FAILING}
    with caplog.at_level(logging.ERROR, "django_jobs"):
        announce("default", [uuid7()])
        announce("default", [uuid7()])
        announce_cancel([uuid7()])
        assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
            "the dispatcher failed, 1 hint(s) for queue 'default' not sent"
        ]
        monkeypatch.setattr(dispatchers, "LOG_INTERVAL", 0.0)
        announce_cancel([uuid7()])
    assert "(2 more failures since the last message)" in caplog.records[-1].getMessage()


@pytest.mark.usefixtures("fresh_log")
def test_a_dispatcher_that_cannot_even_be_made_is_logged_too(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": "no.such.module"}
    with caplog.at_level(logging.ERROR, "django_jobs"):
        announce("default", [uuid7()])
    assert "the dispatcher failed" in caplog.text


@pytest.mark.parametrize("tell", [lambda: announce("mail", [uuid7()]), lambda: announce_cancel([uuid7()])])
def test_a_run_is_not_interrupted_while_it_sends_a_hint(
    tell: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entered = mock.MagicMock()
    monkeypatch.setattr(dispatchers, "shielded", lambda: entered)
    tell()
    assert not caplog.records
    entered.__enter__.assert_called_once_with()
    assert entered.__exit__.call_count == 1
