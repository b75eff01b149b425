"""Addresses of nodes come from templates; what is not known gives none."""

import msgspec
import pytest
from tests.support.stories import given, node

from gpu_autoscaler.events.node import NodeObserved
from gpu_autoscaler.model.errors import ConfigError
from gpu_autoscaler.runtime.addresses import NodeUrl


def observed() -> NodeObserved:
    """A node of whose address nothing is known yet."""
    (only,) = given(node("n1")).nodes.values()
    return only


def test_a_template_is_filled_in() -> None:
    """With what the node is called."""
    known = msgspec.structs.replace(observed(), internal_ip="10.0.0.7")
    assert NodeUrl("http://{internal_ip}:9400/metrics").of(known) == "http://10.0.0.7:9400/metrics"
    assert NodeUrl("http://sim/nodes/{node_name}").of(known) == "http://sim/nodes/n1"


def test_what_is_not_known_gives_no_address() -> None:
    """Never a half-filled one."""
    assert NodeUrl("http://{internal_ip}:9400/metrics").of(observed()) is None


@pytest.mark.parametrize("template", ["http://{ip}/", "http://{}/", "http://{node_name/"])
def test_a_template_that_cannot_be_filled_is_refused(template: str) -> None:
    """At start, with the placeholders that there are."""
    with pytest.raises(ConfigError, match="URL template"):
        NodeUrl(template)
