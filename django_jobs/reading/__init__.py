"""What people are shown of jobs and executions, as data and plain words; the admin and `manage.py jobs` show it."""
