from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_jobs.dispatchers import get_dispatcher
from django_jobs.dispatchers.dummy import REMEMBERED, DummyDispatcher
from django_jobs.fields import uuid7
from django_jobs.models import JobExecution
from django_jobs.states import Status
from tests.acc.jobs import mark
from tests.dispatchers.contract import DispatcherContract

if TYPE_CHECKING:
    from pytest_django import DjangoCaptureOnCommitCallbacks, Settings


class TestDummyDispatcher(DispatcherContract):
    wakes = looks = False

    @pytest.fixture
    def dispatcher(self) -> DummyDispatcher:
        return DummyDispatcher({})

    def test_it_remembers_what_it_was_told(self, dispatcher: DummyDispatcher) -> None:
        first, second, third = uuid7(), uuid7(), uuid7()
        dispatcher.hint("mail", [first, second], priority=50)
        dispatcher.hint("default", [third])
        dispatcher.cancel_hint([first])
        assert [(hint.queue, hint.ids, hint.priority) for hint in dispatcher.hints] == [
            ("mail", (first, second), 50),
            ("default", (third,), 0),
        ]
        assert (dispatcher.ids, list(dispatcher.cancels)) == ([first, second, third], [first])
        dispatcher.clear()
        assert (dispatcher.ids, list(dispatcher.cancels)) == ([], [])

    def test_it_forgets_the_oldest(self, dispatcher: DummyDispatcher) -> None:
        first = uuid7()
        dispatcher.hint("mail", [first])
        dispatcher.cancel_hint([first])
        for _ in range(REMEMBERED):
            dispatcher.hint("mail", [])
        dispatcher.cancel_hint([uuid7()] * REMEMBERED)
        assert first not in dispatcher.ids and first not in dispatcher.cancels
        assert len(dispatcher.hints) == len(dispatcher.cancels) == REMEMBERED

    def test_options_are_refused(self) -> None:
        with pytest.raises(ImproperlyConfigured, match="dummy dispatcher has no options; found"):
            DummyDispatcher({"LISTEN": "default"})


@pytest.mark.django_db
def test_a_push_is_hinted_and_does_not_run(
    settings: Settings, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    settings.DJANGO_JOBS = {"DISPATCHER": "dummy"}
    with django_capture_on_commit_callbacks(execute=True):
        row = mark.using(queue="mail", priority="high").push()
    dispatcher = get_dispatcher()
    assert isinstance(dispatcher, DummyDispatcher)
    assert [(hint.queue, hint.ids, hint.priority) for hint in dispatcher.hints] == [("mail", (row.pk,), 50)]
    assert JobExecution.objects.get().status == Status.PENDING
    assert mark.mode == "dummy"
