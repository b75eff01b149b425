"""`gpu-autoscaler audit`: who did what, and whether anybody has changed the record of it since."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from gpu_autoscaler.model.audit import AuditRow, ChainCheck, Link, canonical
from gpu_autoscaler_services.cli.client import Document, Gateway
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.options import CommandGroup
from gpu_autoscaler_services.cli.output import Columns, Output, is_table, print_message, show

HERE = Gateway()
PAGE_COUNT = 1000
READINGS_MAX = 3  # retention may remove entries while they are read: then again from the beginning

_GROUP = CommandGroup(
    "audit",
    "audit list --who anna --after 2026-11-01T00:00:00Z",
    "audit list --outcome refused",
    "audit verify",
    "audit verify --expect-head 812:6f1c...",
    "audit export > audit.jsonl",
    "audit verify --file audit.jsonl",
)
audit = _GROUP.app


class _Header(msgspec.Struct):
    """The first line of an export."""

    anchor: Link  # the last entry that retention has removed
    after: Link  # the entry before the first one
    head: Link


class _Item(msgspec.Struct):
    """An entry with its hash."""

    number: int
    entry: dict[str, Any]
    hash: str


class _Chain(_Header):
    """A trail that was read."""

    items: list[_Item]

    def checked(self, expected: Link | None) -> ChainCheck:
        """Check the entries, and that an expected one is among them."""
        check = ChainCheck(self.after)
        if expected is not None:
            check.expect(expected)
        for item in self.items:
            check.take(AuditRow(number=item.number, text=canonical(item.entry), hash=item.hash))
        check.finish(anchor=self.anchor if self.after == self.anchor else Link(), head=self.head)
        return check


_COLUMNS: Columns = (
    ("NUMBER", lambda row: row["number"]),
    ("TIME", lambda row: row["entry"].get("at")),
    ("WHO", lambda row: row["entry"].get("who")),
    ("KNOWN BY", lambda row: row["entry"].get("authentication")),
    ("THROUGH", lambda row: row["entry"].get("entry_point")),
    ("DID", lambda row: row["entry"].get("verb")),
    ("TO", lambda row: row["entry"].get("object")),
    ("PROJECT", lambda row: row["entry"].get("project_id")),
    ("OUTCOME", lambda row: row["entry"].get("outcome")),
    ("REASON", lambda row: row["entry"].get("reason")),
)

_WIDE = ("KNOWN BY", "THROUGH", "PROJECT")


@_GROUP.command
def list_(  # noqa: PLR0913 - one for each option
    *,
    who: Annotated[str | None, Parameter(help="Only acts of this name.")] = None,
    verb: Annotated[str | None, Parameter(help="Only these acts: submit, cancel, freeze, resume, report ...")] = None,
    object: Annotated[str | None, Parameter(help="Only acts on this object, e.g. job/ID.")] = None,  # noqa: A002 - the option's name
    project: Annotated[str | None, Parameter(help="Only acts in this project.")] = None,
    entry_point: Annotated[str | None, Parameter(help="rest, cli, page, nats, stream or retention.")] = None,
    outcome: Annotated[str | None, Parameter(help="allowed, refused or failed.")] = None,
    after: Annotated[str | None, Parameter(help="Only acts at this instant or later (RFC 3339).")] = None,
    before: Annotated[str | None, Parameter(help="Only acts before this instant (RFC 3339).")] = None,
    limit: Annotated[int, Parameter(help="Number of newest entries.")] = 50,
    cursor: Annotated[str | None, Parameter(help="Continue a list: next_cursor of the last answer.")] = None,
    gateway: Gateway = HERE,
    output: Output = "table",
) -> None:
    """List who did what, the last first."""
    document = gateway.read(
        "audit", who=who, verb=verb, object=object, project_id=project, entry_point=entry_point, outcome=outcome,
        after=after, before=before, limit=limit, cursor=cursor,
    )  # fmt: skip
    show(document, document["items"], _COLUMNS, lambda row: str(row["number"]), output, wide=_WIDE)
    if is_table(output) and document["next_cursor"] is not None:
        print_message(f"more: --cursor {document['next_cursor']}")


@_GROUP.command
def verify(
    *,
    file: Annotated[str | None, Parameter(help="Check an export; - reads stdin. Default: the trail itself.")] = None,
    expect_head: Annotated[
        str | None, Parameter(help="NUMBER:HASH of an entry, as an earlier verify printed it and you kept elsewhere.")
    ] = None,
    gateway: Gateway = HERE,
) -> Exit:
    """Check that no entry was changed, removed, inserted or moved.

    Prints the last entry as NUMBER:HASH. Keep it elsewhere: whoever can write to the database can compute all hashes
    anew, and only --expect-head finds that.

    Exit codes: 0 the chain is whole, 1 it is not, with the first broken entry.
    """
    expected = None if expect_head is None else _link(expect_head)
    chain = _file_chain(file) if file is not None else _gateway_chain(gateway)
    check = chain.checked(expected)
    if check.violation is not None:
        print_message(f"gpu-autoscaler: audit trail is broken: {check.violation}")
        return Exit.FAILURE
    print_message(f"{check.entries_count} entries follow from each other; the last one:")
    print(f"{check.last.number}:{check.last.hash}")
    return Exit.OK


@_GROUP.command
def export(
    *,
    after: Annotated[int, Parameter(help="Only entries after this number: those that no earlier export has.")] = 0,
    gateway: Gateway = HERE,
) -> None:
    """Write the trail as JSON lines, oldest first.

    The first line says where the export begins and ends; each further line is an entry with its number and hash.
    """
    chain = _gateway_chain(gateway)
    start = _start(chain, after)
    print(canonical(_Header(chain.anchor, start, chain.head)))
    for item in chain.items:
        if item.number > start.number:
            print(canonical(item))


def _start(chain: _Chain, after: int) -> Link:
    if after <= chain.anchor.number:
        return chain.anchor
    for item in chain.items:
        if item.number == after:
            return Link(number=after, hash=item.hash)
    raise Stop(f"no entry {after}; the last one is {chain.head.number}", Exit.NOT_FOUND)


def _gateway_chain(gateway: Gateway) -> _Chain:
    for _ in range(READINGS_MAX):
        first: Document | None = None
        items: list[_Item] = []
        for page in _pages(gateway):
            if first is not None and page["anchor"] != first["anchor"]:
                break
            first = page
            items += msgspec.convert(page["items"], list[_Item])
        else:
            assert first is not None, "there is one page at least"  # noqa: S101 - a bug of ours
            anchor, head = (msgspec.convert(first[name], Link) for name in ("anchor", "head"))
            return _Chain(anchor, anchor, head, items)
    raise Stop("entries expire while they are read; repeat the command", Exit.TIME_OUT)


def _pages(gateway: Gateway) -> Iterator[Document]:
    cursor = None
    while True:
        page = gateway.read("audit", oldest_first=True, limit=PAGE_COUNT, cursor=cursor)
        yield page
        cursor = page["next_cursor"]
        if cursor is None:
            return


def _file_chain(path: str) -> _Chain:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        first, *lines = text.splitlines() or [""]
        header = msgspec.json.decode(first, type=_Header)
        items = [msgspec.json.decode(line, type=_Item) for line in lines]
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise Stop(f"{path} is no export of `audit export`: {error}", Exit.USAGE) from error
    return _Chain(header.anchor, header.after, header.head, items)


def _link(text: str) -> Link:
    number, _, digest = text.partition(":")
    if not number.isdecimal() or len(digest) != len(Link().hash):
        raise Stop(f"--expect-head {text!r} is not NUMBER:HASH, as verify prints it", Exit.USAGE)
    return Link(number=int(number), hash=digest)
