"""Preflight of a cluster with Karpenter: installation, permissions, and a dry run of a NodeClaim.

Claims are created with dry run (Kubernetes API concepts, "Dry-run"), and permissions are queried
(SelfSubjectAccessReview; read 2026-11-22). Read-only.
"""

from collections.abc import AsyncIterator, Sequence

from gpu_autoscaler.kube.api_errors import granting
from gpu_autoscaler.kube.client import KubeClient
from gpu_autoscaler.kube.protocol import NotFound
from gpu_autoscaler.model.errors import AutoscalerError, PermanentError
from gpu_autoscaler.model.ids import ActionId
from gpu_autoscaler.model.resources import GPU_RESOURCE
from gpu_autoscaler.providers.karpenter.catalog import Catalog
from gpu_autoscaler.providers.karpenter.classes import NodeClasses
from gpu_autoscaler.providers.karpenter.limits import LimitedNodePools
from gpu_autoscaler.providers.karpenter.node_pools import POOLS, NodePool
from gpu_autoscaler.providers.karpenter.options import NodeClass
from gpu_autoscaler.providers.karpenter.overlays import NO_POOL, OVERLAYS, Overlays
from gpu_autoscaler.providers.karpenter.translate import claim_of
from gpu_autoscaler.providers.karpenter.wire import API_VERSION, CLAIMS, GROUP
from gpu_autoscaler.providers.preflight import Finding, error, ok, warning
from gpu_autoscaler.providers.protocol import Order

_NEVER = "Never"


async def pool_findings(pools: LimitedNodePools) -> AsyncIterator[Finding]:
    """Report the pools whose limits we write."""
    for name in pools.names:
        subject = f"NodePool {name}"
        try:
            selling, problem = await pools.inspect(name)
        except AutoscalerError as exc:
            yield error(subject, str(exc), f"kubectl describe nodepool {name}")
            continue
        if problem is not None:
            yield error(subject, problem[1], f"kubectl edit nodepool {name}")
            continue
        message = f"offers {selling.offer.key} for pending pods, limited to {selling.pool.gpu_limit} GPUs"
        if settings := _voluntary_disruption(selling.pool):
            step = f"set {' and '.join(settings)} to {_NEVER}: the policy decides which nodes are removed"
            yield warning(subject, f"{message}; Karpenter also terminates its nodes voluntarily", step)
        else:
            yield ok(subject, message)


def provisions_gpus(pool: NodePool, ours: tuple[str, ...]) -> bool:
    """Return whether Karpenter may launch GPUs by the pool without our limit."""
    return pool.metadata.name not in ours and str(pool.spec.limits.get(GPU_RESOURCE)) != "0"


def _voluntary_disruption(pool: NodePool) -> list[str]:
    settings = {
        "spec.disruption.consolidateAfter": pool.spec.disruption.consolidate_after,
        "spec.template.spec.expireAfter": pool.spec.template.spec.expire_after,
    }
    return [path for path, value in settings.items() if value != _NEVER]


_CLAIM_VERBS = ("create", "get", "list", "patch", "delete")
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_UNKNOWN_USER = "NAME"


class Preflight:
    """Checks everything that a launch depends on. Read-only."""

    def __init__(
        self,
        kube: KubeClient,
        node_class: NodeClass,
        catalog: Catalog,
        installation: str,
        limited: LimitedNodePools | None = None,
    ) -> None:
        """`limited`: pools whose limits we write; None: mode claims."""
        self._kube = kube
        self._class = node_class
        self._classes = NodeClasses(kube, node_class)
        self._catalog = catalog
        self._offers = catalog.offers()
        self._installation = installation
        self._limited = limited

    async def findings(self) -> Sequence[Finding]:
        """Return all findings in the order of the checks. Does not raise for errors of the cluster."""
        try:
            if not await self._kube.serves(CLAIMS):
                step = "install Karpenter 1.0 or newer; v1beta1 is not supported"
                return [error("NodeClaims", f"{API_VERSION} is not served", step)]
        except AutoscalerError as exc:
            return [error("cluster", str(exc), "check the settings under [kube]")]
        findings = [ok("NodeClaims", f"served as {API_VERSION}"), self._offers_finding()]
        findings += [finding async for finding in self._permissions()]
        findings += [finding async for finding in self._overlays()]
        findings.append(await self._node_class())
        if self._limited is None:
            findings += [finding async for finding in self._dry_run()]
        else:
            findings += [finding async for finding in pool_findings(self._limited)]
        findings += [finding async for finding in self._other_pools()]
        return findings

    def _offers_finding(self) -> Finding:
        unpriced = [offer.key for offer in self._offers if offer.price_micro_usd_per_hour is None]
        message = f"{len(self._offers)} of {len({offer.instance_type for offer in self._offers})} types"
        if unpriced:
            message = f"{message}; {len(unpriced)} have no price and are not used, first {unpriced[0]}"
            return warning("offers", message, "add their prices to karpenter.offers_path")
        return ok("offers", message)

    async def _permissions(self) -> AsyncIterator[Finding]:
        for verbs, resource, group, effect in (
            (_CLAIM_VERBS, "nodeclaims", GROUP, "nothing is launched or terminated"),
            *([] if self._limited is None else [(("get", "patch"), "nodepools", GROUP, "nothing is launched")]),
            (("list",), "events", "", "refusals lack Karpenter's reason"),
        ):
            missing = [verb for verb in verbs if not await self._may(verb, resource, group)]
            if not missing:
                yield ok(f"permissions on {resource}", ", ".join(verbs))
                continue
            report = error if group else warning
            step = granting(await self._user(), missing, resource, group)
            yield report(f"permissions on {resource}", f"may not {', '.join(missing)}: {effect}", step)

    async def _overlays(self) -> AsyncIterator[Finding]:
        """Report overlays, which are optional."""
        try:
            if not await self._kube.serves(OVERLAYS):
                return
            overlaid = await Overlays(self._kube).look(self._catalog, NO_POOL)
        except PermanentError as exc:
            step = granting(await self._user(), ["list"], OVERLAYS.plural, GROUP)
            yield warning("NodeOverlays", f"not readable, so prices are the file's alone: {exc}", step)
            return
        except AutoscalerError as exc:
            yield error("NodeOverlays", str(exc), "try again")
            return
        before = {offer.key: offer for offer in self._offers}
        count = sum(before[offer.key] != offer for offer in overlaid.offers)
        message = f"change {count} of {len(before)} offers"
        if overlaid.ignored:
            ignored = "; ".join(f"{name}: {why}" for name, why in sorted(overlaid.ignored.items()))
            yield warning("NodeOverlays", f"{message}; ignored: {ignored}", "kubectl describe nodeoverlay NAME")
        else:
            yield ok("NodeOverlays", message)

    async def _node_class(self) -> Finding:
        subject = "/".join(self._class)
        try:
            await self._classes.read()
            problem = await self._classes.problem()
        except PermanentError as exc:
            return warning(subject, f"not readable, so refusals are reported late: {exc}", "grant get on it")
        except AutoscalerError as exc:
            return error(subject, str(exc), "check karpenter.node_class")
        if problem is not None:
            return error(subject, problem[1], f"kubectl describe {self._class.kind.lower()} {self._class.name}")
        return ok(subject, "exists, and does not report a problem")

    async def _dry_run(self) -> AsyncIterator[Finding]:
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
            step = "if it is about the claim's fields, the CustomResourceDefinition has another version"
            yield error("NodeClaim dry run", str(exc), step)
        else:
            yield ok("NodeClaim dry run", f"succeeded for {order.offer.key}")

    async def _other_pools(self) -> AsyncIterator[Finding]:
        try:
            pools = await self._kube.list_all(POOLS)
        except (PermanentError, NotFound):
            return
        except AutoscalerError as exc:
            yield error("NodePools", str(exc), "try again")
            return
        ours = () if self._limited is None else self._limited.names
        provisioning = [pool.metadata.name for pool in pools if provisions_gpus(pool, ours)]
        if provisioning:
            yield warning(
                "NodePools",
                f"{', '.join(provisioning)}: Karpenter also launches GPU nodes by them for pending pods",
                'limit each to nvidia.com/gpu: "0", or add taints that our pods do not tolerate',
            )
        else:
            yield ok("NodePools", "none launches GPU nodes besides us")

    async def _may(self, verb: str, resource: str, group: str) -> bool:
        wanted = {"verb": verb, "group": group, "resource": resource}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        review = await self._kube.create(_REVIEWS, body | {"spec": {"resourceAttributes": wanted}})
        return bool(review.get("status", {}).get("allowed", False))

    async def _user(self) -> str:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            review = await self._kube.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", body)
        except NotFound:  # Kubernetes before 1.28
            return _UNKNOWN_USER
        return str(review.get("status", {}).get("userInfo", {}).get("username", _UNKNOWN_USER))
