"""Looks at a cluster as a doctor would, before anything is claimed: is Karpenter there, may we, would a claim be taken.

A claim is only tried (Kubernetes API concepts, "Dry-run"), and rights are asked of the server (SelfSubjectAccessReview;
read 2026-11-22). Nothing is made.
"""

from collections.abc import AsyncIterator, Sequence

from gpu_autoscaler.kube.api_errors import granting
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import NotFound
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.providers.karpenter.catalog import Shelf
from gpu_autoscaler.providers.karpenter.classes import Classes
from gpu_autoscaler.providers.karpenter.limits import LimitedPools
from gpu_autoscaler.providers.karpenter.node_pools import POOLS, NodePool
from gpu_autoscaler.providers.karpenter.options import NodeClass
from gpu_autoscaler.providers.karpenter.overlays import NO_POOL, OVERLAYS, Overlays
from gpu_autoscaler.providers.karpenter.translate import claim_of
from gpu_autoscaler.providers.karpenter.wire import API_VERSION, CLAIMS, GROUP
from gpu_autoscaler.providers.preflight import Finding, error, ok, warning
from gpu_autoscaler.providers.protocol import Order

# Looks at the NodePools whose limits are ours to write, as a doctor would. Writes nothing.

_NEVER = "Never"


async def pool_findings(pools: LimitedPools) -> AsyncIterator[Finding]:
    """Yield what is right and wrong with each pool of the settings."""
    for name in pools.names:
        subject = f"NodePool {name}"
        try:
            selling, problem = await pools.seen(name)
        except AutoscalerError as exc:
            yield error(subject, str(exc), f"kubectl describe nodepool {name}")
            continue
        if problem is not None:
            yield error(subject, problem[1], f"kubectl edit nodepool {name}")
            continue
        own = _own_choices(selling.pool)
        message = f"makes {selling.offer.key} for pods that wait, {selling.pool.gpu_limit} GPUs are allowed"
        if own:
            step = f"set {' and '.join(own)} to {_NEVER}: who goes, and when, is the policy's to say"
            yield warning(subject, f"{message}; Karpenter ends its nodes by its own choice", step)
        else:
            yield ok(subject, message)


def buying_beside(pool: NodePool, ours: tuple[str, ...]) -> bool:
    """Return whether Karpenter may make GPUs of the pool that we did not allow."""
    return pool.metadata.name not in ours and str(pool.spec.limits.get(GPU_RESOURCE)) != "0"


def _own_choices(pool: NodePool) -> list[str]:
    choices = {
        "spec.disruption.consolidateAfter": pool.spec.disruption.consolidate_after,
        "spec.template.spec.expireAfter": pool.spec.template.spec.expire_after,
    }
    return [path for path, value in choices.items() if value != _NEVER]


_NEEDED = ("create", "get", "list", "patch", "delete")
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_SOMEBODY = "NAME"


class Preflight:
    """One look at everything that a launch stands on."""

    def __init__(
        self,
        kube: KubeClient,
        node_class: NodeClass,
        shelf: Shelf,
        installation: str,
        limited: LimitedPools | None = None,
    ) -> None:
        """`limited`: pools whose limits are ours to write; None: we make claims."""
        self._kube = kube
        self._class = node_class
        self._classes = Classes(kube, node_class)
        self._shelf = shelf
        self._offers = shelf.offers()
        self._installation = installation
        self._limited = limited

    async def findings(self) -> Sequence[Finding]:
        """Return all that was found, in the order of looking. Does not raise for what is wrong outside."""
        try:
            if not await self._kube.serves(CLAIMS):
                step = "install Karpenter 1.0 or newer; what serves v1beta1 alone is too old"
                return [error("NodeClaims", f"{API_VERSION} has none here", step)]
        except AutoscalerError as exc:
            return [error("cluster", str(exc), "see the settings under [kube]")]
        found = [ok("NodeClaims", f"served as {API_VERSION}"), self._sold()]
        found += [finding async for finding in self._rights()]
        found += [finding async for finding in self._overlays()]
        found.append(await self._node_class())
        if self._limited is None:
            found += [finding async for finding in self._trial()]
        else:
            found += [finding async for finding in pool_findings(self._limited)]
        found += [finding async for finding in self._pools()]
        return found

    def _sold(self) -> Finding:
        without = [offer.key for offer in self._offers if offer.price_micro_usd_per_hour is None]
        message = f"{len(self._offers)}, of {len({offer.instance_type for offer in self._offers})} types"
        if without:
            step = "write its price into karpenter.offers_path"
            return warning(
                "offers", f"{message}; {len(without)} have no price and are not bought, first {without[0]}", step
            )
        return ok("offers", message)

    async def _rights(self) -> AsyncIterator[Finding]:
        for verbs, resource, group, what in (
            (_NEEDED, "nodeclaims", GROUP, "nothing is bought, or removed"),
            *([] if self._limited is None else [(("get", "patch"), "nodepools", GROUP, "nothing is bought")]),
            (("list",), "events", "", "a refusal is told without Karpenter's reason"),
        ):
            missing = [verb for verb in verbs if not await self._may(verb, resource, group)]
            if not missing:
                yield ok(f"rights on {resource}", ", ".join(verbs))
                continue
            tell = error if group else warning
            step = granting(await self._who_asks(), missing, resource, group)
            yield tell(f"rights on {resource}", f"may not {', '.join(missing)}: {what}", step)

    async def _overlays(self) -> AsyncIterator[Finding]:
        """They are to be had where they are installed, and nobody has to have them."""
        try:
            if not await self._kube.serves(OVERLAYS):
                return
            found = await Overlays(self._kube).look(self._shelf, NO_POOL)
        except PermanentError as exc:
            step = granting(await self._who_asks(), ["list"], OVERLAYS.plural, GROUP)
            yield warning("NodeOverlays", f"not to be read, so that prices are the file's alone: {exc}", step)
            return
        except AutoscalerError as exc:
            yield error("NodeOverlays", str(exc), "ask again")
            return
        before = {offer.key: offer for offer in self._offers}
        count = sum(before[offer.key] != offer for offer in found.offers)
        message = f"{count} of {len(before)} offers are changed by them"
        if found.silent:
            unheard = "; ".join(f"{name}: {why}" for name, why in sorted(found.silent.items()))
            yield warning("NodeOverlays", f"{message}; not heeded: {unheard}", "kubectl describe nodeoverlay NAME")
        else:
            yield ok("NodeOverlays", message)

    async def _node_class(self) -> Finding:
        subject = "/".join(self._class)
        try:
            await self._classes.read()
            lacking = await self._classes.lacking()
        except PermanentError as exc:
            return warning(subject, f"not to be looked at, so that a refusal is told late: {exc}", "grant get on it")
        except AutoscalerError as exc:
            return error(subject, str(exc), "see karpenter.node_class")
        if lacking is not None:
            return error(subject, lacking[1], f"kubectl describe {self._class.kind.lower()} {self._class.name}")
        return ok(subject, "there, and ready as far as it says")

    async def _trial(self) -> AsyncIterator[Finding]:
        if not self._offers:
            return
        order = Order(
            action_id=ActionId("doctor"),
            installation=self._installation if self._installation != "*" else "doctor",
            pool="doctor",
            offer=self._offers[0],
            labels=(),
            taints=(),
        )
        try:
            await self._kube.create(f"{CLAIMS.path()}?dryRun=All", claim_of(order, self._class))
        except AutoscalerError as exc:
            yield error(
                "a trial claim", str(exc), "if it is about the claim's fields, its definition is of another version"
            )
        else:
            yield ok("a trial claim", f"for {order.offer.key} would be taken; nothing was made")

    async def _pools(self) -> AsyncIterator[Finding]:
        """NodePools are others' to have. What they buy for the same pods is bought twice."""
        try:
            page = await self._kube.list_page(POOLS, {})
            pools = [POOLS.decode(item, "list") for item in page.items or ()]
        except (PermanentError, NotFound):
            return
        except AutoscalerError as exc:
            yield error("NodePools", str(exc), "ask again")
            return
        ours = () if self._limited is None else self._limited.names
        buying = [pool.metadata.name for pool in pools if buying_beside(pool, ours)]
        if buying:
            yield warning(
                "NodePools",
                f"{', '.join(buying)}: Karpenter itself buys by them for pods that wait, beside us",
                'give each limits of nvidia.com/gpu: "0", or taints that our pods do not tolerate',
            )
        else:
            yield ok("NodePools", "none that buys GPUs beside us")

    async def _may(self, verb: str, resource: str, group: str) -> bool:
        wanted = {"verb": verb, "group": group, "resource": resource}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        review = await self._kube.create(_REVIEWS, body | {"spec": {"resourceAttributes": wanted}})
        return bool(review.get("status", {}).get("allowed", False))

    async def _who_asks(self) -> str:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            told = await self._kube.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", body)
        except NotFound:  # of Kubernetes before 1.28
            return _SOMEBODY
        return str(told.get("status", {}).get("userInfo", {}).get("username", _SOMEBODY))
