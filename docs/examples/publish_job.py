"""Asks for a GPU job over NATS. Needs nats-py and nothing of this project.

    python publish_job.py --nats nats://127.0.0.1:4222 --id train-7 request.json          # a CloudEvent
    python publish_job.py --nats nats://127.0.0.1:4222 --id train-7 --bare request.json   # the body alone

The request is the JSON body of `schemas/facts/job.requested.v1.json` (field `data`). The id makes repeats harmless:
the same id with the same body is one job, however often it is sent; with another body it is refused. Whether the job
was accepted is said on `job.queued` and `job.rejected`.
"""

import argparse
import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import nats

SUBJECT = "job.requested"


def cloud_event(event_id: str, body: object) -> dict[str, object]:
    """The request as a CloudEvent 1.0 in structured JSON."""
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
    """Send the message; done when the stream has stored it."""
    connection = await nats.connect(url)
    try:
        stored = await connection.jetstream().publish(
            SUBJECT, json.dumps(message).encode(), headers={"Nats-Msg-Id": event_id}
        )
        print(json.dumps({"stream": stored.stream, "sequence": stored.seq, "is_repeat": bool(stored.duplicate)}))
    finally:
        await connection.close()


def main() -> None:
    """Read the request and publish it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", type=Path, help="JSON file of the request")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", help="address of the NATS server")
    parser.add_argument("--id", required=True, help="the same id twice is one job")
    parser.add_argument("--bare", action="store_true", help="send the body without an envelope")
    options = parser.parse_args()
    body = json.loads(options.request.read_text(encoding="utf-8"))
    message = body if options.bare else cloud_event(options.id, body)
    asyncio.run(publish(options.nats, options.id, message))


if __name__ == "__main__":
    main()
