"""Submit a GPU job over NATS. Requires nats-py only.

    python publish_job.py --nats nats://127.0.0.1:4222 --id train-7 request.json          # a CloudEvent
    python publish_job.py --nats nats://127.0.0.1:4222 --id train-7 --bare request.json   # the body alone

The request is the field `data` of `schemas/facts/job.requested.v1.json`. Publishing is idempotent by id: the
same id and body create one job; the same id with another body is refused. `job.queued` or `job.rejected` is the result.
"""

import argparse
import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import nats

SUBJECT = "job.requested"


def cloud_event(event_id: str, body: object) -> dict[str, object]:
    """Return the request as a CloudEvent 1.0 in structured JSON."""
    return {
        "specversion": "1.0",
        "id": event_id,
        "source": "/examples/publish_job",
        "type": "job.requested.v1",
        "time": datetime.now(UTC).isoformat(),
        "datacontenttype": "application/json",
        "data": body,
    }


async def publish(url: str, event_id: str, message: object) -> None:
    """Publish the message and wait until the stream has stored it."""
    connection = await nats.connect(url)
    try:
        ack = await connection.jetstream().publish(
            SUBJECT, json.dumps(message).encode(), headers={"Nats-Msg-Id": event_id}
        )
        print(json.dumps({"stream": ack.stream, "sequence": ack.seq, "is_repeat": bool(ack.duplicate)}))
    finally:
        await connection.close()


def main() -> None:
    """Read the request and publish it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", type=Path, help="JSON file of the request")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", help="address of the NATS server")
    parser.add_argument("--id", required=True, help="id of the request; repeating it does not create another job")
    parser.add_argument("--bare", action="store_true", help="send the body without an envelope")
    options = parser.parse_args()
    body = json.loads(options.request.read_text(encoding="utf-8"))
    message = body if options.bare else cloud_event(options.id, body)
    asyncio.run(publish(options.nats, options.id, message))


if __name__ == "__main__":
    main()
