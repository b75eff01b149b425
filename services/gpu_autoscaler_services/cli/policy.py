"""`gpu-autoscaler policy check`: validate policy files and AutoscalingPolicy manifests before they are used."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from gpu_autoscaler.core.policy.documents import document_violations, merge_documents
from gpu_autoscaler.core.policy.policy import DEFAULT_POLICY, NodePool
from gpu_autoscaler.core.policy.validation import policy_violations
from gpu_autoscaler.events.spot import SpotOffersSampled
from gpu_autoscaler.kube.translate.policy import document, spec_of
from gpu_autoscaler.kube.translate.policy_rules import rule_violations
from gpu_autoscaler.kube.wire.policy import GROUP, KIND, VERSION, Policy, PolicySpec
from gpu_autoscaler.model.document_errors import validation_errors
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.model.format import counted
from gpu_autoscaler.model.offers import Offer
from gpu_autoscaler.model.policy_documents import DocumentPool, PolicyDocument
from gpu_autoscaler.runtime.documents import load_documents
from gpu_autoscaler.runtime.policies import policy_of
from gpu_autoscaler_services.cli.client import Gateway
from gpu_autoscaler_services.cli.exits import Exit, Stop
from gpu_autoscaler_services.cli.options import CommandGroup
from gpu_autoscaler_services.cli.output import print_message

HERE = Gateway()
# The limits of the installation's policy file are unknown here.
_NO_LIMITS = msgspec.structs.replace(DEFAULT_POLICY, nodes_count_max=10**9)
_GROUP = CommandGroup(
    "policy",
    "policy check policy.toml",
    "policy check autoscaling-policy.yaml",
    "policy check policy.toml --check-offers",
)
policy = _GROUP.app


@_GROUP.command
def check(
    file: Path,
    /,
    *,
    check_offers: Annotated[
        bool, Parameter(help="Also ask the gateway for current offers, and report pools that no offer matches.")
    ] = False,
    gateway: Gateway = HERE,
) -> int:
    """Validate a policy file or AutoscalingPolicy manifests and report all errors at once, each with its next step.

    The file is YAML by its suffix (.yaml, .yml, .json), else TOML. Manifests of other kinds in it are skipped. Services
    and the API server run the same validation. Offers change, so only this command compares the policy with them.

    Exit codes: 0 valid, 2 invalid.
    """
    documents = load_documents(file)
    if not documents:
        raise ConfigError(str(file), ["the file is empty; write a policy or an AutoscalingPolicy into it"])
    offers = _offers(gateway) if check_offers else None
    manifests = [manifest for found in documents for manifest in _manifests(found)]
    if not manifests:
        if len(documents) > 1:
            raise ConfigError(str(file), [f"{len(documents)} documents; keep the policy in one"])
        _print_valid(str(file), policy_of(documents[0], str(file), offers).pools, offers)
    else:
        _check_manifests(file, manifests, offers)
    if offers is None:
        print_message("not checked: whether each pool matches an offer; use --check-offers")
    return Exit.OK


def _manifests(found: Any) -> list[Mapping[str, Any]]:  # noqa: ANN401 - as the file has it
    """Return the Kubernetes objects of a document; none of a policy file."""
    if not isinstance(found, Mapping) or "kind" not in found:
        return []
    items = found.get("items")
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else [found]


def _check_manifests(file: Path, manifests: Sequence[Mapping[str, Any]], offers: tuple[Offer, ...] | None) -> None:
    violations: list[str] = []
    accepted: list[PolicyDocument] = []
    for number, manifest in enumerate(manifests):
        metadata = manifest.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if manifest.get("kind") != KIND:
            print_message(f"skipped: {manifest.get('kind')} {name or number}; only {KIND} is checked")
            continue
        errors, read = _read(manifest, name)
        if read is not None:
            errors += document_violations(read, accepted, _NO_LIMITS, read.provider or "")
            if offers is not None:
                errors += _unmatched(read, offers)
            accepted.append(read)
        violations += (f"{KIND} {name or f'number {number + 1}'}: {error}" for error in errors)
    if violations:
        raise ConfigError(str(file), violations)
    if not accepted:
        raise ConfigError(str(file), [f"there is no policy and no {KIND} in it; pass another file"])
    for read in accepted:
        _print_valid(f"{file}: {KIND} {read.name}", read.pools, offers)


def _read(manifest: Mapping[str, Any], name: object) -> tuple[list[str], PolicyDocument | None]:
    """Return the errors of the manifest by itself, and its document if it could be read."""
    errors: list[str] = []
    if manifest.get("apiVersion") != f"{GROUP}/{VERSION}":
        errors.append(f"apiVersion: {manifest.get('apiVersion')!r} is not served; write {GROUP}/{VERSION}")
    if not isinstance(name, str) or not name:
        errors.append("metadata.name: missing; add it")
    spec = manifest.get("spec", {})
    if wrong := list(validation_errors(spec, PolicySpec, "spec")):
        return errors + wrong, None
    body = {"metadata": {"name": str(name)}, "spec": spec}
    found = msgspec.json.decode(json.dumps(body), type=Policy)
    read = spec_of(found)
    return errors + list(rule_violations(read)), document(found, read, 1)


def _unmatched(read: PolicyDocument, offers: tuple[Offer, ...]) -> Iterator[str]:
    """Yield what only the comparison with the offers finds."""
    alone = merge_documents(_NO_LIMITS, [read])
    without = set(policy_violations(alone))
    yield from (violation for violation in policy_violations(alone, offers) if violation not in without)


def _print_valid(subject: str, pools: Sequence[NodePool | DocumentPool], offers: tuple[Offer, ...] | None) -> None:
    matched = "" if offers is None else f"; each pool matches at least one of {len(offers)} offers"
    print(f"{subject}: valid ({counted(len(pools), 'pool')}: {', '.join(pool.name for pool in pools)}){matched}")


def _offers(gateway: Gateway) -> tuple[Offer, ...]:
    latest = gateway.read("facts", subject=SpotOffersSampled.subject_root(), limit=1)["items"]
    if not latest:
        raise Stop("the gateway has no recent offers; check that the spot watcher runs, or omit --check-offers")
    return msgspec.convert(latest[0]["event"]["data"], SpotOffersSampled).offers
