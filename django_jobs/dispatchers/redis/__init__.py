"""The redis dispatcher: hints through a Redis or Valkey server, so that an idle worker starts a row at once."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured

try:
    import django_redis  # noqa: F401 - whether it is there
except ImportError as error:
    raise ImproperlyConfigured(
        f"DJANGO_JOBS: the redis dispatcher needs django-redis, which cannot be imported ({error}); "
        'pip install "django-outbox-jobs[redis]".'
    ) from error

from django_jobs.dispatchers.redis.dispatcher import RedisDispatcher

__all__ = ["RedisDispatcher"]
