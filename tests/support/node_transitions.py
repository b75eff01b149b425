"""Valid transitions between lifecycle phases, and their causes."""

from collections.abc import Mapping

from gpu_autoscaler.core.nodes.lifecycle import NodePhase

_P = NodePhase

TRANSITIONS: Mapping[NodePhase, frozenset[NodePhase]] = {
    _P.PLANNED: frozenset(
        {
            _P.ORDERED,  # the executor started
            _P.FAILED,  # the executor did not start before the deadline
        }
    ),
    _P.ORDERED: frozenset(
        {
            _P.LAUNCHED,  # the instance was launched
            _P.FAILED,  # the cloud refused, or did not answer before the deadline
        }
    ),
    _P.LAUNCHED: frozenset(
        {
            _P.REGISTERED,  # the kubelet registered
            _P.FAILED,  # no node by the deadline
            _P.LOST,  # the instance ended before it registered
            _P.TERMINATING,  # released while booting
        }
    ),
    _P.REGISTERED: frozenset(
        {
            _P.READY,  # the kubelet is ready and every promised GPU is allocatable
            _P.CORDONED,  # cordoned while booting
            _P.FAILED,  # not usable by the deadline
            _P.LOST,  # the instance or the node object disappeared while booting
            _P.TERMINATING,  # released or deleted while booting
        }
    ),
    _P.READY: frozenset(
        {
            _P.CORDONED,  # a drain was decided, or a user cordoned it
            _P.LOST,  # the kubelet stopped, GPUs disappeared, or the instance was terminated by others
            _P.TERMINATING,  # deleted by a user, or terminated by the cloud
        }
    ),
    _P.LOST: frozenset(
        {
            _P.READY,  # the kubelet is back, with all GPUs
            _P.CORDONED,  # drained while lost, or cordoned by a user
            _P.FAILED,  # its node was deleted and the boot deadline has passed: to be released
            _P.TERMINATING,  # its instance is released
        }
    ),
    _P.CORDONED: frozenset(
        {
            _P.READY,  # uncordoned: the drain was canceled, or a user uncordoned it
            _P.REGISTERED,  # uncordoned before it was ever usable
            _P.FAILED,  # uncordoned after its deadline without ever being usable
            _P.LOST,  # stopped reporting, or the instance disappeared
            _P.DRAINING,  # the drain started
            _P.TERMINATING,  # deleted by a user
        }
    ),
    _P.DRAINING: frozenset(
        {
            _P.CORDONED,  # the drain was canceled, not yet uncordoned
            _P.READY,  # the drain was canceled
            _P.LOST,  # the drain was canceled and the node is lost, or the cloud was faster
            _P.DRAINED,  # no workload pod is left
            _P.TERMINATING,  # the cloud or a user was faster
        }
    ),
    _P.DRAINED: frozenset(
        {
            _P.TERMINATING  # the instance is being terminated
        }
    ),
    _P.FAILED: frozenset(
        {
            _P.REGISTERED,  # the node registered late
            _P.READY,  # the node became usable late
            _P.CORDONED,  # registered late, and cordoned
            _P.LOST,  # registered late and disappeared
            _P.TERMINATING,  # the instance is released
        }
    ),
    _P.TERMINATING: frozenset(
        {
            _P.GONE,  # the cloud confirmed it
            _P.LOST,  # the instance had ended before the release
        }
    ),
    _P.GONE: frozenset(),
}
