"""The directive `state-diagram`: the drawing of the statuses, and below it the same as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.parsers.rst import Directive
from state_drawing import svg

from django_jobs.states import TRANSITIONS, Status

if TYPE_CHECKING:
    from sphinx.application import Sphinx


class StateDiagram(Directive):
    """Put the diagram and the same as a table into a page."""

    def run(self) -> list[nodes.Node]:
        """See the class."""
        return [nodes.raw("", svg(), format="html"), self._table()]

    def _table(self) -> nodes.table:
        group = nodes.tgroup(cols=3)
        group += [nodes.colspec(colwidth=width) for width in (20, 40, 40)]
        head, body = nodes.thead(), nodes.tbody()
        head += _row("verb", "from", "to")
        body += [
            _row(verb, _names(move.sources) or "(no row yet)", _names(move.targets))
            for verb, move in TRANSITIONS.items()
        ]
        group += [head, body]
        table = nodes.table()
        table += group
        return table


def _names(statuses: frozenset[Status]) -> str:
    return ", ".join(status.name for status in Status if status in statuses)


def _row(*cells: str) -> nodes.row:
    row = nodes.row()
    row += [nodes.entry("", nodes.paragraph(text=cell)) for cell in cells]
    return row


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("state-diagram", StateDiagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
