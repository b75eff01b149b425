"""A process that drains a stream into a row, to be killed at any time: `python -m tests.support.drainer URL ROW LAST`.

What it keeps bears no repeat and no gap: a chain of digests over every message's id, and how many there were. Chain and
cut are one row, written in one transaction.
"""

import asyncio
import hashlib
import sqlite3
import sys
import time

from gpu_autoscaler.bus.nats.bus import NatsBus
from gpu_autoscaler.bus.streams import BusDeclaration, streams

Kept = tuple[int, int, str]  # sequence, messages, chain


def chained(chain: str, message_id: str | None) -> str:
    """The chain with one more link."""
    return hashlib.sha256(f"{chain}/{message_id}".encode()).hexdigest()


def kept(connection: sqlite3.Connection) -> Kept:
    """The row, as the last transaction left it."""
    connection.execute("CREATE TABLE IF NOT EXISTS kept (sequence INTEGER, count INTEGER, chain TEXT)")
    row = connection.execute("SELECT sequence, count, chain FROM kept").fetchone()
    return (0, 0, "") if row is None else (row[0], row[1], row[2])


async def drain(url: str, path: str, last: int) -> None:
    """Resume at the row's sequence and run until the last message is in it."""
    connection = sqlite3.connect(path, isolation_level=None)
    bus = await NatsBus.connect(url, name="drainer", declared=BusDeclaration(streams=streams()))
    sequence, count, chain = kept(connection)
    if sequence < last:
        async for batch in await bus.projection("POD", after_sequence=sequence):
            for message in batch:
                chain, count = chained(chain, message.message_id), count + 1
            sequence = batch[-1].sequence
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM kept")
            time.sleep(0.002)  # noqa: ASYNC251 - so that some kills find it with half a transaction
            connection.execute("INSERT INTO kept VALUES (?, ?, ?)", (sequence, count, chain))
            connection.execute("COMMIT")
            if sequence >= last:
                break
    await bus.close()


if __name__ == "__main__":
    asyncio.run(drain(sys.argv[1], sys.argv[2], int(sys.argv[3])))
