"""The facts of a day at 1,000 nodes with 8 GPUs each and 10,000 pods, with the ids of each cloud, and how many of each.

Bodies come from the product's own code: Kubernetes objects through the translation, exporter pages through parser and
windows, lists through `InstanceLists`, plans through the planner. Rates come from the intervals in the code and from
traces:

- Four of the ten pods on a node belong to DaemonSets. Others live 25,839 s on average (openb), and every lost node
  ends all ten.
- A spot instance is lost 2.4 times a day (Bamboo, A100 on GCP); 60 % of the nodes are spot, as in the chart's defaults.
- Half of the work in GPUs are jobs of the scheduler: 1.93 GPUs for 18,006 s on average, on 74 % of the nodes (Philly).
- Every tick of the scaler publishes a plan: something is always waiting.
"""

import csv
import gzip
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache

import msgspec
from tests.bench.stream_objects import Cloud, node_object, pod_object, uid
from tests.support.braked_fleet import with_finalizer
from tests.support.stories import T0, Story, given, job, node, notice, offer, on_sale, pod, policy
from tests.support.timed_facts import MINUTE, SECOND

from gpu_autoscaler.core.checked_plan import checked_plan
from gpu_autoscaler.core.deferred_groups import grouped
from gpu_autoscaler.dcgm.exporter_pages import parse_page
from gpu_autoscaler.events import examples
from gpu_autoscaler.events.cost import ChargedUntil, CostAccrued, CostLedgerReported
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.events.gpu import GpuNodeSampled, GpuNodeSummarized
from gpu_autoscaler.events.job import (
    JobEstimated,
    JobEstimateScored,
    JobFinished,
    JobPlaced,
    JobQueued,
    JobRequested,
    JobResynced,
    JobStarted,
)
from gpu_autoscaler.events.node import (
    InstanceChanges,
    NodeGone,
    NodeInstanceListed,
    NodeInstanceObserved,
    NodeListed,
    NodeWatched,
)
from gpu_autoscaler.events.pod import PodBudgetListed, PodBudgetObserved, PodGone, PodListed, PodWatched
from gpu_autoscaler.events.scaling import (
    ScalingCheckpointRequested,
    ScalingDemandSampled,
    ScalingDrainStarted,
    ScalingForecastScored,
    ScalingNodeDrained,
    ScalingNodeLaunched,
    ScalingNodeOrdered,
    ScalingNodeTerminated,
    ScalingOrderResynced,
    ScalingPlanMade,
    ScalingPodEvicted,
)
from gpu_autoscaler.events.shadow import ShadowPlanMade
from gpu_autoscaler.events.spot import SpotNoticeReceived, SpotOffersSampled, SpotRebalanceRecommended
from gpu_autoscaler.kube.protocol import NODES, PODS
from gpu_autoscaler.kube.translate.node import node_observed
from gpu_autoscaler.kube.translate.pod import pod_observed
from gpu_autoscaler.model.decisions import Cut, Plan
from gpu_autoscaler.model.ids import JobId, NodeUid, PlanId, PodUid, derive_id
from gpu_autoscaler.model.offers import CapacityType
from gpu_autoscaler.runtime.config import SensingSettings
from gpu_autoscaler_services.cost_tracker.service import span_seconds
from gpu_autoscaler_services.dcgm_ingest.windows import WINDOW_SECONDS, Window
from gpu_autoscaler_services.pod_watcher.service import BUDGETS_WATCHED_SECONDS, WATCHED_SECONDS
from gpu_autoscaler_services.scaler.inventory import FULL_LIST_PERIOD, LIST_SECONDS
from gpu_autoscaler_services.score_cases import TRACES
from gpu_autoscaler_services.spot_watcher.offers import POLL_INTERVAL, REPEAT_INTERVAL

NODES_COUNT, GPUS_COUNT, PODS_COUNT = 1_000, 8, 10_000
DAY_SECONDS = 86_400
SAMPLES_COUNT = 12  # different facts of a kind; sizes are averages
PODS_FILE = TRACES / "openb-gpu-2023" / "pods" / "openb_pod_list_default.csv.gz"
# bamboo-spot, a100x1-east1b: 154 instances lost in 27 h, 57.9 running on average.
LOSSES_PER_NODE_AND_DAY = 0.6 * 2.36
DAEMON_PODS_COUNT = 4 * NODES_COUNT
# acme, cluster_summary.csv, Philly: averages over 112,956 jobs.
JOB_GPUS_COUNT, JOB_SECONDS = 1.928, 18_006.0
USED_RATIO = 0.74  # philly_node_sequence.csv: 313.0 of 423.5 nodes
JOBS_RATIO, JOBS_PER_NODE_COUNT = 0.5, 3
LISTS_PER_DAY = 24  # of each kind: a watch whose version has expired lists anew
BUDGETS_COUNT, BUDGETED_RATIO = 100, 0.2  # PodDisruptionBudgets, and the share of pods that have one
OFFERS_TYPES_COUNT = 65  # with GPUs; in three zones, on spot and on demand
TICK_SECONDS = 5.0  # of the scaler and the shadow


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one kind: some of them, and how many a day has."""

    facts: Sequence[Fact]
    per_day: float

    @property
    def stream(self) -> str:
        """The stream of the facts."""
        return self.facts[0].stream()

    @property
    def name(self) -> str:
        """The subject of the facts."""
        return self.facts[0].subject_root()


def flows(cloud: Cloud) -> Iterator[Flow]:
    """Yield what a day publishes."""
    yield from _pods(cloud)
    yield from _nodes(cloud)
    yield from _telemetry(cloud)
    yield from _spot(cloud)
    yield from _plans(cloud)
    yield from _effects(cloud)
    yield from _jobs(cloud)
    seconds = span_seconds(NODES_COUNT)
    spans = [cost_span(cloud, number, T0, T0 + timedelta(seconds=seconds)) for number in range(SAMPLES_COUNT)]
    yield Flow(facts=spans, per_day=_every(seconds) * NODES_COUNT)
    charged = tuple(ChargedUntil(provider_id=cloud.id_of(number), until_at=T0) for number in range(2 * NODES_COUNT))
    example = numbered(CostLedgerReported, cloud, 0)
    assert isinstance(example, CostLedgerReported)
    sums = msgspec.structs.replace(example, charged=charged, jobs=example.jobs * 4_000, spent=example.spent * 200)
    yield Flow(facts=(sums,), per_day=1)


@cache
def pods_per_day() -> float:
    """Return how many pods are created: the trace's, and those that continue elsewhere after the loss of a node."""
    with gzip.open(PODS_FILE, "rt", encoding="utf-8") as file:
        lives = [int(row["deletion_time"]) - int(row["creation_time"]) for row in csv.DictReader(file)]
    ended = (PODS_COUNT - DAEMON_PODS_COUNT) * DAY_SECONDS * len(lives) / sum(lives)
    return ended + PODS_COUNT * LOSSES_PER_NODE_AND_DAY


JOBS_PER_DAY = JOBS_RATIO * USED_RATIO * NODES_COUNT * GPUS_COUNT / JOB_GPUS_COUNT * DAY_SECONDS / JOB_SECONDS
LOSSES_PER_DAY = NODES_COUNT * LOSSES_PER_NODE_AND_DAY


def _every(seconds: float) -> float:
    return DAY_SECONDS / seconds


@cache
def _examples() -> dict[type[Fact], Fact]:
    return {type(envelope.fact): envelope.fact for envelope in examples.examples()}


def numbered(kind: type[Fact], cloud: Cloud, number: int) -> Fact:
    """Return the example of this type with the ids of this object, on this cloud."""
    text = msgspec.json.encode(_examples()[kind]).decode()
    for old, new in (
        (examples.INSTANCE, cloud.id_of(number)),
        (examples.NODE_NAME, cloud.node_of(number)),
        (examples.JOB, f"job-{derive_id('job', number)[:12]}"),
        (examples.POD, uid("pod", number)),
        (examples.NODE, uid("node", number)),
        (examples.BUY, derive_id("buy", number)),
        (examples.DRAIN, derive_id("drain", number)),
        (examples.PLAN, derive_id("plan", number)),
        ("p4d.24xlarge", cloud.instance_type),
        ("sim-a", cloud.zone),
    ):
        text = text.replace(old, new)
    return msgspec.json.decode(text, type=kind)


def _flow(kind: type[Fact], cloud: Cloud, per_day: float) -> Flow:
    return Flow(facts=[numbered(kind, cloud, number) for number in range(SAMPLES_COUNT)], per_day=per_day)


def cost_span(cloud: Cloud, number: int, from_at: datetime, to_at: datetime) -> CostAccrued:
    """Return the span of an instance that three jobs share, as many as eight GPUs have; each runs for five hours."""
    example = numbered(CostAccrued, cloud, number)
    assert isinstance(example, CostAccrued)
    (share,) = example.shares
    turn = int(from_at.timestamp() / JOB_SECONDS)
    shares = tuple(
        msgspec.structs.replace(
            share,
            job_id=JobId(f"job-{derive_id('job', number, place, turn)[:12]}"),
            allocated_micro_usd=share.allocated_micro_usd + number * 7 + place,
            used_micro_usd=(share.used_micro_usd or 0) + turn % 1000,
        )
        for place in range(JOBS_PER_NODE_COUNT)
    )
    return msgspec.structs.replace(
        example,
        from_at=from_at,
        to_at=to_at,
        shares=shares,
        total_micro_usd=sum(share.allocated_micro_usd for share in shares) + number,
        idle_micro_usd=number,
    )


# ---- Kubernetes


_PHASES = ("waiting", "bound", "bound", "running", "succeeded")  # the versions of a pod: bound, then started


def _pods(cloud: Cloud) -> Iterator[Flow]:
    facts = [
        pod_observed(PODS.decode(pod_object(cloud, number * 10 + place, phase), "read"), epoch=examples.EPOCH)
        for number in range(3)
        for place, phase in enumerate(_PHASES)
    ]
    # Once more in each half of the retention, as everything alive.
    again = 2 / 7
    yield Flow(facts=facts, per_day=len(_PHASES) * pods_per_day() + again * PODS_COUNT)
    yield _flow(PodGone, cloud, pods_per_day())
    uids = tuple(PodUid(uid("pod", number)) for number in range(PODS_COUNT))
    listed = PodListed(epoch=examples.EPOCH, version=1_000_000_000, pod_uids=uids, listed_at=T0)
    yield Flow(facts=(listed,), per_day=LISTS_PER_DAY)
    yield _flow(PodWatched, cloud, _every(WATCHED_SECONDS))
    yield _flow(PodBudgetObserved, cloud, pods_per_day() * BUDGETED_RATIO * 2)
    budgets = tuple(uid("budget", number) for number in range(BUDGETS_COUNT))
    yield Flow(
        facts=(PodBudgetListed(epoch=examples.EPOCH, version=1_000_000_000, budget_uids=budgets, listed_at=T0),),
        per_day=_every(BUDGETS_WATCHED_SECONDS),
    )


# Registered, initialized by the cloud, labeled, drivers ready, taint removed, cordoned, not ready, deleting.
_NODE_VERSIONS_COUNT = 8
_INSTANCE_STATES_COUNT = 4


def _nodes(cloud: Cloud) -> Iterator[Flow]:
    facts = [
        node_observed(NODES.decode(node_object(cloud, number), "read"), epoch=examples.EPOCH)
        for number in range(SAMPLES_COUNT)
    ]
    again = 2 / 7 * NODES_COUNT
    yield Flow(facts=facts, per_day=LOSSES_PER_DAY * _NODE_VERSIONS_COUNT + again)
    yield _flow(NodeGone, cloud, LOSSES_PER_DAY)
    yield _flow(NodeInstanceObserved, cloud, LOSSES_PER_DAY * _INSTANCE_STATES_COUNT + again)
    yield _flow(NodeWatched, cloud, _every(WATCHED_SECONDS))
    uids = tuple(NodeUid(uid("node", number)) for number in range(NODES_COUNT))
    listed = NodeListed(epoch=examples.EPOCH, version=1_000_000_000, node_uids=uids, listed_at=T0)
    yield Flow(facts=(listed,), per_day=LISTS_PER_DAY)
    ids = tuple(cloud.id_of(number) for number in range(NODES_COUNT))
    whole = NodeInstanceListed(provider_ids=ids, listed_at=T0)
    yield Flow(facts=(whole,), per_day=_every(FULL_LIST_PERIOD.total_seconds()))
    yield Flow(facts=[_changes(cloud, number) for number in range(SAMPLES_COUNT)], per_day=_every(LIST_SECONDS))


def _changes(cloud: Cloud, number: int) -> NodeWatched:
    """Return the difference of two lists; a third of them has one that appeared and one that is missing."""
    at = T0 + timedelta(seconds=LIST_SECONDS * number)
    changed = (cloud.id_of(number),) if number % 3 == 0 else ()
    changes = InstanceChanges(since=at - timedelta(seconds=LIST_SECONDS), appeared=changed, missing=changed)
    return NodeWatched(epoch=0, version=0, watched_at=at, instances=changes)


# ---- telemetry and market


def _exporter_page(cloud: Cloud, node: int, scrape: int) -> str:
    """The counters that a DCGM exporter has by default, for eight GPUs in use."""
    lines = []
    for gpu in range(GPUS_COUNT):
        vary = (node * 31 + scrape * 7 + gpu * 13) % 40
        labels = (
            f'gpu="{gpu}",UUID="GPU-{uid("gpu", node * GPUS_COUNT + gpu)}",device="nvidia{gpu}",'
            f'modelName="NVIDIA A100-SXM4-40GB",Hostname="{cloud.node_of(node)}",'
            f'exported_namespace="research-training",exported_pod="llm-finetune-{node:05d}-worker-{gpu}-x7k2p"'
        )
        values = {
            "DCGM_FI_DEV_GPU_UTIL": 60 + vary,
            "DCGM_FI_DEV_FB_USED": 30_000 + vary,
            "DCGM_FI_DEV_FB_FREE": 10_000 - vary,
            "DCGM_FI_DEV_FB_RESERVED": 536,
            "DCGM_FI_DEV_GPU_TEMP": 50 + vary // 2,
            "DCGM_FI_DEV_POWER_USAGE": f"{300 + vary}.{vary:03d}",
            "DCGM_FI_DEV_XID_ERRORS": 0,
            "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
        }
        lines += [f"{name}{{{labels}}} {value}" for name, value in values.items()]
    return "\n".join(lines)


def telemetry_of(cloud: Cloud, number: int, started_at: datetime) -> GpuNodeSummarized:
    """Return the summary of a node for a minute."""
    seconds = SensingSettings().dcgm_scrape_seconds
    window = Window(NodeUid(uid("node", number)), cloud.node_of(number), started_at)
    for scrape in range(int(WINDOW_SECONDS / seconds)):
        window.add(parse_page(_exporter_page(cloud, number, scrape + started_at.minute)).gpus)
    return window.summary()


def _telemetry(cloud: Cloud) -> Iterator[Flow]:
    seconds = SensingSettings().dcgm_scrape_seconds
    sampled = []
    for number in range(SAMPLES_COUNT):
        page = parse_page(_exporter_page(cloud, number, number))
        at = T0 + timedelta(microseconds=number + 1)
        fact = GpuNodeSampled(
            node_uid=NodeUid(uid("node", number)), node_name=cloud.node_of(number), sampled_at=at, gpus=page.gpus
        )
        sampled.append(fact)
    summarized = [telemetry_of(cloud, number, T0) for number in range(SAMPLES_COUNT)]
    yield Flow(facts=sampled, per_day=_every(seconds) * NODES_COUNT)
    yield Flow(facts=summarized, per_day=_every(WINDOW_SECONDS) * NODES_COUNT)


def offers_sampled() -> Story:
    """Return all offers of an account that may use types with GPUs in three zones."""
    return on_sale(
        *(
            msgspec.structs.replace(
                offer(f"p{number}d.24xlarge", zone=zone, capacity_type=capacity_type, usd_per_hour=10 + number / 7),
                price_source="ec2:DescribeSpotPriceHistory",
                interruption_ratio=0.05,
            )
            for number in range(OFFERS_TYPES_COUNT)
            for zone in ("us-east-1a", "us-east-1b", "us-east-1c")
            for capacity_type in (CapacityType.SPOT, CapacityType.ON_DEMAND)
        )
    )


def _spot(cloud: Cloud) -> Iterator[Flow]:
    # A list every five minutes; and in every tenth poll an offer has sold out or returned, or a price has jumped.
    (sampled,) = (item.fact for item in offers_sampled() if isinstance(item.fact, SpotOffersSampled))
    per_day = _every(REPEAT_INTERVAL.total_seconds()) + 0.1 * _every(POLL_INTERVAL.total_seconds())
    yield Flow(facts=(sampled,), per_day=per_day)
    yield _flow(SpotNoticeReceived, cloud, LOSSES_PER_DAY)
    yield _flow(SpotRebalanceRecommended, cloud, LOSSES_PER_DAY)


# ---- plans, effects, jobs


@cache
def planned() -> tuple[Plan, ...]:
    """Return plans of a full cluster where gangs wait: one that waits, one that buys, one that drains under notice."""
    whole = offer()
    names = [f"n{number}" for number in range(NODES_COUNT)]
    ground = (
        *(with_finalizer(node(name, whole)) for name in names),
        *(
            pod(f"p{number}", on=names[number // 10], gpus=int(number % 10 < GPUS_COUNT))
            for number in range(PODS_COUNT)
        ),
        offers_sampled(),
    )
    gangs = [job(f"gang-{number}", gpus=GPUS_COUNT, members=1 + number % 4) for number in range(40)]
    limited, free = policy(nodes_count_max=NODES_COUNT), policy(nodes_count_max=2 * NODES_COUNT)
    ends = [notice(name, reclaim_at=T0 + 2 * MINUTE) for name in names[:2]]
    made = []
    for story, rules in (((*ground, *gangs), limited), ((*ground, gangs[0]), free), ((*ground, *ends), limited)):
        state = given(*story, as_of=T0)
        plan = checked_plan(state, rules, T0 + SECOND).plan
        assert plan is not None
        made.append(grouped(plan, state))
    return tuple(made)


def plan_fact(plan: Plan, number: int) -> ScalingPlanMade:
    """Return the plan as published; the number makes it another one."""
    last = tuple(
        (name, 10_000_000 + number) for name in ("COST", "DEMAND", "GPU", "JOB", "NODE", "POD", "POLICY", "SPOT")
    )
    return ScalingPlanMade(
        plan_id=PlanId(derive_id("plan", number, plan.as_of)),
        plan=plan,
        cut=Cut(last_sequences=(*last, ("SCALING", 1_000_000))),
        policy_digest=derive_id("policy"),
        core_digest=derive_id("core"),
        service_version="0.3.0",
    )


def _plans(cloud: Cloud) -> Iterator[Flow]:
    waiting, buying, draining = planned()
    yield Flow(facts=[plan_fact(waiting, number) for number in range(SAMPLES_COUNT)], per_day=_every(TICK_SECONDS))
    bought_count = len(buying.decisions)
    yield Flow(facts=(plan_fact(buying, -1),), per_day=LOSSES_PER_DAY / bought_count)
    yield Flow(facts=(plan_fact(draining, -2),), per_day=LOSSES_PER_DAY / len(draining.decisions))
    shadow = numbered(ShadowPlanMade, cloud, 0)
    assert isinstance(shadow, ShadowPlanMade)
    yield Flow(facts=(msgspec.structs.replace(shadow, plan=waiting),), per_day=_every(TICK_SECONDS))


def _effects(cloud: Cloud) -> Iterator[Flow]:
    for kind in (
        ScalingNodeOrdered,
        ScalingNodeLaunched,
        ScalingDrainStarted,
        ScalingCheckpointRequested,
        ScalingNodeDrained,
        ScalingNodeTerminated,
    ):
        yield _flow(kind, cloud, LOSSES_PER_DAY)
    yield _flow(ScalingPodEvicted, cloud, LOSSES_PER_DAY * PODS_COUNT / NODES_COUNT)
    yield _flow(ScalingOrderResynced, cloud, NODES_COUNT * 2 / 30)
    yield _flow(ScalingDemandSampled, cloud, _every(60))
    yield _flow(ScalingForecastScored, cloud, 24 * 3)


def _jobs(cloud: Cloud) -> Iterator[Flow]:
    for kind in (JobRequested, JobQueued, JobEstimated, JobEstimateScored, JobPlaced, JobStarted, JobFinished):
        yield _flow(kind, cloud, JOBS_PER_DAY)
    yield _flow(JobResynced, cloud, NODES_COUNT * GPUS_COUNT / JOB_GPUS_COUNT * 2 / 30)
