from __future__ import annotations

from django.core.asgi import get_asgi_application

from django_jobs.asgi import with_lifespan

application = with_lifespan(get_asgi_application())
