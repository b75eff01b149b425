"""For commands that run services themselves: until when, and without their logs."""

import asyncio
import logging
import signal

import structlog


def silence_logs() -> None:
    """Hide the logs of services and clients, which would hide the result of the command."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def interrupted() -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets. Needs a running event loop."""
    event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event
