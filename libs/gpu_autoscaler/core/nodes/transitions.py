"""Every step that a node's life may take, and why. A reader of the phases of `core/nodes/views.py` sees no other."""

from collections.abc import Mapping

from gpu_autoscaler.core.nodes.views import NodePhase

_P = NodePhase

TRANSITIONS: Mapping[NodePhase, frozenset[NodePhase]] = {
    _P.PLANNED: frozenset(
        {
            _P.ORDERED,  # the executor took the decision up
            _P.FAILED,  # the executor did not get to it before the deadline
        }
    ),
    _P.ORDERED: frozenset(
        {
            _P.LAUNCHED,  # the cloud made the instance
            _P.FAILED,  # the cloud refused, or never answered before the deadline
        }
    ),
    _P.LAUNCHED: frozenset(
        {
            _P.REGISTERED,  # the kubelet came up
            _P.FAILED,  # no node by the deadline
            _P.LOST,  # the cloud ended the instance before it was a node
            _P.TERMINATING,  # released while it booted
        }
    ),
    _P.REGISTERED: frozenset(
        {
            _P.READY,  # the kubelet is ready and every promised GPU is allocatable
            _P.CORDONED,  # cordoned while it booted
            _P.FAILED,  # not usable by the deadline
            _P.LOST,  # the instance or the node object vanished while it booted
            _P.TERMINATING,  # released, or deleted by somebody, while it booted
        }
    ),
    _P.READY: frozenset(
        {
            _P.CORDONED,  # a drain was decided, or somebody cordoned it
            _P.LOST,  # the kubelet fell silent, GPUs vanished, or the instance was ended without our word
            _P.TERMINATING,  # deleted by somebody, or ended by the cloud
        }
    ),
    _P.LOST: frozenset(
        {
            _P.READY,  # the kubelet is back, with all GPUs
            _P.CORDONED,  # drained although silent, or cordoned by somebody
            _P.FAILED,  # its node is gone for good, and the boot deadline has passed: to be given back
            _P.TERMINATING,  # its instance is released
        }
    ),
    _P.CORDONED: frozenset(
        {
            _P.READY,  # uncordoned: the drain was cancelled, or somebody changed their mind
            _P.REGISTERED,  # uncordoned before it was ever usable
            _P.FAILED,  # uncordoned after its deadline without ever being usable
            _P.LOST,  # fell silent while it waited, or the instance vanished
            _P.DRAINING,  # the drain began
            _P.TERMINATING,  # deleted by somebody
        }
    ),
    _P.DRAINING: frozenset(
        {
            _P.CORDONED,  # the drain was cancelled and the node is not uncordoned yet
            _P.READY,  # the drain was cancelled
            _P.LOST,  # the drain was cancelled and the node is silent, or the cloud was faster than the drain
            _P.DRAINED,  # no pod that counts is left
            _P.TERMINATING,  # the cloud, or somebody, was faster than the drain
        }
    ),
    _P.DRAINED: frozenset(
        {
            _P.TERMINATING,  # the cloud was told to end the instance
        }
    ),
    _P.FAILED: frozenset(
        {
            _P.REGISTERED,  # the node came after all, though late
            _P.READY,  # the node became usable after all, though late
            _P.CORDONED,  # came late, and cordoned
            _P.LOST,  # its node came late and vanished again
            _P.TERMINATING,  # the instance is released
        }
    ),
    _P.TERMINATING: frozenset(
        {
            _P.GONE,  # the cloud confirmed it
            _P.LOST,  # the release was for nothing: the instance had ended before
        }
    ),
    _P.GONE: frozenset(),
}
