"""Filters of the lists. Generated from the OpenAPI document by `make schemas`; do not edit."""

from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict


class ListJobsFilters(TypedDict, total=False):
    """Filters of list_jobs."""

    state: Sequence[str]
    project_id: str | None
    job_name: str | None
    created_after: datetime | None
    created_before: datetime | None
    queue: str | None
    submitted_by: str | None
    mine: bool


class ListDemandFilters(TypedDict, total=False):
    """Filters of list_demand."""

    source: str | None


class ListNodesFilters(TypedDict, total=False):
    """Filters of list_nodes."""

    phase: Sequence[str]
    pool: str | None
    zone: str | None
    instance_type: str | None
    capacity_type: str | None
    gpu_model: str | None


class ListFactsFilters(TypedDict, total=False):
    """Filters of list_facts."""

    subject: Sequence[str]
    env: bool


class ListPlansFilters(TypedDict, total=False):
    """Filters of list_plans."""

    after: datetime | None
    before: datetime | None


class ListBudgetsFilters(TypedDict, total=False):
    """Filters of list_budgets."""

    owner: str | None
    period: str | None


class ListOffersFilters(TypedDict, total=False):
    """Filters of list_offers."""

    zone: str | None
    instance_type: str | None
    capacity_type: str | None
    gpu_model: str | None
    is_available: bool | None


class ListAuditEntriesFilters(TypedDict, total=False):
    """Filters of list_audit_entries."""

    who: str | None
    verb: str | None
    object: str | None
    project_id: str | None
    entry_point: str | None
    outcome: str | None
    after: datetime | None
    before: datetime | None
    oldest_first: bool
