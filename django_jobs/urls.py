"""The URLs to include where jobs are driven over HTTP: path("jobs/", include("django_jobs.urls"))."""

from __future__ import annotations

from django.urls import re_path

from django_jobs import views

app_name = "django_jobs"
# With the slash or without: a redirect to the other one would tell that it is there.
urlpatterns = [re_path(r"^run/?$", views.run, name="run")]
