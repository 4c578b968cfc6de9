"""Fill the table with copies of a row, made by the database: for the cases about scale."""

from __future__ import annotations

from django.db import connection

from django_jobs.models import JobExecution

# In one statement: a larger one holds what it may have to undo, and SQLite's journal, for no use.
PORTION = 100_000

# MySQL knows no series, and ends a recursion after a thousand steps.
_DIGIT = "(" + " UNION ALL ".join(f"SELECT {digit} AS n" for digit in range(10)) + ")"
_DIGITS = ", ".join(f"{_DIGIT} AS d{place}" for place in range(5))
_SUM = " + ".join(f"{10**place} * d{place}.n" for place in range(5))

# A number as an id, and a moment so many milliseconds later.
NUMBERS = {
    "postgresql": (
        "SELECT generate_series({first}, {last}) AS n",
        "lpad(to_hex(n), 32, '0')::uuid",
        "completed_at + n * interval '1 millisecond'",
    ),
    "mysql": (
        f"SELECT {{first}} + {_SUM} AS n FROM {_DIGITS} HAVING n <= {{last}}",
        "CAST(CONCAT('00000000-0000-0000-0000-', LPAD(HEX(n), 12, '0')) AS UUID)",
        "TIMESTAMPADD(MICROSECOND, n * 1000, completed_at)",
    ),
    "sqlite": (
        "WITH RECURSIVE s(n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM s WHERE n < {last}) SELECT n FROM s",
        "printf('%032x', n)",
        "strftime('%Y-%m-%d %H:%M:%f', completed_at, (n / 1000.0) || ' seconds')",
    ),
}


def fill(template: JobExecution, first: int, count: int) -> None:
    """Make copies of a row in the database; as those of real rows, their ids ascend, and so do their ends."""
    for start in range(first, first + count, PORTION):
        _fill(template, start, min(start + PORTION, first + count) - 1)


def _fill(template: JobExecution, first: int, last: int) -> None:
    table = connection.ops.quote_name(JobExecution._meta.db_table)
    numbers, ident, ended = NUMBERS[connection.vendor]
    if connection.vendor == "mysql" and not connection.features.has_native_uuid_field:
        ident = "LPAD(LOWER(HEX(n)), 32, '0')"
    names = [field.column for field in JobExecution._meta.concrete_fields if not field.primary_key]
    columns = ", ".join(map(connection.ops.quote_name, names))
    values = ", ".join(ended if name == "completed_at" else connection.ops.quote_name(name) for name in names)
    own = template.pk if connection.features.has_native_uuid_field else template.pk.hex
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} (id, {columns}) SELECT {ident}, {values} "
            f"FROM ({numbers.format(first=first, last=last)}) AS numbers, {table} WHERE id = '{own}'"
        )


def analyze() -> None:
    """Have the planner know how many rows there are, as it does in time by itself."""
    table = connection.ops.quote_name(JobExecution._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {'TABLE ' if connection.vendor == 'mysql' else ''}{table}")
