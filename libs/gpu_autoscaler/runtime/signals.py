"""The signals that stop a process."""

import asyncio
import signal


def stop_event() -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets. Needs a running event loop."""
    event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event
