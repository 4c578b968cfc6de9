"""A view that pushes what it is asked to, and one that tells which process answers."""

from __future__ import annotations

import json
import os

from django.http import HttpRequest, JsonResponse
from django.urls import path

from django_jobs import registry


def push(request: HttpRequest, name: str) -> JsonResponse:
    row = registry.get(name).push(**json.loads(request.GET.get("payload", "{}")))
    return JsonResponse({"id": str(row.pk), "pid": os.getpid()})


async def apush(request: HttpRequest, name: str) -> JsonResponse:
    row = await registry.get(name).apush(**json.loads(request.GET.get("payload", "{}")))
    return JsonResponse({"id": str(row.pk), "pid": os.getpid()})


def pid(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"pid": os.getpid()})


urlpatterns = [path("push/<name>/", push), path("apush/<name>/", apush), path("pid/", pid)]
