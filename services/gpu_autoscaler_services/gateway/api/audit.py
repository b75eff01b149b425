"""The audit trail over REST."""

from typing import Annotated

import msgspec
from aiohttp import web

from gpu_autoscaler.model.audit import AuditFilter, EntryPoint, Outcome, instant_text
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler_services.api_rights import READ_AUDIT
from gpu_autoscaler_services.gateway import schema
from gpu_autoscaler_services.gateway.paging import PageQuery, bad_cursor
from gpu_autoscaler_services.gateway.read_model import READ_MODEL
from gpu_autoscaler_services.gateway.routes import INVALID, Route, answer, read_query


class AuditQuery(PageQuery, frozen=True, kw_only=True):
    """Query of the audit trail."""

    who: Annotated[str | None, msgspec.Meta(description="Only acts of this name.")] = None
    verb: Annotated[str | None, msgspec.Meta(description="Only these acts: submit, cancel, freeze, ...")] = None
    object: Annotated[str | None, msgspec.Meta(description="Only acts on this object, e.g. job/<id>.")] = None
    project_id: Annotated[str | None, msgspec.Meta(description="Only acts in this project.")] = None
    entry_point: Annotated[EntryPoint | None, msgspec.Meta(description="Only acts through this entry point.")] = None
    outcome: Annotated[Outcome | None, msgspec.Meta(description="Only acts that were allowed, refused or failed.")] = (
        None
    )
    after: Annotated[Instant | None, msgspec.Meta(description="Only acts at this instant or later.")] = None
    before: Annotated[Instant | None, msgspec.Meta(description="Only acts before this instant.")] = None
    oldest_first: Annotated[bool, msgspec.Meta(description="The first entries first. Default: the last first.")] = False

    @property
    def wanted(self) -> AuditFilter:
        """The entries that are wanted."""
        return AuditFilter(
            who=self.who,
            verb=self.verb,
            object=self.object,
            project_id=self.project_id,
            entry_point=self.entry_point,
            outcome=self.outcome,
            from_at=None if self.after is None else instant_text(self.after),
            before_at=None if self.before is None else instant_text(self.before),
        )


async def list_audit_entries_handler(request: web.Request) -> web.Response:
    """Show who did what, when, and through which entry point: a page of the audit trail."""
    query = read_query(request, AuditQuery)
    try:
        trail = await request.app[READ_MODEL].store.audit(
            query.wanted, cursor=query.cursor, count_max=query.limit, is_oldest_first=query.oldest_first
        )
    except ValueError as error:
        raise bad_cursor() from error
    items = tuple(schema.AuditItem(number=row.number, entry=row.document, hash=row.hash) for row in trail.rows)
    page = schema.AuditPage(items=items, next_cursor=trail.next_cursor, anchor=trail.anchor, head=trail.head)
    return answer(request, page)


ROUTES = (
    Route(
        "GET",
        "/api/v1/audit",
        list_audit_entries_handler,
        "audit",
        schema.AuditPage,
        (READ_AUDIT,),
        INVALID,
        query=AuditQuery,
    ),
)
