"""What `manage.py jobs` does, a module for each group of its commands; importable without the command."""
