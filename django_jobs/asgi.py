"""The lifespan of an ASGI server, so that jobs in its process end in order; projects wrap their application in it."""

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
    """Return the application with an end: what the direct dispatcher runs is drained before the server lets go.

    Django's own application knows no lifespan, and some servers, uvicorn for one, end themselves by the signal they
    were sent, which leaves Python no time to end anything.
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
