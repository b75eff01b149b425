"""For commands that run parts of services themselves."""

import logging

import structlog


def silence_logs() -> None:
    """Hide the logs of services and clients, which would hide the result of the command."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
