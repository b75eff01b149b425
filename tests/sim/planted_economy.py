"""Bugs to plant in rules that save cost: they remove what work needs, or let work wait that must not.

The plan check refuses most of what they decide, so tests find them; some by the plan check alone.
"""

from collections.abc import Mapping

from tests.sim.planting import Planted

_CORE = "libs/gpu_autoscaler/core"
_SPARES = "tests/unit/core/disruption/test_spare_nodes.py"
_SELECTION = "tests/unit/core/provisioning/test_selection.py"
_CHECK = "tests/unit/core/check/test_plan_check.py"
_WAITS = "tests/unit/core/provisioning/test_spot_waits.py"
_KEEP = "tests/unit/core/provisioning/test_keep_or_buy.py"
_RETURNS = "tests/unit/core/disruption/test_spot_returns.py"
_MOVES = "tests/unit/core/disruption/test_replacement.py"
_ONTO_SPOT = "tests/unit/core/disruption/test_replacement_spot.py"
_SAVES = "tests/unit/core/disruption/test_periodic_checkpoints.py"

# By the test that finds it.
ECONOMY: Mapping[str, Planted] = {
    f"{_ONTO_SPOT}::test_a_full_stand_in_for_spot_stays_without_good_spot": Planted(
        "well used nodes are merged onto free on-demand capacity",
        6,
        f"{_CORE}/disruption/replacement.py",
        "    return is_cheaper and stands_in_for_spot(group[0], draft, state)\n",
        "    return True\n",
    ),
    f"{_ONTO_SPOT}::test_free_spot_that_stays_for_the_work_alone_must_be_cheaper": Planted(
        "free nodes that take work cost nothing",
        6,
        f"{_CORE}/disruption/move_price.py",
        "            total += self._hourly(view) * self._seconds(pod) / jobs_count[key]\n",
        "",
    ),
    f"{_MOVES}::test_work_that_ends_soon_is_not_moved[5.3-False]": Planted(
        "work is moved just before it ends",
        6,
        f"{_CORE}/disruption/move_price.py",
        "        return longest if expected is None else min(longest, expected.mean_seconds)\n",
        "        return longest\n",
    ),
    f"{_MOVES}::test_paid_reservations_are_used_and_not_left": Planted(
        "work leaves a paid reservation for something cheaper",
        6,
        f"{_CORE}/disruption/move_price.py",
        "    return 0 if paid_reservation(view, state, policy, as_of) is not None else view.price_micro_usd_per_hour\n",
        "    return view.price_micro_usd_per_hour\n",
    ),
    f"{_SAVES}::test_the_pods_that_stay_of_an_ended_attempt_are_asked[one pod was lost]": Planted(
        "pods that stay when a job lost one are not asked to save",
        6,
        f"{_CORE}/disruption/periodic_checkpoints.py",
        "or job.cancel_requested or is_ended_whole(job):",
        "or job.cancel_requested or job.preempted:",
    ),
    f"{_RETURNS}::test_free_spot_for_a_part_of_the_gang_is_not_enough": Planted(
        "a gang goes back to spot that has room for a part of it",
        6,
        f"{_CORE}/disruption/spot_returns.py",
        "    if len(keys) < len(job.moving):\n",
        "    if not keys:\n",
    ),
    f"{_RETURNS}::test_a_gang_with_free_spot_is_asked_to_save": Planted(
        "the spot nodes for a job leave as unneeded while it saves",
        6,
        f"{_CORE}/disruption/spot_returns.py",
        "claimed=draft.claimed.union(keys))",
        "claimed=draft.claimed)",
    ),
    f"{_RETURNS}::test_work_that_was_not_saved_lately_counts_as_lost": Planted(
        "a job goes back to spot long after its save, and repeats the work since",
        6,
        f"{_CORE}/disruption/spot_returns.py",
        "        move += before * lost / max(1, gpu_count)\n",
        "",
    ),
    f"{_RETURNS}::test_the_job_keeps_its_places_on_spot_until_its_pods_have_ended": Planted(
        "other jobs take the places of a job that moves while its pods end",
        6,
        f"{_CORE}/demand/sources.py",
        " if not queries.is_moving(job) else _staying_count(state, job_id)",
        "",
    ),
    f"{_KEEP}::test_without_a_purchase_it_uses_what_is_free": Planted(
        "a job waits beside free capacity for a node that no plan buys",
        2,
        f"{_CORE}/provisioning/keep_or_buy.py",
        "seconds=seconds if is_bought_for else min(seconds, BUY_SECONDS_MAX)",
        "seconds=seconds",
    ),
    f"{_KEEP}::test_a_node_that_was_bought_for_the_job_is_used_whatever_it_costs": Planted(
        "a job leaves the node unused that was bought for it",
        2,
        f"{_CORE}/provisioning/keep_or_buy.py",
        "if (key := columns.keys[place]) not in own]",
        "if (key := columns.keys[place])]",
    ),
    f"{_KEEP}::test_a_job_gets_a_new_node_rather_than_keep_an_expensive_one": Planted(
        "the scheduler uses the free capacity for which a plan buys another node",
        3,
        f"{_CORE}/queueing/schedule.py",
        "        avoided = (*unpriced, *expensive)\n",
        "        avoided = unpriced\n",
    ),
    f"{_SPARES}::test_a_node_whose_time_is_over_takes_no_work_from_others": Planted(
        "an empty node leaves because others would take the work, which leave as well",
        3,
        f"{_CORE}/disruption/spare_nodes.py",
        "    names = {spare.view.name for spare in empty}.union(leaving)\n",
        "    names = {spare.view.name for spare in empty}\n",
    ),
    f"{_SPARES}::test_a_node_that_work_often_needs_is_kept_until_break_even": Planted(
        "an empty node that arrivals use is unneeded",
        3,
        f"{_CORE}/disruption/spare_nodes.py",
        "return self.uses_count >= self.use_ratio_min * self.starts_count",
        "return False",
    ),
    f"{_SPARES}::test_a_node_that_work_hardly_needs_leaves_before_break_even_and_its_least_age": Planted(
        "an unneeded node leaves as soon as it is empty",
        3,
        f"{_CORE}/disruption/emptiness.py",
        "            result[name] = limit, unneeded\n",
        "            result[name] = 0.0, unneeded\n",
    ),
    f"{_SPARES}::test_jobs_that_never_run_on_spot_keep_no_spot_node": Planted(
        "jobs that never run on spot keep empty spot nodes",
        3,
        f"{_CORE}/disruption/spare_nodes.py",
        "return is_spot_fine and self.gpu_count",
        "return self.gpu_count",
    ),
    f"{_SELECTION}::test_the_fleet_is_spread_until_that_costs_what_the_policy_allows[365-12]": Planted(
        "spot is spread whatever it costs a month",
        2,
        f"{_CORE}/provisioning/selection.py",
        "        ratio = 1.0 if is_limit_reached else rules.capacity_pool_gpu_ratio_max\n",
        "        ratio = rules.capacity_pool_gpu_ratio_max\n",
    ),
    f"{_CHECK}::test_a_plan_spreads_spot_no_further_than_the_policy_allows": Planted(
        "what present nodes cost for the share of capacity pools is unknown",
        2,
        f"{_CORE}/nodes/spread_cost.py",
        "    return decision.spread_micro_usd_per_hour or None\n",
        "    return None\n",
    ),
    f"{_WAITS}::test_other_work_does_not_wait": Planted(
        "urgent work waits for spot",
        1,
        f"{_CORE}/provisioning/spot_waits.py",
        'or item.priority >= PRIORITY_NAMES["high"] or',
        "or",
    ),
}
