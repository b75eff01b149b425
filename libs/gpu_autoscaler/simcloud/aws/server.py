"""Serves the fake on loopback, in a thread, for tests and the command line."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpu_autoscaler.simcloud.aws.fake import AwsFake


@contextmanager
def serving(fake: AwsFake, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve until the block ends; yield the URL."""
    from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: PLC0415 - only fakes need it

    # Does not log requests, and keeps connections alive.
    quiet: Any = type(
        "Quiet", (WSGIRequestHandler,), {"protocol_version": "HTTP/1.1", "log_request": lambda *_, **__: None}
    )
    server: Any = make_server(host, port, fake, threaded=True, request_handler=quiet)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(timeout=5.0)
        server.server_close()
