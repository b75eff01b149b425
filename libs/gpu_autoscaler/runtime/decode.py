"""Decodes stored messages into facts. Every reader of a stream decodes here, so that services, screens and
recomputations see the same facts under the same ids."""

from gpu_autoscaler.bus.dead_letters import ORIGINAL_ID
from gpu_autoscaler.bus.protocol import Message
from gpu_autoscaler.events.envelope import Recorded, recorded
from gpu_autoscaler.events.ingress import read
from gpu_autoscaler.runtime.clock import Clock


def decode_message(message: Message, clock: Clock, *, keeps_refused: bool = False) -> Recorded:
    """Return the fact of a message with its stream and sequence. Raises InvalidFact, UnknownType.

    A resubmitted message keeps its original id; a message without a time gets that of its arrival. `keeps_refused`: see
    `read`.
    """
    stored_at = clock.at(message.stored_at)
    envelope = read(
        message.subject,
        message.payload,
        message_id=message.headers.get(ORIGINAL_ID, message.message_id),
        arrived_at=lambda: stored_at,
        keeps_refused=keeps_refused,
    )
    return recorded(envelope, message.stream, message.sequence, stored_at)
