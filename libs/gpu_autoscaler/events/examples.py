"""One example of each fact, which together tell one story. Written to `schemas/examples/`, used by tests."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from gpu_autoscaler.events import cost, demand, gpu, job, node, pod, policy, scaling, shadow, spot
from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.decisions import BuyNode, Cut, Deferred, Difference, DrainNode, PastDecision, Plan, Side
from gpu_autoscaler.model.demands import BEST_EFFORT_ATOMIC, DemandShape, PodSet, ProvisioningCondition
from gpu_autoscaler.model.directives import Override
from gpu_autoscaler.model.estimates import Estimate
from gpu_autoscaler.model.forecasts import Score
from gpu_autoscaler.model.gpu import GIBIBYTE
from gpu_autoscaler.model.ids import ActionId, FactId, JobId, NodeUid, PlanId, PodUid, ProviderId, derive_id
from gpu_autoscaler.model.jobs import ContainerRequest, GpuRequirements, JobSpec, ResourceRequest, Violation
from gpu_autoscaler.model.labels import ACTION_ID, DO_NOT_DISRUPT, POOL
from gpu_autoscaler.model.offers import CapacityType, Offer
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument
from gpu_autoscaler.model.reasons.buy import UnmetDemand
from gpu_autoscaler.model.reasons.defer_limits import Frozen
from gpu_autoscaler.model.reasons.drain import NodeIdle
from gpu_autoscaler.model.resources import Resources
from gpu_autoscaler.model.scheduling import LabelRequirement, NodeDemands, Taint, Toleration

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
EPOCH = 1_795_000_000
JOB = JobId("job-5d41402abc4b")
POD = PodUid("0b6a1d4e-6a5f-4a53-9c55-0d5d6f1f3a11")
NODE = NodeUid("6f1c2f9e-3a67-4f5c-8b1e-7d6c5b4a3f2e")
INSTANCE = ProviderId("sim:///sim-a/i-0a1b2c3d4e5f")
BUY = ActionId(derive_id("action", NOON.isoformat(), 0, 0))
DRAIN = ActionId(derive_id("action", NOON.isoformat(), 1, 0))
PLAN = PlanId(derive_id("plan", NOON.isoformat(), 0))
NODE_NAME = "gpu-a100-1"
TAINT = Taint("nvidia.com/gpu", "NoSchedule", "true")
OFFER = Offer(
    instance_type="p4d.24xlarge",
    zone="sim-a",
    capacity_type=CapacityType.SPOT,
    resources=Resources(cpu_milli=95_000, memory_bytes=1100 * GIBIBYTE, gpu_count=8, pod_count=110),
    gpu_model="A100",
    gpu_memory_bytes=40 * GIBIBYTE,
    price_micro_usd_per_hour=9_840_000,
    boot_seconds=150.0,
)
SPEC = JobSpec(
    job_id=JOB,
    job_name="llm-finetune",
    project_id="research",
    priority=1000,
    member_count=2,
    member_resources=Resources(cpu_milli=16_000, memory_bytes=128 * GIBIBYTE, gpu_count=4, pod_count=1),
    gpu_model="A100",
    gpu_memory_bytes_min=None,
    image="registry.example/train:1",
    command=("python", "train.py"),
    env={"EPOCHS": "3"},
    workload_type="training",
    is_preemptible=True,
    budget_limit_micro_usd=250_000_000,
    duration_seconds_max=12 * 3600.0,
    requested_at=NOON,
)


def _at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def _jobs() -> Iterator[Fact]:
    yield job.JobRequested(
        job_id=JOB,
        job_name="llm-finetune",
        project_id="research",
        priority="high",
        gpu_requirements=GpuRequirements(gpu_type="A100", gpu_count=4),
        container=ContainerRequest(
            image="registry.example/train:1", command=("python", "train.py"), env={"EPOCHS": "3"}
        ),
        resources=ResourceRequest(cpu="16", memory="128Gi", ephemeral_storage="100Gi"),
        budget_limit_usd=250.0,
        max_duration_hours=12.0,
        members=2,
        workload_type="training",
        pod_annotations={"gpu-autoscaler.io/checkpointed-at": ""},
    )
    yield job.JobCancelRequested(job_id=JOB, requested_by="ada", note="wrong data set")
    yield job.JobQueued(job_id=JOB, spec=SPEC, queued_at=_at(0.1))
    violation = Violation("gpu_requirements.gpu_type", "unknown GPU model 'A1000'; known: A100, H100")
    yield job.JobRejected(request_id="b7e2", violations=(violation,), job_name="typo")
    expected = Estimate(
        basis="booting_nodes", why="It starts on 2 ordered nodes (boot times as the offers promise).",
        start_at=_at(160), start_at_earliest=_at(160), start_at_latest=_at(310), cost_micro_usd=118_080_000,
        cost_micro_usd_max=118_080_000, run_seconds=12 * 3600.0,
    )  # fmt: skip
    yield job.JobEstimated(job_id=JOB, estimate=expected, estimated_at=_at(2))
    yield job.JobEstimateScored(
        job_id=JOB, basis="booting_nodes", start_error_seconds=12.0, was_within=True, cost_error_micro_usd=0,
        scored_at=_at(173),
    )  # fmt: skip
    yield job.JobPlaced(
        job_id=JOB, attempt=1, node_uids=(NODE, NODE), node_names=(NODE_NAME, NODE_NAME), placed_at=_at(170)
    )
    yield job.JobPreempted(
        job_id=JOB, attempt=1, cause=f"node {NODE_NAME} was drained: spot_reclaim", preempted_at=_at(900)
    )
    yield job.JobStarted(
        job_id=JOB, kube_job="gpu-jobs/job-5d41402abc4b", started_at=_at(172), epoch=EPOCH, version=5120
    )
    yield job.JobListed(job_ids=(JOB,), listed_at=_at(180), epoch=EPOCH, version=5200)
    yield job.JobFinished(job_id=JOB, outcome="completed", finished_at=_at(3600))
    yield job.JobResynced(job_id=JOB, queued=job.JobQueued(job_id=JOB, spec=SPEC, queued_at=_at(0.1)))


def _pods() -> Iterator[Fact]:
    yield pod.PodObserved(
        pod_uid=POD,
        namespace="gpu-jobs",
        name="job-5d41402abc4b-0-x7k2p",
        phase="running",
        requests=SPEC.member_resources,
        created_at=_at(171),
        node_name=NODE_NAME,
        is_ready=True,
        started_at=_at(172),
        demands=NodeDemands(tolerations=(Toleration(key="nvidia.com/gpu", operator="Exists"),)),
        gpu_model="A100",
        labels=(("app", "train"),),
        annotations=((DO_NOT_DISRUPT, "true"),),
        owner_kind="Job",
        owner_uid="9f8e7d6c",
        job_id=JOB,
        epoch=EPOCH,
        version=5121,
    )
    yield pod.PodGone(
        pod_uid=POD, namespace="gpu-jobs", name="job-5d41402abc4b-0-x7k2p", node_name=NODE_NAME, job_id=JOB,
        epoch=EPOCH, version=9000,
    )  # fmt: skip
    yield pod.PodListed(pod_uids=(POD,), listed_at=_at(180), epoch=EPOCH, version=5200)
    yield pod.PodWatched(watched_at=_at(190), epoch=EPOCH, version=5300)
    yield pod.PodBudgetObserved(
        budget_uid="1c2d", namespace="gpu-jobs", name="train", disruptions_allowed=1, pods_healthy_count=3,
        pods_healthy_count_min=2, match_labels=(LabelRequirement("app", "In", ("train",)),),
        epoch=EPOCH, version=5150,
    )  # fmt: skip
    yield pod.PodBudgetGone(budget_uid="1c2d", namespace="gpu-jobs", name="train", epoch=EPOCH, version=9100)
    yield pod.PodBudgetListed(budget_uids=("1c2d",), listed_at=_at(180), epoch=EPOCH, version=5200)
    yield pod.PodQuotaObserved(
        quota_uid="5e6f", namespace="gpu-research", name="gpu-autoscaler",
        hard_milli=(("requests.nvidia.com/gpu", 16_000),), used_milli=(("requests.nvidia.com/gpu", 8_000),),
        scopes=(LabelRequirement("PriorityClass", "In", ("gpu-autoscaler-medium",)),),
        epoch=EPOCH, version=5160,
    )  # fmt: skip
    yield pod.PodQuotaGone(quota_uid="5e6f", namespace="gpu-research", name="gpu-autoscaler", epoch=EPOCH, version=9200)
    yield pod.PodQuotaListed(quota_uids=("5e6f",), listed_at=_at(180), epoch=EPOCH, version=5200)
    yield pod.PodProvisioningObserved(
        request_uid="7a8b", namespace="gpu-research", name="job-train-3f1c0-gpus-1", class_name=BEST_EFFORT_ATOMIC,
        created_at=_at(100), members_count=2,
        pod_sets=(PodSet(count=2, requests=Resources(cpu_milli=8000, gpu_count=8, pod_count=1)),),
        conditions=(ProvisioningCondition(type="Accepted", is_true=True, since=_at(101), reason="Accepted"),),
        epoch=EPOCH, version=5170,
    )  # fmt: skip
    yield pod.PodProvisioningGone(
        request_uid="7a8b", namespace="gpu-research", name="job-train-3f1c0-gpus-1", epoch=EPOCH, version=9300
    )
    yield pod.PodProvisioningListed(request_uids=("7a8b",), listed_at=_at(180), epoch=EPOCH, version=5200)


def _nodes() -> Iterator[Fact]:
    yield node.NodeObserved(
        node_uid=NODE,
        name=NODE_NAME,
        is_ready=True,
        allocatable=OFFER.resources,
        created_at=_at(120),
        provider_id=INSTANCE,
        instance_type="p4d.24xlarge",
        zone="sim-a",
        capacity_type=CapacityType.SPOT,
        gpu_model="A100",
        gpu_memory_bytes=40 * GIBIBYTE,
        ready_since=_at(150),
        internal_ip="127.0.0.1",
        labels=((ACTION_ID, BUY), (POOL, "default")),
        taints=(TAINT,),
        action_id=BUY,
        epoch=EPOCH,
        version=5050,
    )
    yield node.NodeGone(node_uid=NODE, name=NODE_NAME, provider_id=INSTANCE, epoch=EPOCH, version=9500)
    yield node.NodeListed(node_uids=(NODE,), listed_at=_at(180), epoch=EPOCH, version=5200)
    yield node.NodeWatched(watched_at=_at(190), epoch=EPOCH, version=5300)
    yield node.NodeInstanceObserved(
        provider_id=INSTANCE, action_id=BUY, state="running", instance_type="p4d.24xlarge", zone="sim-a",
        capacity_type=CapacityType.SPOT, price_micro_usd_per_hour=9_840_000, launched_at=_at(2), epoch=0, version=2,
    )  # fmt: skip
    yield node.NodeInstanceListed(provider_ids=(INSTANCE,), listed_at=_at(180))


def _telemetry() -> Iterator[Fact]:
    sample = gpu.GpuSample(
        gpu="0", gpu_uuid="GPU-4f1e", gpu_model="A100", utilization_ratio=0.93, memory_used_bytes=30 * GIBIBYTE,
        memory_total_bytes=40 * GIBIBYTE, temperature_celsius=64.0, power_watts=371.5, pod="gpu-jobs/train-0",
        xid=0, is_row_remap_failed=False, ecc_double_bit_count=0,
    )  # fmt: skip
    yield gpu.GpuNodeSampled(node_uid=NODE, node_name=NODE_NAME, sampled_at=_at(200), gpus=(sample,))
    summary = gpu.GpuSummary(
        gpu="0", gpu_uuid="GPU-4f1e", samples_count=6, utilization_ratio_min=0.88, utilization_ratio_mean=0.92,
        utilization_ratio_max=0.97, memory_used_bytes_max=31 * GIBIBYTE, memory_total_bytes=40 * GIBIBYTE,
        temperature_celsius_min=63.0, temperature_celsius_max=66.0, power_watts_mean=365.0, pod="gpu-jobs/train-0",
        xid_last=13, xids=(13,), is_row_remap_failed=False, ecc_double_bit_count=0,
    )  # fmt: skip
    yield gpu.GpuNodeSummarized(
        node_uid=NODE, node_name=NODE_NAME, window_started_at=_at(180), window_seconds=60.0,
        scrapes_expected_count=6, scrapes_answered_count=6, gpus=(summary,),
        epoch=0, version=int(_at(180).timestamp()),
    )  # fmt: skip


def _spot() -> Iterator[Fact]:
    deadline = _at(900)
    yield spot.SpotNoticeReceived(
        provider_id=INSTANCE, kind="terminate", provider_event=deadline.isoformat(), reclaim_at=deadline,
        node_name=NODE_NAME, received_at=_at(780),
    )  # fmt: skip
    yield spot.SpotNoticeWithdrawn(
        provider_id=INSTANCE, kind="terminate", provider_event=deadline.isoformat(), withdrawn_at=_at(800)
    )
    yield spot.SpotRebalanceRecommended(provider_id=INSTANCE, noticed_at=_at(700), node_name=NODE_NAME)
    yield spot.SpotOffersSampled(
        provider="sim", offers=(OFFER,), sampled_at=NOON, epoch=0, version=int(NOON.timestamp())
    )


def _scaling() -> Iterator[Fact]:
    deadline = _at(900)
    labels = ((ACTION_ID, BUY), (POOL, "default"))
    buy = BuyNode(
        action_id=BUY,
        pool="default",
        offer=OFFER,
        labels=labels,
        taints=(TAINT,),
        deadline_at=deadline,
        reason=UnmetDemand(demand=(f"job/{JOB}",), offers_considered=42, price_micro_usd_per_hour=9_840_000),
        gang=f"job/{JOB}",
    )
    deferred = Deferred(step="consolidate", subject="cluster", reason=Frozen())
    yield scaling.ScalingPlanMade(
        plan_id=PLAN,
        plan=Plan(as_of=NOON, parent_sequence=0, decisions=(buy,), deferred=(deferred,)),
        cut=Cut(last_sequences=(("JOB", 2), ("NODE", 1), ("POD", 1), ("SPOT", 1))),
        policy_digest=derive_id("policy"),
        core_digest=derive_id("core"),
        service_version="0.1.0",
    )
    yield scaling.ScalingDecisionsRestored(
        past=(PastDecision(decision=buy, plan_id=PLAN, planned_at=NOON),), restored_at=_at(60)
    )
    yield scaling.ScalingNodeOrdered(
        action_id=BUY, plan_id=PLAN, pool="default", offer=OFFER, deadline_at=deadline, labels=labels,
        gang=f"job/{JOB}",
    )  # fmt: skip
    launched = scaling.ScalingNodeLaunched(
        action_id=BUY, plan_id=PLAN, provider_id=INSTANCE, instance_type="p4d.24xlarge", zone="sim-a",
        capacity_type=CapacityType.SPOT, price_micro_usd_per_hour=9_840_000, launched_at=_at(2),
    )  # fmt: skip
    yield launched
    yield scaling.ScalingOrderResynced(action_id=BUY, plan_id=PLAN, decision=buy, planned_at=NOON, launched=launched)
    yield scaling.ScalingLaunchRefused(
        action_id=BUY, plan_id=PLAN, offer=OFFER, code="InsufficientInstanceCapacity",
        message="no p4d.24xlarge in sim-a now", scope="offer", refused_at=_at(2), retry_at=_at(182),
    )  # fmt: skip
    started = scaling.ScalingDrainStarted(
        action_id=DRAIN, plan_id=PLAN, node_uid=NODE, node_name=NODE_NAME, provider_id=INSTANCE,
        is_voluntary=False, deadline_at=deadline, started_at=_at(781),
    )  # fmt: skip
    yield started
    yield scaling.ScalingDrainResynced(action_id=DRAIN, plan_id=PLAN, started=started)
    yield scaling.ScalingCheckpointRequested(
        action_id=DRAIN, plan_id=PLAN, node_name=NODE_NAME, pods=("gpu-jobs/train-0",), job_ids=(JOB,),
        deadline_at=deadline, requested_at=_at(781),
    )  # fmt: skip
    yield scaling.ScalingPodEvicted(
        action_id=DRAIN, plan_id=PLAN, node_name=NODE_NAME, pod_uid=POD, pod="gpu-jobs/train-0", is_forced=False,
        evicted_at=_at(782),
    )  # fmt: skip
    yield scaling.ScalingNodeDrained(
        action_id=DRAIN, plan_id=PLAN, node_uid=NODE, node_name=NODE_NAME, provider_id=INSTANCE, drained_at=_at(800)
    )
    yield scaling.ScalingDrainCancelled(
        action_id=DRAIN, plan_id=PLAN, drain_action_id=DRAIN, node_uid=NODE, node_name=NODE_NAME, cancelled_at=_at(790)
    )


def _ends() -> Iterator[Fact]:
    yield scaling.ScalingNodeTerminated(
        action_id=DRAIN, plan_id=PLAN, provider_id=INSTANCE, order_action_id=BUY, node_name=NODE_NAME,
        terminated_at=_at(802),
    )  # fmt: skip
    yield scaling.ScalingNodeRemoved(
        node_uid=NODE, node_name=NODE_NAME, provider_id=INSTANCE, asked_at=_at(925), removed_at=_at(990)
    )


def _foreseeing() -> Iterator[Fact]:
    hour = int(NOON.timestamp()) // 3600
    yield scaling.ScalingDemandSampled(minute=60 * hour, gpu_counts=(("A100", 24), ("any", 3)))
    score = Score(
        hour=hour - 2, foreseen_count=8, minutes_count=60, kept_count=51, missed_gpu_minutes=36,
        unused_gpu_minutes=204, rise_gpu_minutes=312,
    )  # fmt: skip
    yield scaling.ScalingForecastScored(kind="A100", score=score)


def _shadow() -> Iterator[Fact]:
    idle = NodeIdle(idle_seconds=130.0, idle_seconds_max=120.0)
    drain = DrainNode(
        action_id=DRAIN, node_uid=NODE, node_name=NODE_NAME, provider_id=INSTANCE, is_voluntary=True,
        deadline_at=_at(1200), reason=idle,
    )  # fmt: skip
    made = Side(
        what="deferred",
        reason="not_yet_idle",
        sentence="The node has been empty for 2 min 10 s; an idle node is removed after 10 min.",
    )
    other = Side(
        what="drain_node",
        reason="node_idle",
        sentence="No pod has used the node for 2 min 10 s; an idle node is removed after 2 min.",
    )
    yield shadow.ShadowPlanMade(
        plan_id=PLAN, parent_sequence=3, plan=Plan(as_of=_at(600), parent_sequence=12, decisions=(drain,)),
        cut=Cut(last_sequences=(("NODE", 40), ("POD", 80))), policy_digest="5b" * 16, real_policy_digest="c3" * 16,
        core_digest="9e" * 16,
        differences=(Difference(subject=f"node/{NODE}", name=f"node/{NODE_NAME}", made=made, other=other),),
    )  # fmt: skip


def _money() -> Iterator[Fact]:
    share = cost.CostShare(
        allocated_micro_usd=164_000, used_micro_usd=150_880, job_id=JOB, project_id="research", namespace="gpu-jobs"
    )
    yield cost.CostAccrued(
        provider_id=INSTANCE, node_name=NODE_NAME, instance_type="p4d.24xlarge", capacity_type=CapacityType.SPOT,
        from_at=_at(180), to_at=_at(240), total_micro_usd=164_000, idle_micro_usd=0, shares=(share,),
        price_micro_usd_per_hour=9_840_000, price_source="sim", price_at=_at(2),
        pool="default", zone="sim-a", bought_for="research",
    )  # fmt: skip
    yield cost.CostLedgerReported(
        spent=(
            cost.Spent(period="2026-11", owner="cluster", micro_usd=1_840_250_000),
            cost.Spent(period="2026-11-21", owner="cluster", micro_usd=98_400_000),
        ),
        charged=(cost.ChargedUntil(provider_id=INSTANCE, until_at=_at(240)),),
        jobs=(cost.SpentByJob(job_id=JOB, micro_usd=164_000),),
        reported_at=_at(245),
    )  # fmt: skip
    yield cost.CostBudgetCrossed(
        scope="job", scope_id=JOB, mark_ratio=0.8, spent_micro_usd=200_100_000, limit_micro_usd=250_000_000,
        crossed_at=_at(3000),
    )  # fmt: skip


def _demand() -> Iterator[Fact]:
    yield demand.DemandReported(
        source="kafka-lag",
        shape=DemandShape(gpu_count=1, gpu_type="A100", cpu="8", memory="64Gi"),
        count=6,
        until=_at(1800),
        note="12,000 messages wait",
    )


def _policy() -> Iterator[Fact]:
    target = Override(pool="training", gpu_count_min=16, gpu_count_max=32)
    yield policy.PolicyDirectiveGiven(
        directive=target, reason="review at two", given_by="ada", given_at=_at(0), until=_at(7200)
    )
    yield policy.PolicyDirectiveLifted(key=target.key, lifted_by="ada", lifted_at=_at(3600), reason="review finished")
    yield policy.PolicyChanged(
        policy_digest=derive_id("policy"),
        before_digest=derive_id("before"),
        changed_at=_at(60),
        differences=("nodes_count_max: 100 -> 50",),
        path="/etc/gpu-autoscaler/policy.toml",
    )
    pool = DocumentPool(name="training", nodes_count_max=8, gpu_models=("H100",), zones=("us-east-1a",))
    yield policy.PolicyDocumentsAccepted(
        documents=(
            PolicyDocument(
                name="vision", uid="0f5b1c9e", generation=3, created_at=_at(0), nodes_count_max=8, spot_ratio=0.4,
                pools=(pool,),
            ),
        ),
        accepted_at=_at(60),
    )  # fmt: skip


def examples() -> Iterator[Envelope]:
    """One envelope of each fact of the catalog."""
    parts = (
        _jobs, _pods, _nodes, _telemetry, _spot, _scaling, _ends, _foreseeing, _shadow, _money, _demand, _policy,
    )  # fmt: skip
    for part in parts:
        for fact in part():
            yield Envelope(
                id=FactId(fact.condition() or derive_id("example", fact.type_name())),
                source="/gpu-autoscaler/example",
                time=NOON,
                fact=fact,
                correlation_id="example",
            )
