"""Structured logs on stderr: text on a terminal, JSON lines otherwise. Called once, at the start of a process.

The first argument of a log call is a constant phrase in lower case, everything else a key.
"""

import logging
import sys
from typing import TextIO

import msgspec
import structlog

from gpu_autoscaler.runtime.config import LogSettings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logs(settings: LogSettings, *, service: str, instance: str, stream: TextIO | None = None) -> None:
    """Make every log line of this process carry service and instance, in the format that the settings ask for."""
    out = sys.stderr if stream is None else stream
    as_text = settings.format == "text" or (settings.format == "auto" and out.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Libraries that log in the standard way (aiohttp, nats) come out in the same form.
    tail: list[structlog.typing.Processor] = (
        # Plain: a traceback that shows local variables shows tokens.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if as_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail],
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(_LEVELS[settings.level], logging.INFO))
    structlog.configure(
        processors=[*shared, *tail],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


def _to_json(event: object, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
