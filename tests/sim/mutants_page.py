"""Renders docs/mutants.md: every planted bug, and what found it. Written by `make sim-mutants ARGS=--learn`."""

from collections.abc import Iterator, Mapping, Sequence

from tests.sim.hunting import Find, Found
from tests.sim.planted_effects import SHOWN_BY_TESTS
from tests.sim.planted_tested import TESTED
from tests.sim.planting import Planted

PROMISES = {
    1: "No accepted job is lost",
    2: "One launch per action; limits are never exceeded",
    3: "Protected work is not disrupted, and nothing is removed on missing data",
    4: "Interruption notices are handled",
    5: "The ledger equals the invoice; spend limits are never exceeded",
    6: "Recorded plans can be recomputed",
    7: "After a loss of the broker the state is rebuilt",
    8: "A fleet with all-zero telemetry is a telemetry fault",
    9: "Everything alive can be read from the streams",
    10: "The store keeps what its retention says",
}
# What once broke, or would have, in a month at a thousand nodes; and the bugs that stand for it.
FAILURES_SWEPT: Mapping[str, tuple[str, ...]] = {
    "What is alive leaves its stream": (
        "unchanged pods and nodes are not published again",
        "open purchases are not published again",
        "the limit by size is ignored",
    ),
    "A restarted service knows less than before": (
        "a restarted cost tracker has no memory",
        "a bill is opened from its launch alone",
        "the last list of pods is not published again",
    ),
    "A charge is forgotten and counted again; a doubtful ledger forces removals": (
        "a hard limit is enforced on a doubtful ledger",
        "the charge of a living instance is forgotten",
    ),
    "A quiet month stops planning": ("a plan whose parent was discarded is stale for ever",),
    "Discarded messages are skipped silently": ("discarded messages are skipped silently",),
    "One wrong clock hides all notices": ("a clock that is hours ahead is believed",),
    "The store only grows": (
        "old spans are not merged",
        "housekeeping is done once, when the process has started",
        "expired plans are not deleted",
    ),
    "Work that waits makes a plan too large": (
        "what a plan defers is named object by object",
        "a group of deferred objects replaces an earlier one of the same reason",
    ),
    "A plan that the plan check refuses stops everything": ("a plan that the plan check refuses stops every decision",),
    "Launches delay drains": (
        "launches share two slots with drains",
        "a drain that waits keeps later drains waiting",
        "launches share consumer and slots with drains",
        "a launch keeps its slot while it waits for the rate limit",
    ),
    "A storm of notices is handled node by node": (
        "the nodes of a plan begin one after the other, each after its hooks",
        "the facts of a plan are published when its last node has begun",
    ),
    "A ProvisioningRequest gets a part, a promise without capacity, or no answer": (
        "nodes are bought for some pods of a request",
        "nodes are bought for a capacity check",
        "capacity is free again as soon as it is promised",
        "capacity counts as provisioned once its nodes are ordered",
        "capacity stays booked for a week",
        "a request waits for ever",
    ),
}
FAILURES_TESTED: Mapping[str, tuple[str, ...]] = {
    "A long plan loses the lease": ("plans are made on the event loop",),
    "One event looks at every object": ("an event of a related object looks at all pods",),
    "The watchers of a thousand nodes are too heavy, or may speak for each other": (
        "a watcher's login is for every instance",
        "a watcher at rest repeats its report",
        "all watchers return to the broker at once",
    ),
    "A buffer is limited in number, not in bytes": ("recent facts are limited in number alone",),
    "Nothing stops removals by force": (
        "the brake never trips",
        "a tripped brake is forgotten",
        "removals of earlier plans do not count for the brake",
        "the loss of a stream releases the brake",
    ),
    "A job waits for ever, or longer than its share demands": (
        "small jobs pass a reservation whatever their time limit",
        "a job that waited long is no longer ahead of others",
        "jobs that have just started give nothing back",
        "jobs of a strict queue pass one that does not fit",
        "jobs that no capacity serves keep the quota that others wait for",
        "fair share forgets the GPU time of attempts that ended",
        "GPU time never decays",
        "a burst of one project goes before all others",
    ),
    "A project or user gets more than its quota": (
        "a project borrows beyond its borrowing limit",
        "quota is reclaimed from projects that borrow none",
        "a project reclaims more than its nominal quota",
        "a job that could not start either ends the borrower of its quota",
        "who came first borrows the quota that its owner needs now",
        "a preempted job returns its quota before its pods are gone",
        "others borrow what an owner waits for while its preempted job ends, and lose jobs for it",
        "GPU time of preempted attempts is not counted",
        "a job starts with whatever is left of the month's GPU-hours",
        "each job sees a ResourceQuota without the jobs before it",
        "placed jobs count against no ResourceQuota before their pods exist",
        "jobs of a strict queue get quota that the first one lacks",
        "a job takes one of its quotas while another refuses it",
        "the first jobs of a project know nothing of the quota that its namespace will have",
        "the plan check takes each ResourceQuota for unused",
    ),
    "A preemption costs more than it has to": (
        "a job of high priority preempts others although nodes can be bought",
        "a job that is not preemptible is preempted",
        "a preemption for another job uses up a retry",
        "a preempted job ends before it has saved",
        "a job counts as asked before a request has reached its pods",
        "the plan check lets jobs be preempted whose project borrows nothing",
    ),
    "Capacity is promised that is not there, or twice": (
        "a capacity check goes before work that waits",
        "a pod that uses a request counts as a member of it as well",
        "the plan check believes that there is capacity",
        "the plan check lets booked nodes go",
        "nodes are bought for pods whose volume is missing",
        "the plan check promises capacity to pods whose volume is missing",
        "the default PriorityClass is ignored",
        "capacity is promised to pods of a PriorityClass that does not exist",
        "an ephemeral volume of a pod to come waits for its claim",
        "pods that share a device claim get devices of their own",
        "a claim that is not listed yet counts as missing",
    ),
    "A workload ends although its namespace did not opt in, or it works": (
        "an idle pod takes the busy pods of its owner with it",
        "an announcement of an earlier idle time ends a workload at once",
        "the label opts no namespace in to the end of idle workloads",
        "one namespace opts in for all others",
        "the plan check ends workloads of namespaces that opted out since",
        "a late report opts namespaces in again",
        "a namespace opts in by any value of the label",
        "every heartbeat names any number of namespaces",
    ),
    "A predicted run time is wrong and believed": (
        "a failed job counts as a short one",
        "requests are believed however they came true",
        "many similar jobs count as little as one",
        "work that has outlived its prediction by far is still predicted",
        "wrong predictions are never silenced",
        "a run that went on from a checkpoint counts as a whole one",
        "a job whose start is reported after its end is not learned from",
        "groups of similar jobs are kept without their parents",
        "a prediction exceeds the time limit of its job",
    ),
    "A caller does or sees what it has no right to": (
        "a right in the release's namespace is one in all projects",
        "the single right of 0.2 grants everything from one namespace",
        "a grant is remembered after its minute",
        "a client of the broker submits in any project",
        "a client of the broker cancels jobs of others",
        "fields that reach beyond the pod need no right",
        "a caller marks its own dangerous fields as allowed",
        "events show values of environment variables to every reader",
    ),
}
_HEAD = """# Planted bugs

These bugs test the simulator. Each line is one small change of the current code that breaks a promise
(`tests/sim/planted.py`). `make sim-mutants` plants one bug at a time in a copy of the code and runs simulations until
an invariant is violated or the end is not quiescent. An exception does not count. This page is generated by
`make sim-mutants ARGS=--learn`.

- **found by**: the violated invariant, with everything enabled. *Plan check* means that the plan check
  (`core/check/plan_check.py`) refused a plan.
- **by the monitor alone**: the violated invariant with the plan check disabled. A dash: without the plan check the bug
  was not found.
- **runs**: how many runs the first find took. Repeat it with `make sim-mutants ARGS='--only "NAME"'`.
"""


def page(bugs: Sequence[Planted], known: Mapping[str, Found]) -> str:
    """Return the page."""
    return "\n".join((_HEAD, *_sums(bugs, known), *_failures(known), *_tables(bugs, known)))


def named_tests() -> Mapping[str, str]:
    """Return the test that finds each bug which tests are to find, by the bug's name."""
    return {bug.name: test for test, bug in TESTED.items()} | {shown.bug.name: shown.test for shown in SHOWN_BY_TESTS}


def _failures(known: Mapping[str, Found]) -> Iterator[str]:
    tests = named_tests()
    yield "## Failures of long and large runs"
    yield ""
    yield "At least one bug is planted for each failure. The sweep finds what simulated runs can show; the named test"
    yield "finds the others. The profiles of the sweep are in `tests/sim/searching.py`."
    yield ""
    yield "| failure | bug | the sweep finds it in (profile, seed, hours), by | a test finds it |"
    yield "| --- | --- | --- | --- |"
    for failure, names in {**FAILURES_SWEPT, **FAILURES_TESTED}.items():
        for name in names:
            found = known.get(name)
            find = None if found is None else found.by_monitor
            swept = "-" if find is None else f"{_place(find)}: {find.promise}"
            test = f"`{tests[name].removeprefix('tests/')}`" if name in tests else "-"
            yield f"| {failure} | {name} | {swept} | {test} |"
    yield ""


def _place(find: Find) -> str:
    return f"{find.place.profile}, {find.place.seed}, {find.place.hours:g}"


def _sums(bugs: Sequence[Planted], known: Mapping[str, Found]) -> Iterator[str]:
    found = [known[bug.name] for bug in bugs if bug.name in known]
    by_monitor = sum(found_bug.by_monitor is not None for found_bug in found)
    yield f"{len(bugs)} bugs are planted, {len(found)} are found, {by_monitor} of them by the monitor alone."
    yield ""


def _tables(bugs: Sequence[Planted], known: Mapping[str, Found]) -> Iterator[str]:
    for number, promise in PROMISES.items():
        yield f"## {number}. {promise}"
        yield ""
        yield "| bug | where | found by | by the monitor alone | profile, seed, hours | runs |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for bug in bugs:
            if bug.promise == number:
                yield _row(bug, known.get(bug.name))
        yield ""


def _row(bug: Planted, found: Found | None) -> str:
    where = f"`{bug.path.rsplit('/', 1)[-1]}`"
    if found is None or found.by_all is None:
        return f"| {bug.name} | {where} | not found | - | - | - |"
    find = found.by_monitor or found.by_all
    alone = "-" if found.by_monitor is None else found.by_monitor.promise
    return f"| {bug.name} | {where} | {found.by_all.promise} | {alone} | {_place(find)} | {found.by_all.seeds_count} |"
