"""Facts about how is to be decided: what people overrule for a while, and which policies are in force."""

from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.directives import AnyDirective
from gpu_autoscaler.model.observed import Instant
from gpu_autoscaler.model.policy_documents import PolicyDocument


class PolicyDirectiveGiven(Fact, frozen=True, kw_only=True):
    """Somebody overrules the policy until an instant. Of one key the last word counts."""

    directive: AnyDirective
    reason: str  # in their words
    given_by: str
    given_at: Instant
    until: Instant  # over then, by itself

    def entity(self) -> str | None:
        """The directive."""
        return f"directive/{self.directive.key}"


class PolicyDirectiveLifted(Fact, frozen=True, kw_only=True):
    """Somebody takes a directive back before its time is over."""

    key: str  # of the directive: freeze, pause/<pool>, override/<scope>
    lifted_by: str
    lifted_at: Instant
    reason: str = ""

    def entity(self) -> str | None:
        """The directive."""
        return f"directive/{self.key}"


class PolicyChanged(Fact, frozen=True, kw_only=True):
    """The scaler decides by another policy from now on: its file was changed, and what it says can be followed."""

    policy_digest: str
    before_digest: str
    changed_at: Instant
    differences: tuple[str, ...]  # a line for each field that changed: `nodes_count_max: 100 -> 50`
    path: str  # of the file; of documents `autoscalingpolicy/<name>`, with commas


class PolicyDocumentsAccepted(Fact, frozen=True, kw_only=True):
    """These policies of Kubernetes are in force from now on, merged under the policy file: all of them, and no other.

    Each stands there as it was accepted last, which may be an older generation than people see.
    """

    documents: tuple[PolicyDocument, ...]  # the oldest first
    accepted_at: Instant
