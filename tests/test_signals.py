from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from django_jobs import WorkerLost, job, registry, signals
from django_jobs.models import JobExecution
from django_jobs.signals import emit, job_failed, job_finished, job_succeeded
from tests.acc import jobs

START = datetime(2026, 1, 1, tzinfo=UTC)


def execution(**fields: Any) -> JobExecution:
    values = {
        "id": UUID(int=7),
        "job_name": "acc.mark",
        "attempt": 1,
        "max_attempts": 3,
        "started_at": START,
        "updated_at": START + timedelta(milliseconds=12),
    }
    return JobExecution(**values | fields)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of ended runs, from INFO up, with its receivers connected."""
    signals.connect_logging()
    with caplog.at_level(logging.INFO, "django_jobs"):
        yield caplog
    for signal, receiver in ((job_succeeded, "success"), (job_failed, "failure"), (signals.job_cancelled, "cancel")):
        signal.disconnect(dispatch_uid=f"django_jobs.log_{receiver}")


class TestEmit:
    def test_receivers_get_the_execution_and_the_job_and_what_the_signal_adds(self) -> None:
        got: list[dict[str, Any]] = []

        def receive(**kwargs: Any) -> None:
            got.append(kwargs)

        row, error = execution(), ValueError("x")
        job_failed.connect(receive, sender=jobs.mark)
        try:
            emit(job_failed, jobs.mark, row, exception=error, will_retry=True)
        finally:
            job_failed.disconnect(receive, sender=jobs.mark)
        assert got == [
            {
                "signal": job_failed,
                "sender": jobs.mark,
                "job": jobs.mark,
                "execution": row,
                "exception": error,
                "will_retry": True,
            }
        ]

    def test_the_sender_of_a_bound_copy_is_the_job_itself(self) -> None:
        senders: list[Any] = []

        def receive(sender: Any, **kwargs: Any) -> None:
            senders.append(sender)

        job_finished.connect(receive, sender=jobs.mark)
        try:
            emit(job_finished, jobs.mark.using(priority=1), execution())
            emit(job_finished, jobs.slow, execution())
        finally:
            job_finished.disconnect(receive, sender=jobs.mark)
        assert len(senders) == 1
        assert senders[0] is jobs.mark

    def test_a_receiver_that_raises_is_logged_and_stops_no_other(self, logged: pytest.LogCaptureFixture) -> None:
        got: list[Any] = []

        def broken(**kwargs: Any) -> None:
            raise ValueError("a bad receiver")

        def sound(**kwargs: Any) -> None:
            got.append(kwargs["execution"])

        for receiver in (broken, sound):
            job_finished.connect(receiver)
        try:
            emit(job_finished, jobs.mark, execution())
        finally:
            for receiver in (broken, sound):
                job_finished.disconnect(receiver)
        assert got == [execution()]
        (record,) = [record for record in logged.records if record.name == "django_jobs.signals"]
        assert "job_finished" in record.getMessage()
        assert "broken raised ValueError: a bad receiver" in record.getMessage()

    def test_a_receiver_that_ends_its_thread_is_logged_like_any_other(self, logged: pytest.LogCaptureFixture) -> None:
        def leaving(**kwargs: Any) -> None:
            raise SystemExit("a bad receiver")

        job_finished.connect(leaving)
        try:
            emit(job_finished, jobs.mark, execution())
        finally:
            job_finished.disconnect(leaving)
        assert "raised SystemExit: a bad receiver" in logged.text

    def test_without_receivers_nothing_is_sent(self) -> None:
        silent = mock.MagicMock(receivers=[])
        emit(silent, jobs.mark, execution())
        silent.send_robust.assert_not_called()


class TestLogging:
    def test_a_run_that_ended_well_is_one_line_at_info(self, logged: pytest.LogCaptureFixture) -> None:
        emit(job_succeeded, jobs.mark, execution(completed_at=START + timedelta(milliseconds=12)))
        assert logged.record_tuples == [
            ("django_jobs.runs", logging.INFO, f"ok acc.mark {UUID(int=7)} attempt 1/3 in 0.012 s")
        ]

    def test_a_cancelled_run_is_one_line_at_info(self, logged: pytest.LogCaptureFixture) -> None:
        emit(signals.job_cancelled, jobs.mark, execution())
        emit(signals.job_cancelled, jobs.mark, execution(attempt=0, started_at=None))
        emit(signals.job_cancelled, jobs.mark, execution(started_at=None))
        assert [text for _name, _level, text in logged.record_tuples] == [
            f"cancelled acc.mark {UUID(int=7)} attempt 1/3 in 0.012 s",
            f"cancelled acc.mark {UUID(int=7)} before its first attempt",
            f"cancelled acc.mark {UUID(int=7)} after attempt 1/3",
        ]

    def test_a_failure_that_will_be_retried_is_one_line_at_warning(self, logged: pytest.LogCaptureFixture) -> None:
        emit(job_failed, jobs.mark, execution(), exception=raised(ValueError("no")), will_retry=True)
        (record,) = logged.records
        assert (record.levelno, record.exc_info) == (logging.WARNING, None)
        line = f"failed acc.mark {UUID(int=7)} attempt 1/3 in 0.012 s, will retry: ValueError: no"
        assert record.getMessage() == line

    def test_an_exception_without_text_is_logged_by_its_class(self, logged: pytest.LogCaptureFixture) -> None:
        emit(job_failed, jobs.mark, execution(), exception=raised(ValueError()), will_retry=True)
        assert logged.records[0].getMessage().endswith("will retry: ValueError")

    def test_a_message_of_many_lines_is_one_line_and_leaves_a_terminal_alone(
        self, logged: pytest.LogCaptureFixture
    ) -> None:
        emit(job_failed, jobs.mark, execution(), exception=raised(ValueError("no\nINFO ok \x1b[2J")), will_retry=True)
        assert logged.records[0].getMessage().endswith("ValueError: no INFO ok \ufffd[2J")

    def test_the_last_failure_is_an_error_with_the_traceback(self, logged: pytest.LogCaptureFixture) -> None:
        emit(job_failed, jobs.mark, execution(), exception=raised(ValueError("no")), will_retry=False)
        (record,) = logged.records
        assert record.levelno == logging.ERROR
        assert record.exc_info
        assert "def raised" not in record.getMessage()

    def test_a_worker_that_died_is_an_error_without_a_traceback(self, logged: pytest.LogCaptureFixture) -> None:
        emit(job_failed, jobs.mark, execution(), exception=WorkerLost("host pid 3 is gone"), will_retry=False)
        (record,) = logged.records
        assert record.levelno == logging.ERROR
        assert not record.exc_info
        assert record.getMessage().endswith("WorkerLost: host pid 3 is gone")

    def test_a_sensitive_job_tells_neither_message_nor_traceback(self, logged: pytest.LogCaptureFixture) -> None:
        with registry.isolated():

            @job(name="own.secret", sensitive=True)
            def secret() -> None: ...

            for will_retry in (True, False):
                emit(job_failed, secret, execution(), exception=raised(ValueError("hunter2")), will_retry=will_retry)
        assert "ValueError" in logged.text
        assert "hunter2" not in logged.text
        assert all(not record.exc_info for record in logged.records)

    def test_an_exception_whose_text_raises_is_logged_all_the_same(self, logged: pytest.LogCaptureFixture) -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no words")

        emit(job_failed, jobs.mark, execution(), exception=Mute(), will_retry=True)
        assert "Mute: <str() failed>" in logged.text

    def test_the_receivers_connect_once(self, logged: pytest.LogCaptureFixture) -> None:
        signals.connect_logging()
        emit(job_succeeded, jobs.mark, execution())
        assert len(logged.records) == 1

    def test_nothing_is_put_together_for_a_level_that_nobody_reads(self, logged: pytest.LogCaptureFixture) -> None:
        row = mock.MagicMock()
        with logged.at_level(logging.CRITICAL, "django_jobs.runs"):
            emit(job_succeeded, jobs.mark, row)
            emit(job_failed, jobs.mark, row, exception=ValueError(), will_retry=True)
            emit(signals.job_cancelled, jobs.mark, row)
        assert row.mock_calls == []
        assert logged.records == []


def raised(exception: Exception) -> Exception:
    """Return the exception as it was caught, with a traceback."""
    try:
        raise exception
    except Exception as caught:
        return caught
