"""A person in front of the admin pages."""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse

LIST = "/admin/django_jobs/jobexecution/"
WORKERS = "/admin/django_jobs/worker/"


@dataclass
class Admin:
    client: Client
    user: Any

    def get(self, url: str, **query: str) -> Any:
        return self.client.get(url, query)

    def list(self, **query: str) -> Any:
        return self.client.get(LIST, query)

    def detail(self, row: Any) -> Any:
        return self.client.get(page(row))

    def press(self, row: Any, verb: str) -> Any:
        return self.client.post(page(row, verb))

    def act(self, action: str, *rows: Any, follow: bool = False, **data: Any) -> Any:
        chosen = {"action": action, "_selected_action": [str(row.pk) for row in rows], **data}
        return self.client.post(LIST, chosen, follow=follow)


def page(row: Any, verb: str = "change") -> str:
    return reverse(f"admin:django_jobs_jobexecution_{verb}", args=(row.pk,))


def said(response: Any) -> str:
    """What the messages say."""
    return " | ".join(map(str, get_messages(response.wsgi_request)))


class Page(HTMLParser):
    """Tags and attributes as a browser would find them, and the text between."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        # Cells stand beside each other without white space between them.
        self.text += " " if tag in {"td", "th"} else ""

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def read(response: Any) -> Page:
    assert response.status_code == 200
    return Page(response.content.decode())


def ids_shown(response: Any) -> list[Any]:
    assert response.status_code == 200
    return [row.pk for row in response.context["cl"].result_list]
