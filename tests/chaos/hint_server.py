"""The server of the redis dispatcher in a chaos run: what is done to it, and whether it is away; for the world."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.redis_servers import RedisServer


class HintServer:
    """A server that is emptied, hung, killed and restarted; what it held was nothing but hints."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        # What brings it back; None while it is there.
        self._remedy: Callable[[], None] | None = None

    def strike(self, kind: str) -> None:
        """Do it; the server may be away from then on, until mend()."""
        match kind:
            case "flush redis":
                self._tell(b"FLUSHALL")
            case "hang redis":
                self._server.send(signal.SIGSTOP)
                self._remedy = lambda: self._server.send(signal.SIGCONT)
            case "restart redis":
                # It comes back with the hints it had, whose rows are finished by then, and finds them again when it
                # is killed later.
                self._tell(b"SHUTDOWN SAVE")
                self._server.kill()
                self._remedy = self._server.start
            case "kill redis":
                self._server.kill()
                self._remedy = self._server.start
            case _:
                raise ValueError(f"{kind!r} is nothing that happens to Redis")

    @property
    def is_away(self) -> bool:
        return self._remedy is not None

    def mend(self) -> None:
        """Have it answer again."""
        if self._remedy is not None:
            self._remedy()
            self._remedy = None

    def _tell(self, command: bytes) -> None:
        answer = self._server.answer(command)
        # After SHUTDOWN there is none.
        if answer not in (b"", b"+OK\r\n"):
            raise RuntimeError(f"The server answered {answer!r} to {command!r}, expected +OK.")
