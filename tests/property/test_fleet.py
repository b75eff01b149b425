"""The fleet solver on generated problems."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_autoscaler.core.provisioning.fleet.problem import NO_GROUP, FleetProblem, usable_offers
from gpu_autoscaler.core.provisioning.fleet.solver import cheapest_fleet


@st.composite
def problems(draw: st.DrawFn) -> FleetProblem:
    """Up to eight classes, six offers, three groups."""
    classes, offers = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    amounts = st.tuples(st.integers(0, 8), st.integers(0, 9), st.integers(0, 9), st.just(0), st.just(1))
    rooms = st.tuples(st.integers(0, 8), st.integers(1, 16), st.integers(1, 16), st.just(0), st.integers(1, 8))
    return FleetProblem(
        requests=np.array(draw(st.lists(amounts, min_size=classes, max_size=classes)), dtype=np.int64),
        counts=np.array(draw(st.lists(st.integers(0, 30), min_size=classes, max_size=classes)), dtype=np.int64),
        groups=np.array(draw(st.lists(st.integers(NO_GROUP, 2), min_size=classes, max_size=classes)), dtype=np.int64),
        accepts=np.array(
            draw(
                st.lists(st.lists(st.booleans(), min_size=offers, max_size=offers), min_size=classes, max_size=classes)
            ),
            dtype=np.bool_,
        ),
        capacity=np.array(draw(st.lists(rooms, min_size=offers, max_size=offers)), dtype=np.int64),
        cost=np.array(draw(st.lists(st.integers(1, 100), min_size=offers, max_size=offers)), dtype=np.float64),
    )


@given(problems())
@settings(max_examples=100, deadline=None)
def test_every_serveable_pod_has_exactly_one_node(problem: FleetProblem) -> None:
    """Capacity, accepted offers and groups hold on each node, and no fleet costs less than the floor."""
    fleet = cheapest_fleet(problem)

    served: Counter[int] = Counter()
    for node in fleet.nodes:
        served.update(node.pods)
        asked = problem.requests[list(node.pods)].sum(axis=0)
        groups = [int(problem.groups[each]) for each in node.pods if problem.groups[each] != NO_GROUP]
        assert (asked <= problem.capacity[node.offer]).all()
        assert all(problem.accepts[each, node.offer] for each in node.pods)
        assert len(groups) == len(set(groups))
    has_offer = usable_offers(problem).any(axis=1)
    assert served == Counter({i: int(problem.counts[i]) for i in np.flatnonzero(has_offer) if problem.counts[i]})
    cost = sum(float(problem.cost[node.offer]) for node in fleet.nodes)
    assert cost >= fleet.floor * (1 - 1e-9)


@given(problems())
@settings(max_examples=30, deadline=None)
def test_the_same_problem_gives_the_same_fleet(problem: FleetProblem) -> None:
    """Independent of earlier problems and of chance."""
    assert cheapest_fleet(problem) == cheapest_fleet(problem)


@given(problems(), st.data())
@settings(max_examples=30, deadline=None)
def test_a_digest_is_that_of_the_whole_problem(problem: FleetProblem, data: st.DataObject) -> None:
    """Equal problems have one digest; a single other cell gives another."""
    copied = replace(problem, **{part.name: getattr(problem, part.name).copy() for part in fields(problem)})
    assert copied.digest() == problem.digest()
    cells = getattr(copied, data.draw(st.sampled_from(fields(problem))).name).reshape(-1)
    place = data.draw(st.integers(0, cells.size - 1))
    cells[place] = not cells[place] if cells.dtype == np.bool_ else cells[place] + 1
    assert copied.digest() != problem.digest()
