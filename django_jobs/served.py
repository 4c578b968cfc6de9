"""Which queues a worker serves, or several of them together: some, or any but some; and how its row says that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from django.db.models import Q

# Prefix of an excluded queue's name; no name begins with it.
LEFT_OUT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The queues of `names`, or all others."""

    names: frozenset[str] = frozenset()
    # Does it serve any queue but those of `names`?
    is_any_but: bool = False

    @classmethod
    def of(cls, queues: Collection[str] | None, exclude: Collection[str]) -> Served:
        """Return what a process serves with these options; `queues` None means any."""
        if queues is None:
            return cls(names=frozenset(exclude), is_any_but=True)
        return cls(names=frozenset(queues).difference(exclude))

    @classmethod
    def from_row(cls, queues: Sequence[str] | None) -> Served:
        """Return the value of `Worker.queues` as Served."""
        if queues is not None and not all(name.startswith(LEFT_OUT) for name in queues):
            return cls(names=frozenset(queues))
        return cls(names=frozenset(name.removeprefix(LEFT_OUT) for name in queues or ()), is_any_but=queues != [])

    def to_row(self) -> list[str] | None:
        """Return the value for `Worker.queues`: names, names with a minus for all others, None for any queue."""
        if self.is_any_but:
            return [f"{LEFT_OUT}{name}" for name in sorted(self.names)] or None
        return sorted(self.names)

    def __or__(self, other: Served) -> Served:
        match self.is_any_but, other.is_any_but:
            case False, False:
                return Served(names=self.names | other.names)
            case True, True:
                return Served(names=self.names & other.names, is_any_but=True)
            case True, False:
                return Served(names=self.names - other.names, is_any_but=True)
            case _:
                return other | self

    def __sub__(self, names: frozenset[str]) -> Served:
        left = self.names | names if self.is_any_but else self.names - names
        return Served(names=left, is_any_but=self.is_any_but)

    def __contains__(self, queue: str) -> bool:
        return (queue in self.names) != self.is_any_but

    def __bool__(self) -> bool:
        return self.is_any_but or bool(self.names)

    def among(self, known: frozenset[str]) -> frozenset[str]:
        """Return the names of its queues; if it serves any but some, those among the known ones."""
        return known - self.names if self.is_any_but else self.names

    def condition(self) -> Q:
        """Return the condition that a row is in one of these queues."""
        named = Q(queue__in=self.names)
        if not self.is_any_but:
            return named
        return ~named if self.names else Q()
