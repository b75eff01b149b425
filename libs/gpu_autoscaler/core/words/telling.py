"""Recorded facts in sentences, one fact at a time. Used by `core/explain.py`, which chooses the facts.

Observations repeat; a sentence is made only of what is new since the last one about the same thing.
"""

from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from gpu_autoscaler.core.words.sentences import decision_sentence, held_back_sentence
from gpu_autoscaler.core.words.wording import counted, instant, money, named, price, span
from gpu_autoscaler.events import job, node, pod, scaling, spot
from gpu_autoscaler.events.demand import DemandReported
from gpu_autoscaler.events.envelope import Recorded
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.money import MICRO_USD_PER_USD


class Teller:
    """Tells facts in the order in which they happened. `keys` are the things that the story is about."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._keys = keys
        self._last: dict[str, str] = {}  # the last that was told of each thing
        self._names: dict[str, str] = {}  # of nodes, as far as they were told of

    def tell(self, recorded: Recorded) -> Iterator[str]:
        """Yield what this fact adds to the story, with its instant and its place in the record."""
        fact = recorded.envelope.fact
        if isinstance(fact, scaling.ScalingPlanMade):
            sentences = self._plan(fact)
        elif isinstance(fact, scaling.ScalingDecisionsRestored):
            sentences = self._restored(fact)
        else:
            sentences = self._one(fact)
        for text in sentences:
            yield f"{instant(recorded.envelope.time)}: {text} [{recorded.stream} {recorded.sequence}]"

    def _plan(self, fact: scaling.ScalingPlanMade) -> Iterator[str]:
        ours = (one for one in fact.plan.decisions if f"action/{one.action_id}" in self._keys)
        # The members of a gang often get nodes of one kind: the same sentence for each of them.
        for text, count in Counter(map(decision_sentence, ours)).items():
            yield f"Plan {fact.plan_id}: {f'{count} times: ' if count > 1 else ''}{text}"
        for held in fact.plan.deferred:
            # What holds the whole cluster back holds this back too, where the plan speaks of this at all. A plan a
            # second says the same thing as long as it is so; once is enough.
            is_about = held.subject in self._keys or held.subject == "cluster"
            if is_about and self._is_news(f"held/{held.subject}/{held.step}", held.reason.tag()):
                called = replace(held, subject=self._names.get(held.subject, held.subject))
                yield f"Plan {fact.plan_id}: {held_back_sentence(called)}"

    def _restored(self, fact: scaling.ScalingDecisionsRestored) -> Iterator[str]:
        for past in fact.past:
            if f"action/{past.decision.action_id}" in self._keys:
                told = decision_sentence(past.decision)
                yield f"The record began anew, and plan {past.plan_id} of before is carried on: {told}"

    def _is_news(self, key: str, said: str) -> bool:
        is_news = self._last.get(key) != said
        self._last[key] = said
        return is_news

    def _one(self, fact: Fact) -> Iterator[str]:
        if isinstance(fact, node.NodeObserved):
            self._names[f"node/{fact.node_uid}"] = f"node/{fact.name}"
            text: str | None = f"Node {fact.name} {_node_status(fact)}."
        elif isinstance(fact, pod.PodObserved):
            text = f"Pod {fact.namespace}/{fact.name} {_pod_status(fact)}."
        else:
            text = _job_sentence(fact) or _estimate_sentence(fact) or _scaling_sentence(fact) or _other_sentence(fact)
        if text is not None and self._is_news(fact.entity() or "cluster", text):
            yield text


def _node_status(fact: node.NodeObserved) -> str:
    if fact.deleting_since is not None:
        return "is being deleted"
    if fact.is_cordoned:
        return "is cordoned"
    if not fact.is_ready:
        return "is registered, not ready"
    if not fact.allocatable.gpu_count:
        return "is ready, without a GPU that pods can use"
    return f"is ready with {counted(fact.allocatable.gpu_count, 'GPU')}"


def _pod_status(fact: pod.PodObserved) -> str:
    if fact.phase in ("succeeded", "failed"):
        return fact.phase
    if fact.deleting_since is not None:
        return "is being deleted"
    if fact.node_name is not None:
        return f"{'runs' if fact.phase == 'running' else 'is bound'} on node {fact.node_name}"
    if fact.unschedulable_since is not None:
        why = f": {fact.unschedulable_message}" if fact.unschedulable_message else ""
        return f"found no node{why.rstrip('.')}"
    return "waits"


def _job_sentence(fact: Fact) -> str | None:
    match fact:
        case job.JobRequested():
            gpus = fact.gpu_requirements
            each = f" for each of {fact.members} members" if fact.members > 1 else ""
            limit = ""
            if fact.budget_limit_usd is not None:
                limit = f", for at most {money(round(fact.budget_limit_usd * MICRO_USD_PER_USD))}"
            model = f"{' or '.join(gpus.gpu_types)} GPU" if gpus.gpu_types else "GPU"
            asked = f"{counted(gpus.gpu_count, model)}{each}{limit}"
            return f"Project {fact.project_id} asked for job {fact.job_name} with {asked} (priority {fact.priority})."
        case job.JobQueued():
            return f"Job {fact.job_id} was accepted with priority {fact.spec.priority}."
        case job.JobRejected():
            mistakes = "; ".join(f"{mistake.field} {mistake.reason}" for mistake in fact.mistakes)
            return f"Job {fact.job_id or fact.job_name} was refused: {mistakes}."
        case job.JobCancelRequested():
            why = f": {fact.note}" if fact.note else ""
            return f"{fact.requested_by or 'Somebody'} asked to cancel job {fact.job_id}{why}."
        case job.JobPlaced():
            nodes = named(sorted(set(fact.node_names)))
            return f"Job {fact.job_id} got its place on {nodes} (attempt {fact.attempt})."
        case job.JobPreempted():
            return f"Job {fact.job_id} lost its place (attempt {fact.attempt}): {fact.cause}."
        case job.JobStarted():
            return f"All members of job {fact.job_id} run."
        case job.JobFinished():
            why = f": {fact.message.rstrip('.')}" if fact.message else ""
            return f"Job {fact.job_id} {'was cancelled' if fact.outcome == 'cancelled' else fact.outcome}{why}."
        case DemandReported():
            shape = counted(fact.shape.gpu_count, f"{fact.shape.gpu_type} GPU" if fact.shape.gpu_type else "GPU")
            if fact.count is None:
                return f"Source {fact.source} does not know now what it needs; its word before that stands."
            room = f"{counted(fact.count, 'member')} with {shape} each until {instant(fact.until)}"
            return f"Source {fact.source} wants room for {room}."
        case _:
            return None


def _estimate_sentence(fact: Fact) -> str | None:
    match fact:
        case job.JobEstimated(estimate=expected):
            when = "" if expected.start_at is None else f"Its start is expected about {instant(expected.start_at)}. "
            return f"{when}{expected.why}"
        case job.JobEstimateScored(start_error_seconds=float(error)):
            return f"It started {span(abs(error))} {'later' if error >= 0 else 'sooner'} than was expected."
        case _:
            return None


def _scaling_sentence(fact: Fact) -> str | None:
    match fact:
        case scaling.ScalingNodeOrdered():
            return f"The executor ordered {fact.offer.key} (action {fact.action_id})."
        case scaling.ScalingNodeLaunched():
            cost = price(fact.price_micro_usd_per_hour)
            return f"The cloud made {fact.provider_id} ({fact.instance_type}, {fact.zone}) at {cost}."
        case scaling.ScalingLaunchRefused():
            retry = f"it is not asked for {fact.offer.key} again before {instant(fact.retry_at)}"
            return f"The cloud refused {fact.offer.key}: {fact.code}, {fact.message.rstrip('.')}; {retry}."
        case scaling.ScalingDrainStarted():
            return f"Node {fact.node_name} was cordoned for its drain, which ends by {instant(fact.deadline_at)}."
        case scaling.ScalingCheckpointRequested():
            told = named(fact.pods)
            return f"{told} on node {fact.node_name} were told to save their work by {instant(fact.deadline_at)}."
        case scaling.ScalingPodEvicted():
            how = "deleted at the deadline" if fact.is_forced else "asked to go"
            return f"Pod {fact.pod} on node {fact.node_name} was {how}."
        case scaling.ScalingNodeDrained():
            return f"No pod that counts is left on node {fact.node_name}."
        case scaling.ScalingDrainCancelled():
            why = f", as {fact.given_up_because}" if fact.given_up_because else ""
            return f"Node {fact.node_name} was uncordoned: it stays{why}."
        case scaling.ScalingNodeTerminated():
            what = fact.provider_id or f"order {fact.order_action_id}"
            return f"The cloud confirmed that {what} is gone, at {instant(fact.terminated_at)}."
        case scaling.ScalingNodeRemoved():
            gone = f"its instance {fact.provider_id} is gone, as the cloud said twice since {instant(fact.asked_at)}"
            return f"Node {fact.node_name} was taken out of Kubernetes: {gone}."
        case _:
            return None


def _other_sentence(fact: Fact) -> str | None:
    match fact:
        case pod.PodGone():
            return f"Pod {fact.namespace}/{fact.name} is gone."
        case node.NodeGone():
            return f"Node {fact.name} is gone from Kubernetes."
        case node.NodeInstanceObserved():
            return f"The cloud shows {fact.provider_id} as {fact.state}."
        case spot.SpotNoticeReceived():
            when = "without a deadline" if fact.reclaim_at is None else f"at {instant(fact.reclaim_at)}"
            return f"The cloud gave notice that it takes {fact.node_name or fact.provider_id} back {when}."
        case spot.SpotNoticeWithdrawn():
            return f"The cloud took its notice for {fact.provider_id} back."
        case spot.SpotRebalanceRecommended():
            return f"The cloud hinted that {fact.node_name or fact.provider_id} may be taken."
        case _:
            return None
