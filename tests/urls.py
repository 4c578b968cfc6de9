"""The URLs of the test project: the admin, and the one that a platform's cron calls."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("jobs/", include("django_jobs.urls"))]
