"""Jobs and executions as data and plain words for people; the admin and `manage.py jobs` show them."""
