"""Migration operations for what Django's models cannot say on every database."""

from __future__ import annotations

from typing import Any

from django.db import NotSupportedError, models, router
from django.db.migrations.operations.base import Operation


class RefuseCompactRows(Operation):
    """Stop with a clear text where InnoDB's row format cannot index our columns (767 bytes instead of 3072)."""

    reversible = True
    reduces_to_sql = False

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "mysql" or schema_editor.collect_sql:
            return
        if not router.allow_migrate(schema_editor.connection.alias, app_label):
            return
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("SELECT @@innodb_default_row_format")
            row_format = str(cursor.fetchone()[0]).lower()
        if row_format in ("compact", "redundant"):
            raise NotSupportedError(
                f"django_jobs: innodb_default_row_format is {row_format.upper()}, whose indexes end at 767 bytes; "
                "expected DYNAMIC. Run SET GLOBAL innodb_default_row_format = DYNAMIC and migrate again."
            )

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        pass

    def describe(self) -> str:
        return "Refuse InnoDB row formats with short indexes"


class ExactText(Operation):
    """On MySQL and MariaDB, hold every character and compare exactly: utf8mb4 with a binary collation."""

    reversible = True

    def __init__(self, model_names: list[str]) -> None:
        self.model_names = model_names

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "mysql":
            return
        for name in self.model_names:
            model = to_state.apps.get_model(app_label, name)
            if self.allow_migrate_model(schema_editor.connection.alias, model):
                table = schema_editor.quote_name(model._meta.db_table)
                schema_editor.execute(f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        pass

    def describe(self) -> str:
        return "Hold every character exactly on MySQL and MariaDB"


class AddPartialIndex(Operation):
    """Index the rows that meet a condition: a partial index where the database has them, an ordinary one elsewhere.

    Kept out of Meta.indexes, where a condition makes MariaDB and MySQL skip the index and warn.
    """

    reversible = True

    def __init__(self, model_name: str, name: str, fields: list[str], condition: models.Q) -> None:
        self.model_name, self.name, self.fields, self.condition = model_name, name, fields, condition

    def _index(self, schema_editor: Any) -> models.Index:
        partial = schema_editor.connection.features.supports_partial_indexes
        return models.Index(fields=self.fields, name=self.name, condition=self.condition if partial else None)

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.add_index(model, self._index(schema_editor))

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = from_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.remove_index(model, self._index(schema_editor))

    def describe(self) -> str:
        return f"Add the index {self.name}"
