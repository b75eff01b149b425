"""Facts about the rules of decisions: directives of operators and active policies."""

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.directives import AnyDirective
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.policy_documents import PolicyDocument


class PolicyDirectiveGiven(Fact, frozen=True, kw_only=True):
    """An operator overrules the policy until a time. The latest directive of a key replaces earlier ones."""

    directive: AnyDirective
    reason: str  # as the operator states it
    given_by: str
    given_at: Instant
    until: Instant  # expires then

    def entity(self) -> str | None:
        return f"directive/{self.directive.key}"


class PolicyDirectiveLifted(Fact, frozen=True, kw_only=True):
    """An operator ended a directive early, or resumed forced removals after the brake had tripped."""

    key: str  # of the directive: freeze, pause/<pool>, override/<scope>; or brake
    lifted_by: str
    lifted_at: Instant  # when it ended
    reason: str = ""
    tripped_at: Instant | None = None  # of the brake: which trip is resumed, whatever the clocks; None: not the brake

    def entity(self) -> str | None:
        return f"directive/{self.key}"


class PolicyChanged(Fact, frozen=True, kw_only=True):
    """The scaler uses a changed, valid policy from now on."""

    policy_digest: str
    before_digest: str  # of the policy before
    changed_at: Instant  # when the scaler read it
    differences: tuple[str, ...]  # a line for each field that changed: `nodes_count_max: 100 -> 50`
    path: str  # of the file; of documents `autoscalingpolicy/<name>`, with commas


class PolicyDocumentsAccepted(Fact, frozen=True, kw_only=True):
    """Exactly these policy objects of Kubernetes are active from now on, merged under the policy file.

    Each is the generation accepted last, which may be older than the one in Kubernetes.
    """

    documents: tuple[PolicyDocument, ...]  # the oldest first
    accepted_at: Instant  # when they became active
