"""How to reach a cluster: address, TLS, and a token that may change while we run."""

import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gpu_autoscaler.model.errors import ConfigError, TransientError

Authorize = Callable[[], Awaitable[str | None]]  # raises TransientError where the token cannot be renewed now


async def no_token() -> str | None:
    """For servers that ask for none."""
    return None


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API server is and how it knows us."""

    base_url: str
    authorize: Authorize = no_token  # value of the Authorization header, asked for before each call
    tls: ssl.SSLContext | None = None  # None: the system's trust, or no TLS at all


async def from_environment(kubeconfig: str | None = None, context: str | None = None) -> Connection:
    """Return the connection of a pod's service account, else of a kubeconfig.

    The kubeconfig is `kubeconfig`, $KUBECONFIG or ~/.kube/config, in this order. Tokens are renewed by the
    library: those of service accounts live about an hour. Raises ConfigError.
    """
    # Imported here: the library takes a second to load, and nobody who is given an address needs it.
    from kubernetes_asyncio import client, config  # noqa: PLC0415 - see above

    settings: Any = client.Configuration()
    try:
        if kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]  # ships no types
        else:
            await config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
    except (config.ConfigException, OSError) as exc:
        source = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise ConfigError(
            "kubernetes", [f"{source} names no usable cluster: {exc}; set kube.url or kube.kubeconfig_path"]
        ) from exc

    async def authorize() -> str | None:
        try:
            token: str | None = await settings.get_api_key_with_prefix("BearerToken")
        except (config.ConfigException, OSError) as exc:
            raise TransientError(f"the token for {settings.host} cannot be renewed: {exc}") from exc
        return token

    return Connection(base_url=settings.host.rstrip("/"), authorize=authorize, tls=_tls(settings))


def _tls(settings: Any) -> ssl.SSLContext | None:  # noqa: ANN401 - the library ships no types
    if not settings.host.startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    if not settings.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
