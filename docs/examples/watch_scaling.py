"""Print every decision and its effects as they happen. Requires nats-py and jsonschema only.

    python watch_scaling.py --nats nats://127.0.0.1:4222 --schemas schemas/facts

Each event is validated with the schema of its type and printed as one JSON object per line. A type without a schema is
of a newer version and is skipped, as every reader should do.
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
    """Return the validator of each event type in this folder."""
    schemas = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {schema["title"]: Draft202012Validator(schema, format_checker=FormatChecker()) for schema in schemas}


async def watch(url: str, validators_by_type: dict[str, Draft202012Validator], count_max: int | None) -> None:
    """Read the stream from its beginning, then follow it; an ordered consumer leaves no state on the server."""
    connection = await nats.connect(url)
    try:
        subscription = await connection.jetstream().subscribe(
            SUBJECT, ordered_consumer=True, deliver_policy=DeliverPolicy.ALL
        )
        events_count = 0
        async for message in subscription.messages:
            event = json.loads(message.data)
            if (validator := validators_by_type.get(event["type"])) is None:
                print(f"skipped: no schema for {event['type']}", file=sys.stderr)
                continue
            validator.validate(event)
            print(json.dumps(event), flush=True)
            events_count += 1
            if events_count == count_max:
                return
    finally:
        await connection.close()


def main() -> None:
    """Run until interrupted or until --count events are printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", help="address of the NATS server")
    parser.add_argument("--schemas", type=Path, default=Path("schemas/facts"), help="folder of the event schemas")
    parser.add_argument("--count", type=int, help="stop after this number of events")
    options = parser.parse_args()
    asyncio.run(watch(options.nats, validators(options.schemas), options.count))


if __name__ == "__main__":
    main()
