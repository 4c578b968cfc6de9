"""Django's flush as the tests need it: after each test with committed data, TransactionTestCase calls it by name."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import flush
from django.db import connections, transaction

# Made by migrate, changed by no test, and dear to make again.
KEPT = {"django_content_type", "auth_permission"}


class Command(flush.Command):
    """Delete the rows, which for the few of a test costs far less than to truncate, and keep what migrate made."""

    def handle(self, **options: Any) -> None:
        connection = connections[options["database"]]
        names = connection.introspection.django_table_names(only_existing=True, include_views=False)
        tables = [connection.ops.quote_name(name) for name in sorted(set(names) - KEPT)]
        with connection.cursor() as cursor:
            # Most tests fill two tables or three.
            cursor.execute("SELECT " + ", ".join(f"EXISTS (SELECT 1 FROM {table})" for table in tables))
            filled = [table for table, has_rows in zip(tables, cursor.fetchone(), strict=True) if has_rows]
            if not filled:
                return
            with connection.constraint_checks_disabled(), transaction.atomic(using=connection.alias):
                for table in filled:
                    cursor.execute(f"DELETE FROM {table}")
