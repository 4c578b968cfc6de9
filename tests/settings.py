"""The settings of the test project; the environment picks the engine.

ENGINE is sqlite (the default), postgres or mysql; DATABASE_URL names the server. A process started by a test gets the
test database's name in DATABASE_NAME and changes to DJANGO_JOBS as JSON in DJANGO_JOBS_OVERRIDES.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.engines import database_settings

ENGINE = os.environ.get("ENGINE", "sqlite")
DATABASE_URL = os.environ.get("DATABASE_URL", "")
REDIS_URL = os.environ.get("REDIS_URL", "")

# The run's own names: two runs on one server, or in one folder, must not meet.
_run = os.environ.get("TEST_RUN", str(os.getpid()))
_scratch = Path(tempfile.gettempdir())

DATABASES: dict[str, dict[str, Any]] = {
    "default": database_settings(ENGINE, DATABASE_URL),
    # A second database for routers and for transactions on another alias.
    "other": database_settings("sqlite", ""),
}
DATABASES["default"]["TEST"] = {"NAME": f"test_django_jobs_{_run}"}
if ENGINE == "sqlite":
    # A file, not memory: threads and processes share it.
    DATABASES["default"]["TEST"] = {"NAME": str(_scratch / f"django_jobs-{_run}.sqlite3")}
elif ENGINE == "mysql":
    DATABASES["default"]["TEST"] |= {"CHARSET": "utf8mb4"}
DATABASES["other"]["TEST"] = {"NAME": str(_scratch / f"django_jobs-{_run}-other.sqlite3")}

if name := os.environ.get("DATABASE_NAME"):
    DATABASES["default"]["NAME"] = name
if name := os.environ.get("OTHER_DATABASE_NAME"):
    DATABASES["other"]["NAME"] = name

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_jobs",
    "tests.acc",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
CACHES: dict[str, dict[str, Any]] = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
if REDIS_URL:
    CACHES["redis"] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}

ROOT_URLCONF = "tests.urls"
STATIC_URL = "/static/"
STATIC_ROOT = _scratch / "django_jobs-static"
SECRET_KEY = "only for tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = os.environ.get("USE_TZ", "1") == "1"
TIME_ZONE = os.environ.get("TIME_ZONE", "UTC")
LANGUAGE_CODE = os.environ.get("LANGUAGE_CODE", "en")
DEFAULT_AUTO_FIELD = os.environ.get("DEFAULT_AUTO_FIELD", "django.db.models.BigAutoField")
AUTH_USER_MODEL = os.environ.get("AUTH_USER_MODEL", "auth.User")
# Of no concern to any test: a session in memory, and a cheap hash, save statements and time.
SESSION_ENGINE = "django.contrib.sessions.backends.cache"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# Everything is kept, so that tests count rows; durations are the package's own: tests that wait shorten them.
DJANGO_JOBS: dict[str, Any] = {
    "KEEP": {"ok": None, "error": None, "cancelled": None},
    **json.loads(os.environ.get("DJANGO_JOBS_OVERRIDES", "{}")),
}
