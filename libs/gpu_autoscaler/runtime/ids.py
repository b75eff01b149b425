"""Ids of what a service says. Equal cause, equal id: saying it again after a crash adds nothing to the stream."""

import msgspec

from gpu_autoscaler.events.envelope import Envelope
from gpu_autoscaler.events.fact import Fact
from gpu_autoscaler.model.ids import FactId, derive_id


def output_id(fact: Fact, *, service: str, cause: Envelope | None, number: int) -> FactId:
    """Return the id of a service's output: its standing condition, else derived from cause, service and number.

    Without condition and cause (a tick that says something new) the content itself is the id.
    """
    condition = fact.condition()
    if condition is not None:
        return FactId(condition)
    if cause is not None:
        return FactId(derive_id(cause.id, service, number))
    return FactId(derive_id(service, fact.type_name(), msgspec.json.encode(fact).hex()))
