"""Settings of the benchmarks: one database, from DATABASE_URL, and durable commits as the server has them."""

import importlib.util
import os
from typing import Any

import environ

SECRET_KEY = "benchmark"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_jobs", "benchmarks"]
DATABASES: dict[str, dict[str, Any]] = {"default": environ.Env.db_url_config(os.environ["DATABASE_URL"])}
if "sqlite" in DATABASES["default"]["ENGINE"]:
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
    }
elif "mysql" in DATABASES["default"]["ENGINE"] and importlib.util.find_spec("MySQLdb") is None:
    # mysqlclient if it is installed, as in most deployments; the tests' driver is written in Python.
    import pymysql

    pymysql.install_as_MySQLdb()
DJANGO_JOBS: dict[str, Any] = {"DISPATCHER": os.environ.get("BENCHMARK_DISPATCHER", "database")}
if _redis_url := os.environ.get("BENCHMARK_REDIS_URL"):
    CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": _redis_url}}
LOGGING = {"version": 1, "loggers": {"django_jobs": {"level": "WARNING"}}}
