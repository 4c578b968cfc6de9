"""NOTIFY and LISTEN: how the database dispatcher reaches the workers of other processes on PostgreSQL."""
