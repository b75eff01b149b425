"""Nodes that are drained by choice: whether a drain is canceled for work that came, or a new node bought.

A canceled drain leaves the node's pods where they are. Those that others are placed around may have been counted
elsewhere by then, so everything is placed anew with these drains canceled from the start.
"""

from collections.abc import Iterable

import numpy as np

from gpu_autoscaler.core.draft import DRAINED, Draft
from gpu_autoscaler.core.nodes.lifecycle import NodePhase
from gpu_autoscaler.core.nodes.views import NodeView, bin_key
from gpu_autoscaler.core.placement.bins import node_bin
from gpu_autoscaler.core.placement.constraints import fits
from gpu_autoscaler.core.placement.shapes import Bin, BinReadiness, Shape
from gpu_autoscaler.core.policy.policy import ScalingPolicy
from gpu_autoscaler.core.provisioning.lots import Lot
from gpu_autoscaler.core.provisioning.offers import OfferCatalog
from gpu_autoscaler.model.decisions import CancelDrain, DrainNode
from gpu_autoscaler.model.ids import NodeUid
from gpu_autoscaler.model.reasons.drain import DemandReturned

_HOUR_SECONDS = 3600.0


class CancelableDrains:
    """Drains of one planning run that can be canceled, and those that are. Their nodes become capacity."""

    def __init__(
        self,
        draft: Draft,
        catalog: OfferCatalog,
        policy: ScalingPolicy,
        canceled: Iterable[CancelDrain] = (),
        *,
        may_return_counted: bool = True,
    ) -> None:
        """`canceled` are canceled from the start. `may_return_counted`: so may drains be whose pods count elsewhere."""
        self._draft = draft
        self._free_capacity = draft.free_capacity
        self._catalog = catalog
        self._policy = policy
        self.canceled = list(canceled)
        self._may_return_counted = may_return_counted
        self._counted_elsewhere: set[NodeUid] = set()  # nodes whose pods are counted where they are to go
        drains = ((view, _cancelable_drain(view)) for view in draft.views.table(DRAINED))
        self._drains = {drain.node_uid: (view, drain) for view, drain in drains if drain is not None}
        for cancel in self.canceled:
            self._free_capacity.put(self._bin(self._drains[cancel.node_uid][0]))

    @property
    def returned_counted(self) -> bool:
        """True if pods are back on nodes with a canceled drain that were counted where they were to go."""
        return any(cancel.node_uid in self._counted_elsewhere for cancel in self.canceled)

    def note_moved(self, lot: Lot) -> None:
        """Note that these pods are placed elsewhere than on the node that they leave."""
        if lot.first.leaves is not None and lot.shape.pod_constraints.tallies:
            self._counted_elsewhere.add(lot.first.leaves)

    def mark(self) -> int:
        """Return a point to come back to with `rollback`."""
        return len(self.canceled)

    def rollback(self, mark: int) -> None:
        """Undo every cancellation since the mark, except for the capacity, which the caller rolls back."""
        del self.canceled[mark:]

    def place(self, lot: Lot, count: int, *, at_any_price: bool = False) -> tuple[str, ...]:
        """Cancel drains of nodes that take members of the lot, place at most `count` there and return the bin keys.

        Only nodes that cost less than new ones would are used, unless `at_any_price`.
        """
        placed: tuple[str, ...] = ()
        for view, drain in self._drains.values():
            node = self._bin(view)
            if len(placed) == count or node.key in self._free_capacity or not fits(lot.shape, node):
                continue
            if drain.node_uid in self._counted_elsewhere and not self._may_return_counted:
                continue
            mark = self._free_capacity.mark()
            self._free_capacity.put(node)
            here = self._free_capacity.place_most(lot.shape, count - len(placed))
            if not here or not (at_any_price or self._is_cheaper_kept(view, lot.shape, len(here))):
                self._free_capacity.rollback(mark)
                continue
            self._cancel(drain, lot)
            placed += here
        return placed

    def keep_source_node(self, lot: Lot) -> str | None:
        """Cancel the drain that moves these pods: they have no place besides the node that they were to leave."""
        if lot.first.leaves not in self._drains:
            return None
        view, drain = self._drains[lot.first.leaves]
        node = self._bin(view)
        if node.key not in self._free_capacity:
            self._free_capacity.put(node)
            self._cancel(drain, lot)
        return node.key

    def kept_source_node(self, lot: Lot) -> str | None:
        """Return the bin of the node that these pods were to leave, if its drain is canceled: they are on it."""
        is_kept = any(cancel.node_uid == lot.first.leaves for cancel in self.canceled)
        return bin_key(self._drains[lot.first.leaves][0]) if is_kept and lot.first.leaves in self._drains else None

    def _bin(self, view: NodeView) -> Bin:
        return node_bin(view, self._draft.pods, BinReadiness.COMING)

    def _cancel(self, drain: DrainNode, lot: Lot) -> None:
        self.canceled.append(
            CancelDrain(
                action_id=self._draft.next_action_id(),
                drain_action_id=drain.action_id,
                node_uid=drain.node_uid,
                node_name=drain.node_name,
                reason=DemandReturned(demand=tuple(item.key for item in lot.items)),
            )
        )

    def _is_cheaper_kept(self, view: NodeView, shape: Shape, count: int) -> bool:
        """True unless new nodes of one kind would serve this many members of the shape for less. A new node is paid for
        while it boots. Over the policy's horizon that adds to its price. A node whose price is unknown is kept."""
        catalog, policy = self._catalog, self._policy
        members = catalog.members(shape)
        sold = np.flatnonzero(members)
        horizon_seconds = policy.removal.replacement_payback_hours * _HOUR_SECONDS
        if view.price_micro_usd_per_hour is None or not sold.size or not horizon_seconds:
            return True
        overhead = policy.node_overhead_micro_usd_per_hour
        hourly = (catalog.prices_micro_usd_per_hour[sold] + overhead) * (-(-count // members[sold]))
        replaced = hourly * (1.0 + catalog.boot_seconds[sold] / horizon_seconds)
        return bool(view.price_micro_usd_per_hour + overhead <= replaced.min())


def _cancelable_drain(view: NodeView) -> DrainNode | None:
    """Return the drain if it can still be canceled: the node is drained by our choice alone and is not empty yet."""
    record, node = view.drain, view.node
    if record is None or record.drained is not None or record.cancel is not None or view.notice is not None:
        return None
    if node is None or not node.is_ready or view.phase not in (NodePhase.CORDONED, NodePhase.DRAINING):
        return None
    return record.decision if isinstance(record.decision, DrainNode) and record.decision.is_voluntary else None
