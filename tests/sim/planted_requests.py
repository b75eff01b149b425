"""Bugs to plant in how ProvisioningRequests are served that a test finds. See `planted_kueue.py` for those of runs."""

from collections.abc import Mapping

from tests.sim.planting import Planted

_CORE = "libs/gpu_autoscaler/core"
_KUBE = "libs/gpu_autoscaler/kube/translate"
_REQUESTS = "tests/unit/core/demand/test_provisioning_requests.py"
_WATCHED = "tests/services/pod_watcher/test_service_provisioning.py"

# By the test that finds it.
REQUESTS: Mapping[str, Planted] = {
    f"{_REQUESTS}::test_a_check_gets_what_other_work_leaves": Planted(
        "a capacity check goes before work that waits",
        2,
        f"{_CORE}/demand/sources.py",
        "    is_check = item.source is DemandSource.CAPACITY_CHECK",
        "    is_check = item.source is not DemandSource.CAPACITY_CHECK",
    ),
    f"{_REQUESTS}::test_a_pod_that_uses_a_request_counts_once[2]": Planted(
        "a pod that uses a request counts as a member of it as well",
        2,
        f"{_CORE}/demand/provisioning_requests.py",
        "            counts[number] -= 1\n",
        "            counts[number] -= 0\n",
    ),
    f"{_REQUESTS}::test_the_check_refuses_capacity_that_is_not_there": Planted(
        "the plan check believes that there is capacity",
        1,
        f"{_CORE}/check/provisioning_rules.py",
        'capacity" if short or request.trouble else None',
        'capacity" if request.trouble else None',
    ),
    f"{_REQUESTS}::test_the_check_refuses_the_removal_of_a_booked_node": Planted(
        "the plan check lets booked nodes go",
        1,
        f"{_CORE}/check/provisioning_rules.py",
        "        if sum(left) < missing <= sum(there):\n",
        "        if sum(there) < missing <= sum(left):\n",
    ),
    f"{_REQUESTS}::test_no_node_is_bought_before_volumes_and_devices_are_known[volume_trouble]": Planted(
        "nodes are bought for pods whose volume is missing",
        2,
        f"{_CORE}/demand/sources.py",
        "(reason for pod in _pods_to_come(request) if (reason := _blocked(pod)) is not None), None",
        "iter(()), None",
    ),
    f"{_REQUESTS}::test_the_check_refuses_nodes_for_a_missing_volume": Planted(
        "the plan check promises capacity to pods whose volume is missing",
        1,
        f"{_CORE}/check/provisioning_rules.py",
        "if fit < pods.count or pods.volume_trouble or pods.device_trouble]",
        "if fit < pods.count]",
    ),
    f"{_WATCHED}::test_pods_get_the_priority_of_their_class": Planted(
        "the default PriorityClass is ignored",
        2,
        f"{_KUBE}/provisioning.py",
        "        values = [known.value for known in classes if known.global_default]\n",
        "        values = []\n",
    ),
    f"{_WATCHED}::test_a_missing_priority_class_is_a_trouble": Planted(
        "capacity is promised to pods of a PriorityClass that does not exist",
        2,
        f"{_KUBE}/provisioning.py",
        "        if not values:\n",
        "        if values is None:\n",
    ),
    f"{_WATCHED}::test_an_ephemeral_volume_counts_by_its_template": Planted(
        "an ephemeral volume of a pod to come waits for its claim",
        2,
        f"{_KUBE}/related_objects.py",
        "        elif volume.ephemeral is not None and pod.metadata.uid:\n",
        "        elif volume.ephemeral is not None:\n",
    ),
    f"{_WATCHED}::test_a_device_claim_serves_one_pod[2-is shared by 2 pods of the request]": Planted(
        "pods that share a device claim get devices of their own",
        2,
        f"{_KUBE}/provisioning.py",
        "if users[key] > 1 and is_new), None)",
        "if users[key] > 2 and is_new), None)",
    ),
    f"{_WATCHED}::test_a_request_waits_for_the_lists_of_what_its_pods_name": Planted(
        "a claim that is not listed yet counts as missing",
        2,
        "services/gpu_autoscaler_services/pod_watcher/related_objects.py",
        "        if any(kind.path() not in self._listed for pod in pods for kind in _kinds_of(pod)):\n",
        "        if not pods:\n",
    ),
}
