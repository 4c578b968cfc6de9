"""Draw the statuses of an execution and the moves between them as SVG, from `states.TRANSITIONS`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from django_jobs.states import FINAL, TRANSITIONS, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django_jobs.states import Transition

Edge = tuple[Status | None, Status]

WIDTH, HEIGHT = 132, 44
# The middle of each box; None is the place a row comes from before it exists.
PLACES: dict[Status | None, tuple[int, int]] = {
    None: (50, 190),
    Status.PENDING: (230, 190),
    Status.RUNNING: (560, 190),
    Status.SCHEDULED: (395, 330),
    Status.OK: (850, 190),
    Status.ERROR: (850, 70),
    Status.CANCELLED: (850, 330),
}
# How each arrow runs: an SVG path, and where its words stand (x, y, anchor). Every move of the code needs one.
ROUTES: dict[Edge, tuple[str, tuple[int, int, str]]] = {
    (None, Status.PENDING): ("M62 190 H160", (110, 182, "middle")),
    (None, Status.SCHEDULED): ("M50 202 V330 H325", (190, 322, "middle")),
    (Status.PENDING, Status.RUNNING): ("M298 180 H490", (394, 172, "middle")),
    (Status.RUNNING, Status.PENDING): ("M492 202 H300", (394, 220, "middle")),
    (Status.PENDING, Status.SCHEDULED): ("M250 214 C260 270 300 310 327 318", (258, 290, "end")),
    (Status.SCHEDULED, Status.PENDING): ("M352 306 C330 280 300 240 280 216", (340, 266, "start")),
    (Status.RUNNING, Status.SCHEDULED): ("M545 214 C530 270 500 310 465 322", (532, 284, "start")),
    (Status.RUNNING, Status.OK): ("M628 190 H780", (704, 182, "middle")),
    (Status.RUNNING, Status.ERROR): ("M590 166 C640 95 710 74 780 71", (660, 74, "middle")),
    (Status.RUNNING, Status.CANCELLED): ("M612 214 C660 290 710 318 780 324", (694, 262, "start")),
    (Status.PENDING, Status.CANCELLED): ("M180 214 C170 440 560 440 800 356", (400, 424, "middle")),
    (Status.SCHEDULED, Status.CANCELLED): ("M463 338 C560 350 680 350 780 338", (600, 364, "middle")),
    (Status.ERROR, Status.PENDING): ("M830 46 C760 -10 280 -20 236 164", (400, 52, "middle")),
    (Status.CANCELLED, Status.PENDING): ("M918 322 C990 250 985 20 880 -8 C760 -40 290 -50 216 164", (252, 40, "end")),
}


def edges(transitions: Mapping[str, Transition] = TRANSITIONS) -> dict[Edge, list[str]]:
    """Return the verbs of every legal move from one status to another; None is a row that did not exist."""
    found: defaultdict[Edge, list[str]] = defaultdict(list)
    for move in transitions.values():
        for source in move.sources or {None}:
            for target in move.targets:
                found[source, target].append(move.verb)
    return dict(found)


def svg(transitions: Mapping[str, Transition] = TRANSITIONS) -> str:
    """Return the diagram; raise KeyError for a move that has no route yet, so that the build fails instead of lying."""
    arrows = "".join(_arrow(edge, verbs) for edge, verbs in sorted(edges(transitions).items(), key=str))
    boxes = "".join(_box(status) for status in Status)
    return (
        '<svg class="state-diagram" viewBox="0 -40 1010 490" role="img" aria-label="The statuses of an execution and '
        'the moves between them; the table below says the same in words">'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L10 5L0 10z"/></marker></defs>{arrows}<circle cx="50" cy="190" r="10"/>{boxes}</svg>'
    )


def _arrow(edge: Edge, verbs: list[str]) -> str:
    path, (x, y, anchor) = ROUTES[edge]
    source = edge[0].value if edge[0] else ""
    words = ", ".join(verbs)
    # A long list of verbs would run into its neighbours: two lines.
    half = (len(verbs) + 1) // 2
    lines = [words] if len(words) < 26 else [", ".join(verbs[:half]) + ",", ", ".join(verbs[half:])]
    text = "".join(f'<tspan x="{x}" dy="{0 if i == 0 else 17}">{line}</tspan>' for i, line in enumerate(lines))
    return (
        f'<g data-from="{source}" data-to="{edge[1].value}" data-verbs="{words}">'
        f'<path d="{path}" marker-end="url(#tip)"/><text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text></g>'
    )


def _box(status: Status) -> str:
    x, y = PLACES[status]
    kind = "final" if status in FINAL else "live"
    return (
        f'<g class="{kind} {status.value}"><rect x="{x - WIDTH // 2}" y="{y - HEIGHT // 2}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="10"/><text x="{x}" y="{y + 5}" text-anchor="middle">{status.name}</text></g>'
    )
