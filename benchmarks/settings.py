"""Settings of the benchmarks: one database, from DATABASE_URL, and durable commits as the server has them."""

import os

import environ

SECRET_KEY = "benchmark"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_jobs"]
DATABASES = {"default": environ.Env.db_url_config(os.environ["DATABASE_URL"])}
LOGGING = {"version": 1, "loggers": {"django_jobs": {"level": "WARNING"}}}
