"""Prints every decision and its effect as it happens. Needs nats-py and jsonschema, and nothing of this project.

    python hear_scaling.py --nats nats://127.0.0.1:4222 --schemas schemas/facts

Each event is checked with the schema of its type before it is printed, one JSON object a line. A type without a schema
here is of a newer version: it is passed over, as every reader should.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import nats
from jsonschema import Draft202012Validator, FormatChecker
from nats.js.api import DeliverPolicy

SUBJECT = "scaling.>"


def validators(folder: Path) -> dict[str, Draft202012Validator]:
    """The schema of each event type in this folder."""
    schemas = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {schema["title"]: Draft202012Validator(schema, format_checker=FormatChecker()) for schema in schemas}


async def hear(url: str, known: dict[str, Draft202012Validator], count_max: int | None) -> None:
    """Read the stream from its beginning, then as it grows; an ordered consumer leaves nothing behind on the server."""
    connection = await nats.connect(url)
    try:
        subscription = await connection.jetstream().subscribe(
            SUBJECT, ordered_consumer=True, deliver_policy=DeliverPolicy.ALL
        )
        heard_count = 0
        async for message in subscription.messages:
            event = json.loads(message.data)
            if (validator := known.get(event["type"])) is None:
                print(f"passed over: {event['type']} is not known here", file=sys.stderr)
                continue
            validator.validate(event)
            print(json.dumps(event), flush=True)
            heard_count += 1
            if heard_count == count_max:
                return
    finally:
        await connection.close()


def main() -> None:
    """Listen until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", help="address of the NATS server")
    parser.add_argument("--schemas", type=Path, default=Path("schemas/facts"), help="folder of the event schemas")
    parser.add_argument("--count", type=int, help="stop after so many events")
    options = parser.parse_args()
    asyncio.run(hear(options.nats, validators(options.schemas), options.count))


if __name__ == "__main__":
    main()
