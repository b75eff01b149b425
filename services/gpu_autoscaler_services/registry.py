"""The running system on one screen: every service, by its class. How each is put together stands in `wiring.py`."""

from gpu_autoscaler.runtime.service import Service
from gpu_autoscaler_services.announcer.service import Announcer
from gpu_autoscaler_services.cost_tracker.service import CostTracker
from gpu_autoscaler_services.dcgm_ingest.service import DcgmIngest
from gpu_autoscaler_services.gateway.service import Gateway
from gpu_autoscaler_services.pod_watcher.service import PodWatcher
from gpu_autoscaler_services.policy_watcher.service import PolicyWatcher
from gpu_autoscaler_services.scaler.service import Scaler
from gpu_autoscaler_services.scheduler.service import Scheduler
from gpu_autoscaler_services.shadow.service import Shadow
from gpu_autoscaler_services.spot_watcher.service import SpotWatcher

SERVICES: tuple[type[Service], ...] = (
    PodWatcher,  # what Kubernetes shows: pods, nodes, budgets, jobs
    DcgmIngest,  # what GPUs do
    SpotWatcher,  # what the cloud says: offers, prices, notices
    Scheduler,  # which jobs are accepted, and when each may start
    Scaler,  # which nodes there are to be; its executor orders, drains and ends them
    Shadow,  # what another policy would decide; acts on nothing
    PolicyWatcher,  # which policies, as objects of Kubernetes, are in force
    Announcer,  # why pods wait and nodes come and go, said on them as Kubernetes Events
    CostTracker,  # who pays for what
    Gateway,  # the door for people and programs: REST, events, the live page
)
