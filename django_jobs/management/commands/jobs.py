"""`manage.py jobs`: look at executions and jobs, and do by hand what the admin's buttons do.

Exit codes:

- 0: done
- 1: nothing was done, or not to every execution that was named; or the output could not be written
- 2: a mistake in the call: an unknown job, id or option, a payload that does not fit; or a wrong setting
- 3: the database cannot be asked, or its tables are missing
- 130: interrupted with Ctrl-C (but 0 for `tail`)
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from django_jobs.cli import acting, listing, many, overview, purging, showing, tail
from django_jobs.cli.choosing import Filters
from django_jobs.cli.errors import DatabaseNotReady, NothingDone, UsageError
from django_jobs.cli.terminal import Terminal
from django_jobs.exceptions import Conflict, JobsError
from django_jobs.management.streams import escape_unencodable, flush_or_discard, open_missing
from django_jobs.models import jobs_alias
from django_jobs.reading.listing import STATUSES
from django_jobs.runtime.exits import NO_DATABASE, USAGE
from django_jobs.runtime.startup import check_tables, failure

NOTHING_DONE, INTERRUPTED = 1, 130
# Options of every Django command, which people write at the end of the line.
COMMON: dict[str, dict[str, Any]] = {"--settings": {}, "--pythonpath": {}, "--traceback": {"action": "store_true"}}


class Command(BaseCommand):
    """Arguments only; the work is done by django_jobs.cli."""

    help = "Looks at background jobs and their executions; pushes, cancels, retries, pauses and purges."
    # The checks are about the whole project, and a mistake there must not keep anybody from looking at its jobs.
    requires_system_checks = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        open_missing()
        super().__init__(*args, **kwargs)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a process of its own."""
        escape_unencodable()
        try:
            super().run_from_argv(argv)
        finally:
            flush_or_discard()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the commands, each with its options."""
        commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

        def command(name: str, text: str) -> ArgumentParser:
            made = commands.add_parser(name, help=text, description=text)
            made.add_argument("--json", action="store_true", help="Write JSON, for machines.")
            for option, how in COMMON.items():
                made.add_argument(option, default=SUPPRESS, help=SUPPRESS, **how)
            return made

        listed = command("list", "List executions, newest first; or jobs, or queues.")
        _filters(listed)
        listed.add_argument("--limit", type=int, default=20, metavar="N", help="Show at most N (default: 20).")
        listed.add_argument("--jobs", action="store_true", help="List the jobs instead, with their next run.")
        listed.add_argument("--queues", action="store_true", help="List the queues instead.")
        show = command("show", "Show everything about one execution.")
        show.add_argument("id", metavar="ID", help="The id, or its beginning: six digits or more.")
        push = command("push", "Push one execution of a job.")
        push.add_argument("name", metavar="NAME")
        push.add_argument(
            "--payload",
            default="{}",
            metavar="JSON",
            help="The parameters as a JSON object; - reads it from standard input.",
        )
        push.add_argument("--key", help="Push nothing while an execution with this key is live.")
        push.add_argument("--delay", metavar="TIME", help="Run it after this time: seconds, or as 30min, 2h, 7d.")
        push.add_argument("--queue", metavar="Q", help="Put it into this queue.")
        push.add_argument("--priority", metavar="P", help="-100 to 100, or low, normal, high, critical.")
        push.add_argument("--organization", metavar="O", help="The organization it belongs to.")
        trigger = command("trigger", "Run a cron job now.")
        trigger.add_argument("name", metavar="NAME")
        for name, text in (("cancel", "Cancel executions."), ("retry", "Queue failed or cancelled executions again.")):
            moving = command(name, text)
            moving.add_argument("ids", nargs="*", metavar="ID")
            _filters(moving)
            moving.add_argument("--yes", action="store_true", help="Do not ask.")
            _by(moving)
        for name, text in (("pause", "Start no more runs of a job or queue."), ("resume", "End a pause.")):
            holding = command(name, text)
            holding.add_argument("name", nargs="?", metavar="NAME")
            holding.add_argument("--queue", metavar="Q", help="A queue instead of a job.")
            _by(holding)
        purge = command("purge", "Delete the executions of jobs that no process knows.")
        purge.add_argument("--unregistered", action="store_true", help="Delete the finished and the parked ones.")
        purge.add_argument("--yes", action="store_true", help="Do not ask.")
        follow = command("tail", "Show the executions that ended last; with --follow, further ones as they end.")
        follow.add_argument("--job", metavar="NAME", help="Show this job only.")
        follow.add_argument("--limit", type=int, default=10, metavar="N", help="Begin with the last N (default: 10).")
        follow.add_argument("--follow", "-f", action="store_true", help="Go on until Ctrl-C.")
        for each in (push, trigger, purge):
            _by(each)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command; leave with an exit code other than 0 when it was not done."""
        terminal = Terminal(self.stdout, self.stderr, ask=sys.stdin, as_json=options["json"])
        try:
            self._run(terminal, options)
            terminal.flush()
        except (NothingDone, Conflict) as reason:
            raise CommandError(str(reason), returncode=NOTHING_DONE) from reason
        except (UsageError, JobsError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=USAGE) from error
        except (Error, DatabaseNotReady) as error:
            raise CommandError(str(_not_ready(error)), returncode=NO_DATABASE) from error
        except KeyboardInterrupt:
            terminal.end_progress(keep=True)
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of the output has seen enough.
            pass
        except OSError as error:
            why = error.strerror or error
            raise CommandError(f"The output cannot be written: {why}.", returncode=NOTHING_DONE) from error
        finally:
            terminal.end_progress()

    def _run(self, terminal: Terminal, options: dict[str, Any]) -> None:
        by = options.get("by") or acting.default_by()
        match options["command"]:
            case "list":
                self._list(terminal, options)
            case "show":
                showing.show(terminal, options["id"])
            case "push":
                acting.push(
                    terminal,
                    options["name"],
                    sys.stdin.read() if options["payload"] == "-" else options["payload"],
                    delay=options["delay"],
                    priority=options["priority"],
                    key=options["key"],
                    queue=options["queue"],
                    organization_id=options["organization"],
                    by=by,
                )
            case "trigger":
                acting.trigger(terminal, options["name"], by=by)
            case "cancel" | "retry" as name:
                verb = many.CANCEL if name == "cancel" else many.RETRY
                many.act(terminal, verb, options["ids"], _chosen(options), yes=options["yes"], by=by)
            case "pause":
                acting.pause(terminal, options["name"], options["queue"], by=by)
            case "resume":
                acting.resume(terminal, options["name"], options["queue"], by=by)
            case "purge":
                purging.purge_unregistered(
                    terminal, unregistered_only=options["unregistered"], yes=options["yes"], by=by
                )
            case _:
                tail.tail(terminal, options["job"], limit=options["limit"], follow=options["follow"])

    def _list(self, terminal: Terminal, options: dict[str, Any]) -> None:
        filters = _chosen(options)
        if not options["jobs"] and not options["queues"]:
            listing.list_executions(terminal, filters, limit=options["limit"])
        elif not filters.is_empty or (options["jobs"] and options["queues"]):
            raise UsageError("--jobs and --queues list all of them: give only one, and no filter of executions.")
        elif options["jobs"]:
            overview.list_jobs(terminal)
        else:
            overview.list_queues(terminal)


def _filters(parser: ArgumentParser) -> None:
    parser.add_argument("--job", metavar="NAME", help="Executions of this job.")
    parser.add_argument("--queue", metavar="Q", help="Executions in this queue.")
    parser.add_argument("--status", choices=STATUSES, help="Executions with this status.")
    parser.add_argument("--key", metavar="K", help="Executions pushed with this key.")
    parser.add_argument("--organization", metavar="O", help="Executions of this organization, to which --key belongs.")
    parser.add_argument(
        "--since", metavar="TIME", help="Executions pushed within 30min, 2h, 7d, or since 2026-03-01T12:00."
    )


def _by(parser: ArgumentParser) -> None:
    parser.add_argument("--by", metavar="WHO", help="Record WHO as the one who did it (default: user and host).")


def _chosen(options: dict[str, Any]) -> Filters:
    return Filters(**{name: options[name] for name in ("job", "queue", "status", "key", "organization", "since")})


def _not_ready(error: Error | DatabaseNotReady) -> DatabaseNotReady:
    """Return why the database does not answer: the error alone may not tell that tables are missing."""
    if isinstance(error, DatabaseNotReady):
        return error
    using = jobs_alias()
    try:
        check_tables(using)
    except DatabaseNotReady as missing:
        return missing
    except Error as unreachable:
        return failure(using, unreachable, "cannot be reached")
    return failure(using, error)
