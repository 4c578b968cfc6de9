"""The dispatcher that the docs show how to write keeps the contract."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_jobs.dispatchers import Dispatcher
from tests.dispatchers.contract import DispatcherContract
from tests.support import ROOT


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """What the page defines."""
    text = (ROOT / "docs" / "howto" / "dispatchers.md").read_text()
    (code,) = re.findall(r"^<!-- run -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "shop.dispatchers"}
    exec(compile(code, "docs/howto/dispatchers.md", "exec"), names)
    return names


class TestSocketDispatcher(DispatcherContract):
    @pytest.fixture
    def dispatcher(self, shown: dict[str, Any]) -> Iterator[Dispatcher]:
        # The path of a socket is short.
        with tempfile.TemporaryDirectory() as folder:
            made: Dispatcher = shown["SocketDispatcher"]({"FOLDER": folder})
            yield made
            made.close()
            for path in Path(folder).iterdir():
                path.unlink()

    def test_a_wrong_option_is_refused(self, shown: dict[str, Any]) -> None:
        with pytest.raises(ImproperlyConfigured, match="expected FOLDER"):
            shown["SocketDispatcher"]({})
