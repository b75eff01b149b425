"""Bugs to plant in quotas, preemption and rights that a test finds: most policies of runs have none of them."""

from collections.abc import Mapping

from tests.sim.planting import Planted

_CORE = "libs/gpu_autoscaler/core"
_GATEWAY = "services/gpu_autoscaler_services/gateway"
_QUOTAS = "tests/property/test_quotas.py"
_LIMITS = "tests/unit/core/demand/test_quotas.py"
_RESOURCE_QUOTAS = "tests/unit/core/demand/test_resource_quotas.py"
_PREEMPTION = "tests/unit/core/queueing/test_preemption.py"
_SIMULATED = "tests/sim/test_teams.py"
_RIGHTS = "tests/services/gateway/test_auth.py"
_CLIENTS = "tests/services/gateway/test_client_requests.py"
_JOBS = "tests/services/gateway/test_jobs.py"

# By the test that finds it.
TEAMS: Mapping[str, Planted] = {
    # ---- quotas and preemption
    "tests/unit/core/demand/test_quotas.py::test_what_a_project_may_use_of_an_idle_cohort": Planted(
        "a project borrows beyond its borrowing limit",
        2,
        f"{_CORE}/demand/quotas.py",
        "        return total if mine.borrowable is None else min(total, own + mine.borrowable)\n",
        "        return total\n",
    ),
    f"{_QUOTAS}::test_borrowed_quota_returns_to_its_owner": Planted(
        "quota is reclaimed from projects that borrow none",
        2,
        f"{_CORE}/queueing/preemption.py",
        "if gpus_of(candidate.spec) and usage.borrowed(other) and running.borrowed(other) > taken:\n",
        "if gpus_of(candidate.spec) and not usage.borrowed(other):\n",
    ),
    f"{_PREEMPTION}::test_the_victim_keeps_its_quota_until_its_pods_are_gone": Planted(
        "a preempted job returns its quota before its pods are gone",
        2,
        f"{_CORE}/demand/quotas.py",
        "    return not is_preempted_for_another(job) or remaining_count(state, job.queued.job_id) > 0\n",
        "    return not is_preempted_for_another(job)\n",
    ),
    f"{_PREEMPTION}::test_nothing_is_bought_for_a_victim_before_its_pods_are_gone": Planted(
        "a preempted job gets a node beyond its cohort's quota while its pods end",
        2,
        f"{_CORE}/demand/quotas.py",
        "            outcome = ending_victim(self._state, record, self._policy)\n",
        "            pass\n",
    ),
    f"{_PREEMPTION}::test_nobody_borrows_what_its_owner_has_once_its_own_victim_has_ended": Planted(
        "others borrow what an owner waits for while its preempted job ends, and lose jobs for it",
        2,
        f"{_CORE}/demand/quotas.py",
        " - self._ending[mine.project] + gpus_of(spec) <= mine.nominal\n",
        " + gpus_of(spec) <= mine.nominal\n",
    ),
    f"{_PREEMPTION}::test_jobs_that_wait_for_capacity_keep_the_quota_that_they_were_granted": Planted(
        "quota is reclaimed as if queued jobs had none",
        3,
        f"{_CORE}/queueing/preemption.py",
        "and job_id in granted:\n",
        "and job_id in ():\n",
    ),
    f"{_SIMULATED}::test_borrowed_quota_returns_and_no_quota_is_exceeded[1]": Planted(
        "a project reclaims more than its nominal quota",
        2,
        f"{_CORE}/queueing/preemption.py",
        "        if not before.is_nominal(spec):\n            continue\n        borrowed",
        "        borrowed",
    ),
    f"{_PREEMPTION}::test_a_higher_priority_preempts_only_where_buying_is_barred": Planted(
        "a job of high priority preempts others although nodes can be bought",
        3,
        f"{_CORE}/queueing/preemption.py",
        " and spec.job_id in barred]\n",
        "]\n",
        also=((f"{_CORE}/queueing/preemption.py", "barred_by=barred[spec.job_id]", 'barred_by=""'),),
    ),
    f"{_PREEMPTION}::test_a_protected_job_is_no_victim": Planted(
        "a job that is not preemptible is preempted",
        3,
        f"{_CORE}/queueing/preemption.py",
        "    return not spec.is_preemptible or any(",
        "    return any(",
    ),
    "tests/services/scheduler/test_attempts_preempted.py::test_a_borrower_without_checkpoints_ends_at_once": Planted(
        "a preemption for another job uses up a retry",
        1,
        "services/gpu_autoscaler_services/scheduler/attempts.py",
        "        retries_used_count=victim.retries_used_count,\n",
        "        retries_used_count=victim.retries_used_count + 1,\n",
    ),
    f"{_LIMITS}::test_nominal_quota_is_granted_before_any_is_borrowed": Planted(
        "who came first borrows the quota that its owner needs now",
        2,
        f"{_CORE}/demand/quotas.py",
        " and not is_behind and is_granted(job.spec):\n",
        " and not is_behind:\n",
    ),
    "tests/unit/core/queueing/test_requeue.py::test_a_job_that_no_capacity_serves_lets_others_use_its_quota": Planted(
        "jobs that no capacity serves keep the quota that others wait for",
        2,
        f"{_CORE}/demand/quotas.py",
        "        first, last = self._by_turn(waiting)\n",
        "        first, last = waiting, []\n",
    ),
    "tests/unit/core/queueing/test_requeue.py::test_a_requeued_job_reclaims_nothing": Planted(
        "a job that could not start either ends the borrower of its quota",
        2,
        f"{_CORE}/queueing/preemption.py",
        " if spec is not None and may_reclaim(state, state.jobs[spec.job_id], as_of)]",
        " if spec is not None]",
    ),
    f"{_LIMITS}::test_a_preempted_attempt_and_the_next_one_both_count": Planted(
        "GPU time of preempted attempts is not counted",
        2,
        f"{_CORE}/state/usage_history.py",
        "        ended_at = preempted.preempted_at\n",
        "        return None\n",
    ),
    f"{_LIMITS}::test_a_job_starts_only_if_its_whole_time_limit_is_left_in_the_month": Planted(
        "a job starts with whatever is left of the month's GPU-hours",
        2,
        f"{_CORE}/demand/quotas.py",
        "        if used + needed <= most_seconds:\n",
        "        if used <= most_seconds:\n",
    ),
    f"{_RESOURCE_QUOTAS}::test_jobs_share_a_quota_in_the_order_in_which_they_are_served": Planted(
        "each job sees a ResourceQuota without the jobs before it",
        2,
        f"{_CORE}/demand/quotas.py",
        "        elif not is_coming:\n            self._resource_quotas.take(spec, item.member_count)\n",
        "",
    ),
    f"{_RESOURCE_QUOTAS}::test_the_pod_of_a_lost_node_comes_before_other_jobs": Planted(
        "another job takes the ResourceQuota that the pod of a lost node needs again",
        2,
        f"{_CORE}/demand/quotas.py",
        "            self._take_coming(demand)\n",
        "",
    ),
    f"{_RESOURCE_QUOTAS}::test_nothing_is_bought_for_a_job_behind_the_head_of_a_strict_queue": Planted(
        "a job like one ahead of it is bought for before the jobs of its strict queue between them",
        2,
        f"{_CORE}/provisioning/lots.py",
        "number + (key != before)",
        "number",
    ),
    f"{_RESOURCE_QUOTAS}::test_what_was_bought_for_a_refused_job_serves_others": Planted(
        "a node stays reserved for a job whose pods a quota refuses",
        2,
        f"{_CORE}/provisioning/lots.py",
        " and lot.first.blocked is None]\n        waiting",
        "]\n        waiting",
    ),
    f"{_LIMITS}::test_a_job_with_pods_counts_although_its_placement_is_lost": Planted(
        "a running job whose placement is lost holds no quota",
        2,
        f"{_CORE}/demand/quotas.py",
        "        return pod_index(state).members.get(job.queued.job_id, 0) > 0\n",
        "        return False\n",
    ),
    f"{_RESOURCE_QUOTAS}::test_a_placed_job_keeps_its_quota_until_its_pods_exist": Planted(
        "placed jobs count against no ResourceQuota before their pods exist",
        2,
        f"{_CORE}/demand/quotas.py",
        "take(job.spec, item.member_count)",
        "take(job.spec, 0)",
    ),
    f"{_RESOURCE_QUOTAS}::test_the_plan_check_refuses_what_a_quota_forbids": Planted(
        "the plan check takes each ResourceQuota for unused",
        2,
        f"{_CORE}/check/resource_quota_rules.py",
        "            if needed and used + needed > hard:\n",
        "            if needed and needed > hard:\n",
    ),
    f"{_RESOURCE_QUOTAS}::test_behind_a_job_without_quota_nobody_of_its_strict_queue_gets_any": Planted(
        "jobs of a strict queue get quota that the first one lacks",
        2,
        f"{_CORE}/demand/quotas.py",
        "                self._closed.add(item.strict_queue)\n",
        "                self._closed.discard(item.strict_queue)\n",
    ),
    f"{_RESOURCE_QUOTAS}::test_a_job_over_a_quota_of_the_policy_takes_no_resource_quota": Planted(
        "a job takes one of its quotas while another refuses it",
        2,
        f"{_CORE}/demand/quotas.py",
        "        if outcome is not None:\n            self._held[spec.job_id] = outcome\n",
        "        if outcome is not None:\n            self._resource_quotas.take(spec, item.member_count)\n"
        "            self._held[spec.job_id] = outcome\n",
    ),
    f"{_RESOURCE_QUOTAS}::test_the_quota_of_the_policy_counts_before_its_namespace_exists": Planted(
        "the first jobs of a project know nothing of the quota that its namespace will have",
        2,
        f"{_CORE}/demand/resource_quotas.py",
        "        if place.is_created and ",
        "        if False and ",
    ),
    # ---- the save before a preemption
    "tests/services/scheduler/test_attempts_preempted.py::test_a_borrower_ends_when_it_has_saved_for_a_plan": Planted(
        "a preempted job ends before it has saved",
        2,
        "services/gpu_autoscaler_services/scheduler/attempts.py",
        " for victim in leaving if not is_saving(victim, state, policy, as_of)]",
        " for victim in leaving]",
    ),
    f"{_PREEMPTION}::test_a_plan_asks_the_victim_to_save_before_it_ends": Planted(
        "a job counts as asked before a request has reached its pods",
        2,
        f"{_CORE}/queueing/preemption.py",
        "    return request is not None and request.requested_at >= decided_at\n",
        "    return request is None or request.requested_at >= decided_at\n",
    ),
    f"{_PREEMPTION}::test_the_plan_check_knows_what_the_policy_and_the_cohort_allow": Planted(
        "the plan check lets jobs be preempted whose project borrows nothing",
        2,
        f"{_CORE}/check/preemption_rules.py",
        "    return None if used > mine else ",
        "    return None if used > 0 else ",
    ),
    # ---- rights
    f"{_RIGHTS}::test_a_project_is_checked_in_its_namespace": Planted(
        "a right in the release's namespace is one in all projects",
        3,
        f"{_GATEWAY}/access.py",
        "        if not right.is_by_project or project_id is None:\n",
        "        if right.is_by_project or project_id is None:\n",
    ),
    f"{_RIGHTS}::test_the_single_right_in_one_namespace_grants_nothing": Planted(
        "the single right of 0.2 grants everything from one namespace",
        3,
        f"{_GATEWAY}/access.py",
        '{**single, "verb": verb})',
        '{**attributes, **single, "verb": verb})',
    ),
    f"{_RIGHTS}::test_a_grant_is_remembered_for_a_minute_and_a_refusal_for_seconds": Planted(
        "a grant is remembered after its minute",
        3,
        f"{_GATEWAY}/access.py",
        "GRANT_SECONDS_MAX = 60.0\n",
        "GRANT_SECONDS_MAX = 60.0\n_LONGER = 3600.0\n",
        also=((f"{_GATEWAY}/access.py", "(GRANT_SECONDS_MAX if is_allowed", "(_LONGER if is_allowed"),),
    ),
    f"{_CLIENTS}::test_without_kubernetes_a_client_submits_in_its_projects_alone": Planted(
        "a client of the broker submits in any project",
        3,
        f"{_GATEWAY}/access.py",
        '        return not projects.isdisjoint({project_id, "*"})\n',
        "        return bool(projects)\n",
    ),
    f"{_CLIENTS}::test_without_kubernetes_a_client_cancels_its_own_jobs_alone": Planted(
        "a client of the broker cancels jobs of others",
        3,
        f"{_GATEWAY}/client_requests.py",
        "        elif row.spec.submitted_by != access.name:\n",
        "        elif not row.spec.submitted_by:\n",
    ),
    f"{_CLIENTS}::test_without_kubernetes_no_client_has_dangerous_fields": Planted(
        "fields that reach beyond the pod need no right",
        3,
        f"{_GATEWAY}/api/jobs.py",
        "    await access.require(DANGEROUS_FIELDS, job.project_id)\n",
        "",
    ),
    f"{_JOBS}::test_dangerous_fields_need_the_setting_and_no_caller_sets_the_mark": Planted(
        "a caller marks its own dangerous fields as allowed",
        3,
        f"{_GATEWAY}/api/jobs.py",
        "    if job.dangerous_fields_allowed:\n        reason",
        "    if False:\n        reason",
    ),
    f"{_JOBS}::test_values_of_environment_variables_are_not_shown": Planted(
        "events show values of environment variables to every reader",
        3,
        f"{_GATEWAY}/env_values.py",
        "    fact = envelope.fact if is_env_shown else _without_values(envelope.fact)\n",
        "    fact = _without_values(envelope.fact) if is_env_shown else envelope.fact\n",
    ),
}
