"""Bugs to plant that a test finds: what they break shows only after days, or after a loss that runs do not have."""

from collections.abc import Mapping

from tests.sim.planted_durations import DURATIONS
from tests.sim.planted_economy import ECONOMY
from tests.sim.planted_queues import QUEUES
from tests.sim.planted_requests import REQUESTS
from tests.sim.planted_teams import TEAMS
from tests.sim.planting import Planted

_CORE = "libs/gpu_autoscaler/core"
_FOLD = "tests/unit/core/intake/test_fold.py"
_POD_WATCHER = "tests/services/pod_watcher/test_service.py"
_IDLE = "tests/unit/core/disruption/test_idle_jobs_workloads.py"
_COSTS = "services/gpu_autoscaler_services/cost_tracker"
_RESTARTS = "tests/services/cost_tracker/test_service_restarts.py::test_a_restart_changes_no_bill"
_METRICS = "tests/unit/runtime/test_metrics.py"
_BRAKE = "tests/unit/core/disruption/test_brake.py"
_LOST = "tests/unit/core/limits/test_limits_lost_orders.py::test_a_node_counts_without_its_order_as_with_it"
_TRACKER = "tests/services/cost_tracker/test_service.py"
_SPEND = "tests/unit/core/disruption/test_spend_enforcement.py"
_CANCEL = "tests/services/scheduler/test_service_cancel.py"
_STORE = "tests/contract/store/test_sqlite.py::TestSqliteStore"

# By the test that finds it.
TESTED: Mapping[str, Planted] = {
    f"{_CANCEL}::test_job_accepted_after_its_cancellation_was_refused_is_cancelled": Planted(
        "a job whose cancellation was refused before it was accepted stays for ever",
        6,
        "services/gpu_autoscaler_services/scheduler/service.py",
        "            return (self._cancelled(job.cancel_requested),)\n",
        "            return ()\n",
    ),
    **QUEUES,
    **TEAMS,
    **REQUESTS,
    **ECONOMY,
    **DURATIONS,
    "tests/property/test_next_change.py::test_a_plan_changes_only_at_the_instants_that_it_notes": Planted(
        "a duration notes nothing of its end",
        6,
        f"{_CORE}/next_change.py",
        "    if elapsed >= seconds:\n        return True\n    _note_after(since, seconds, as_of)\n    return False\n",
        "    return elapsed >= seconds\n",
    ),
    "tests/unit/core/test_next_change.py::test_a_plan_notes_when_an_empty_node_has_been_idle_for_long_enough": Planted(
        "a comparison notes nothing of when it changes",
        6,
        f"{_CORE}/disruption/emptiness.py",
        "has_lasted(view.empty_since, seconds, draft.as_of)",
        "(draft.as_of - view.empty_since).total_seconds() >= seconds",
    ),
    f"{_IDLE}::test_one_busy_pod_keeps_its_workload_and_no_other": Planted(
        "an idle pod takes the busy pods of its owner with it",
        3,
        f"{_CORE}/disruption/idle_jobs.py",
        "by_owner.setdefault(_workload_of(pod), [])",
        "by_owner.setdefault(pod.pod_uid, [])",
    ),
    f"{_IDLE}::test_it_ends_after_the_grace_through_its_owner": Planted(
        "an announcement of an earlier idle time ends a workload at once",
        3,
        f"{_CORE}/disruption/idle_jobs.py",
        "len(pods) and min(announced_at) >= idle_since",
        "len(pods)",
    ),
    f"{_IDLE}::test_a_namespace_opts_in_by_its_label_or_the_policy[by label]": Planted(
        "the label opts no namespace in to the end of idle workloads",
        3,
        f"{_CORE}/disruption/idle_jobs.py",
        "    opted_in = {*rules.namespaces, *state.opted_in_namespaces}\n",
        "    opted_in = {*rules.namespaces}\n",
    ),
    f"{_IDLE}::test_a_namespace_opts_in_by_its_label_or_the_policy[another namespace]": Planted(
        "one namespace opts in for all others",
        3,
        f"{_CORE}/disruption/idle_jobs.py",
        "        if pod.namespace in opted_in and is_workload:\n",
        "        if is_workload:\n",
    ),
    f"{_IDLE}::test_the_end_needs_the_label_as_well": Planted(
        "the plan check ends workloads of namespaces that opted out since",
        3,
        f"{_CORE}/check/upkeep_rules.py",
        "    if not is_opted_in or _is_frozen(state, policy, as_of):\n",
        "    if _is_frozen(state, policy, as_of):\n",
    ),
    f"{_FOLD}::test_the_newest_heartbeat_says_which_namespaces_opted_in": Planted(
        "a late report opts namespaces in again",
        3,
        f"{_CORE}/intake/fold.py",
        "        is_newest = synced is None or at >= synced.seen_at\n",
        "        is_newest = True\n",
    ),
    f"{_POD_WATCHER}::test_namespaces_that_opt_in_are_published_with_the_next_pod": Planted(
        "a namespace opts in by any value of the label",
        3,
        "services/gpu_autoscaler_services/pod_watcher/service.py",
        'namespace.metadata.labels.get(labels.END_IDLE_WORKLOADS) == "true"',
        "namespace.metadata.labels.get(labels.END_IDLE_WORKLOADS) is not None",
    ),
    f"{_POD_WATCHER}::test_so_many_namespaces_may_opt_in": Planted(
        "every heartbeat names any number of namespaces",
        9,
        "services/gpu_autoscaler_services/pod_watcher/service.py",
        "tuple(sorted(self._opted_in)[:OPTED_IN_COUNT_MAX])",
        "tuple(sorted(self._opted_in))",
    ),
    "tests/sim/test_brake.py": Planted(
        "the brake never trips",
        5,
        f"{_CORE}/disruption/brake.py",
        "    if is_within_nodes and price is not None and price <= price_max:\n",
        "    if is_within_nodes or price is not None:\n",
        also=((f"{_CORE}/check/brake_rules.py", "    if not rules.is_on:\n", "    if rules.is_on:\n"),),
    ),
    f"{_BRAKE}::test_the_brake_holds_after_its_hour": Planted(
        "a tripped brake is forgotten",
        5,
        f"{_CORE}/intake/fold.py",
        "            self._batch.brake = fact.plan.brake\n",
        "            self._batch.brake = None\n",
    ),
    f"{_BRAKE}::test_removals_leave_the_count_after_an_hour": Planted(
        "removals of earlier plans do not count for the brake",
        5,
        f"{_CORE}/state/forced_removals.py",
        "WINDOW = timedelta(hours=1)\n",
        "WINDOW = timedelta(seconds=1)\n",
        also=((f"{_CORE}/check/brake_rules.py", "_HOUR = timedelta(hours=1)\n", "_HOUR = timedelta(seconds=1)\n"),),
    ),
    "tests/services/scaler/test_service_brake.py::test_a_lost_stream_does_not_release_the_brake": Planted(
        "the loss of a stream releases the brake",
        5,
        "services/gpu_autoscaler_services/scaler/recovery.py",
        ", brake=newest[0].fact.plan.brake)\n",
        ")\n",
    ),
    # It needs a gang that shares its node with other work, and a budget that pays for exactly one of them.
    "tests/unit/core/limits/test_limits_purchases.py::test_a_gang_dropped_for_a_budget_is_bought_for_nowhere": Planted(
        "a gang dropped for a limit keeps its place on a node of other work",
        2,
        f"{_CORE}/limits/limits.py",
        "    withdrawn = {key: lost[owner] for key, owner in owners.items() if owner in lost}\n",
        "    withdrawn: dict[str, DeferReason] = {}\n",
    ),
    # They need a node whose order is lost, of a project that is full but for the GPUs that are not counted.
    f"{_LOST}[MIG slices-GPUs of a project]": Planted(
        "a node without its order counts by its whole GPUs alone",
        2,
        f"{_CORE}/nodes/correlation.py",
        "            return max(offered, records.node.allocatable.gpu_count)\n",
        "            return records.node.allocatable.gpu_count\n",
    ),
    f"{_LOST}[whole GPUs-nodes of a project]": Planted(
        "the plan check counts nodes without orders for the cluster alone",
        2,
        f"{_CORE}/check/plan_check.py",
        "            self._nodes[_orphan_owners(seen.zone, node), ",
        "            self._nodes[(), ",
    ),
    "tests/services/scaler/test_living.py::test_ends_of_lost_streams_are_published_before_the_first_plan": Planted(
        "ends that the ledger needs are lost with the streams",
        7,
        "services/gpu_autoscaler_services/scaler/recovery.py",
        "            return Outcome(facts=ends)  # with the next tick the state has them\n",
        "            pass\n",
    ),
    # They need a tracker that is away for longer than the streams keep what an instance was launched with.
    "tests/services/scaler/test_living.py::test_what_has_ended_is_published_again_until_it_is_charged": Planted(
        "what has ended is not published again for the ledger",
        5,
        "services/gpu_autoscaler_services/scaler/living.py",
        "    return charge is None or not (",
        "    return charge is not None and not (",
    ),
    f"{_TRACKER}::test_the_marks_of_a_forgotten_job_are_published": Planted(
        "the budget of a job that the state has forgotten is none",
        5,
        f"{_COSTS}/service.py",
        "            if spec is None and job_id in charged:\n",
        "            if False:\n",
    ),
    f"{_SPEND}::test_nothing_is_forced_while_the_ledger_is_behind": Planted(
        "a hard limit is enforced on a doubtful ledger",
        5,
        f"{_CORE}/disruption/spend_enforcement.py",
        "    unknown = snapshot.unknown_reason(cap) or stale_watch(state, policy, draft.as_of)\n",
        "    unknown = stale_watch(state, policy, draft.as_of)\n",
        also=(
            (
                f"{_CORE}/check/spend_rules.py",
                "        if (doubt := _ledger_doubt(owner, plan.as_of, state)) is not None:\n",
                "        if (doubt := None) is not None:\n",
            ),
        ),
    ),
    f"{_SPEND}::test_a_charge_whose_spans_pause_is_not_counted_again": Planted(
        "the charge of a living instance is forgotten",
        5,
        f"{_CORE}/state/ledger.py",
        "is_old(charge.reported_at) if charge.is_final else hour(charge.reported_at) < open_since\n",
        "is_old(charge.reported_at) if True else hour(charge.reported_at) < open_since\n",
    ),
    f"{_RESTARTS}[snapshot]": Planted(
        "a restarted cost tracker has no memory",
        5,
        f"{_COSTS}/service.py",
        "        self._bills, self._holdings = Bills(memory.bills), Holdings(memory.held)\n",
        "        self._bills, self._holdings = Bills(), Holdings()\n",
    ),
    f"{_RESTARTS}[streams]": Planted(
        "a bill is opened from its launch alone",
        5,
        f"{_COSTS}/service.py",
        "                    self._bills.reopen(charge)\n",
        "                    pass\n",
    ),
    f"{_STORE}::test_old_days_are_merged_to_one_row_with_the_same_sums": Planted(
        "a merged day has the shares of one span",
        5,
        "libs/gpu_autoscaler/store/retention.py",
        "        shares[key] = share if known is None else _sum(known, share)\n",
        "        shares[key] = share\n",
    ),
    f"{_STORE}::test_a_merged_span_is_not_charged_again": Planted(
        "a merged span is charged again",
        5,
        "libs/gpu_autoscaler/store/operations.py",
        "        if key[1] >= rolled_until.get(span.provider_id, key[1])\n",
        "        if True\n",
    ),
    "tests/integration/runtime/test_long_plans.py::"
    "test_leader_keeps_its_lease_and_its_effects_during_long_plans": Planted(
        "plans are made on the event loop",
        4,
        "libs/gpu_autoscaler/runtime/compute.py",
        "        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)\n",
        "        return function(*args)\n",
    ),
    "tests/contract/bus/test_memory.py::TestMemoryBus::"
    "test_a_reader_notices_what_was_discarded_before_it_read_it": Planted(
        "discarded messages are skipped silently",
        9,
        "libs/gpu_autoscaler/bus/protocol.py",
        "    if 0 < read_up_to < first_sequence - 1:\n",
        "    if False:\n",
    ),
    "tests/services/pod_watcher/test_related_objects.py::"
    "test_an_event_looks_only_at_pods_that_it_may_change[group]": Planted(
        "an event of a related object looks at all pods",
        3,
        "services/gpu_autoscaler_services/pod_watcher/related_objects.py",
        "            uids.update(self._dependents.get((kind.plural, key), ()))\n",
        "            uids.update(self._pods)\n",
    ),
    "tests/services/gateway/test_recent_facts.py::test_large_plans_take_the_memory_of_the_limit": Planted(
        "recent facts are limited in number alone",
        6,
        "services/gpu_autoscaler_services/gateway/recent_facts.py",
        "        while self.message_bytes > self._bytes_max:\n",
        "        while False:\n",
    ),
    # The alert for notices that no scaler handles depends on both.
    f"{_METRICS}::test_a_process_exports_only_what_its_service_owns": Planted(
        "every service exports the leader gauge",
        4,
        "libs/gpu_autoscaler/runtime/metric_families.py",
        '    _gauge("leader", LEASED, ',
        '    _gauge("leader", EVERY, ',
    ),
    f"{_METRICS}::test_the_fleet_is_exported_by_the_active_process_after_its_first_tick": Planted(
        "a former leader exports the fleet",
        4,
        "libs/gpu_autoscaler/runtime/metrics.py",
        "        return self.registry.collect() if self._is_exported() else ()\n",
        "        return self.registry.collect()\n",
    ),
    "tests/integration/bus/test_auth_callout.py::test_a_login_is_for_one_instance": Planted(
        "a watcher's login is for every instance",
        4,
        "services/gpu_autoscaler_services/node_gateway/admission.py",
        "permissions=of_requester(report_subject(provider_id), ",
        "permissions=of_requester('node_report.*', ",
    ),
    "tests/services/spot_watcher/test_node_reporter.py::"
    "test_at_rest_nothing_is_sent_but_one_report_a_connection": Planted(
        "a watcher at rest repeats its report",
        4,
        "services/gpu_autoscaler_services/spot_watcher/node_reporter.py",
        "wait_seconds = REPEAT_SECONDS if report.shown else None\n",
        "wait_seconds, settled = REPEAT_SECONDS, None\n",
    ),
    "tests/integration/bus/test_node_reports.py::test_many_watchers_come_back_one_after_another": Planted(
        "all watchers return to the broker at once",
        4,
        "libs/gpu_autoscaler/bus/nats/requests.py",
        "return random.uniform(0.0, longest)",
        "return 0.25 if longest else random.uniform(0.0, longest)",
    ),
    "tests/services/scheduler/test_job_budgets.py::test_job_that_ended_by_itself_is_not_cancelled[Complete]": Planted(
        "a job that ended while the broker was away is cancelled for its budget",
        2,
        "services/gpu_autoscaler_services/scheduler/job_budgets.py",
        "            return not await self._binder.is_ending(spec.job_id, spec.runtime, spec.namespace)\n",
        "            return True\n",
    ),
    "tests/services/scheduler/test_suspension.py::test_a_placement_that_was_preempted_releases_nothing": Planted(
        "a placement that has ended resumes the Job",
        2,
        "services/gpu_autoscaler_services/scheduler/service.py",
        "        if job.preempted is not None and job.preempted.attempt >= placed.attempt:\n",
        "        if job.preempted is not None and job.preempted.attempt > placed.attempt:\n",
    ),
    "tests/integration/kube/test_restored_etcd.py::test_what_a_backup_lacks_is_gone": Planted(
        "a watch goes on from a version that the history has not reached",
        1,
        "libs/gpu_autoscaler/kube/watch.py",
        "    if newest < version:\n",
        "    if newest < 0:\n",
    ),
    "tests/unit/core/placement/test_pod_affinity.py::"
    "test_pods_on_a_node_that_takes_none_now_count_in_a_spread[cordoned]": Planted(
        "pods on cordoned nodes count in no spread",
        1,
        "libs/gpu_autoscaler/core/placement/bins.py",
        "    return node_bin(view, pods, BinReadiness.CLOSED) if has_staying_pods else None\n",
        "    return None\n",
    ),
    "tests/unit/core/demand/test_elastic.py::test_completed_members_count_without_their_pods": Planted(
        "completed members are forgotten with their pods",
        2,
        "libs/gpu_autoscaler/core/state/state.py",
        "return len(self.completed_pods) if is_kept else 0",
        "return 0",
    ),
    "tests/unit/core/provisioning/test_scale_up_canceled_drains.py::"
    "test_pods_that_a_canceled_drain_returns_are_counted_where_they_run[apps0]": Planted(
        "pods that a canceled drain returns count where they were to go",
        1,
        "libs/gpu_autoscaler/core/provisioning/scale_up.py",
        "    if not (cover.drains.returned_counted and tries_left):\n        return cover\n",
        "    if cover:\n        return cover\n",
    ),
    "tests/unit/core/disruption/test_avoided_nodes.py::"
    "test_the_node_that_costs_most_for_each_workload_is_avoided": Planted(
        "new pods avoid the cheapest nodes",
        4,
        "libs/gpu_autoscaler/core/disruption/avoided_nodes.py",
        "    are_open = _open([one.node for one in priced], counts)\n",
        "    are_open = _open([one.node for one in reversed(priced)], counts)\n",
    ),
    "tests/unit/core/disruption/test_avoided_nodes.py::test_the_plan_check_knows_when_a_node_may_be_avoided": Planted(
        "the plan check lets new pods avoid every node",
        4,
        "libs/gpu_autoscaler/core/check/upkeep_rules.py",
        "    avoided |= {decision.node_uid for decision in avoids}\n",
        "",
    ),
    "tests/integration/kube/test_node_taints.py::test_taints_of_others_are_kept": Planted(
        "our taint takes the place of all others",
        4,
        "services/gpu_autoscaler_services/scaler/node_taints.py",
        "msgspec.to_builtins([*others, *ours])",
        "msgspec.to_builtins(ours)",
    ),
}
