"""An app whose jobs use the ORM, in their own process and in those that they make."""
