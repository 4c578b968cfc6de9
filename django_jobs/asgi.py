"""The lifespan protocol of ASGI, so that jobs in a server's process end in order; projects wrap their application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from django_jobs.dispatchers import get_dispatcher

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Event, Receive, Send], Awaitable[None]]


def with_lifespan(application: Application) -> Application:
    """Return the application with a shutdown, which drains runs of the direct dispatcher before the server exits.

    Django's own application has no lifespan, and some servers, such as uvicorn, end by re-raising the signal they got,
    which leaves Python no time for exit hooks.
    """

    async def wrapped(scope: Event, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.to_thread(_end)
        await send({"type": "lifespan.shutdown.complete"})

    return wrapped


def _end() -> None:
    get_dispatcher().close()
