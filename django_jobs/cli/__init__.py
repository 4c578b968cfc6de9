"""The work of `manage.py jobs`, a module for each group of its commands; importable without the command."""
