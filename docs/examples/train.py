"""A training loop that resumes from its last checkpoint, and saves on request (every 15 minutes) and when it is ended.

CHECKPOINTS names a directory or s3://BUCKET/PREFIX, JOB_ID the job, POD_NAME the pod. See examples/training-job.yaml.
"""

import json
import os
import signal
import sys
import time

from gpu_manager_sdk import CheckpointManager, GPUManagerError, SaveRequests

STEPS = int(os.environ.get("STEPS", "100000"))
SAVE_EVERY_SECONDS = 20 * 60.0  # if no request reaches it


def main() -> int:
    """Train; 143 if the pod was ended before the end of the work."""
    job_id = os.environ["JOB_ID"]
    checkpoints, requests = CheckpointManager(os.environ["CHECKPOINTS"]), SaveRequests()
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ending.append(number))
    saved = checkpoints.restore(job_id)
    step = 0 if saved is None else json.loads(saved)["step"]
    print(f"starts at step {step}", flush=True)
    saved_at = time.monotonic()
    while step < STEPS and not ending:
        time.sleep(0.01)  # the work
        step += 1
        if requests.is_due() or time.monotonic() - saved_at >= SAVE_EVERY_SECONDS:
            checkpoints.save(job_id, json.dumps({"step": step}).encode())
            saved_at = time.monotonic()
            try:
                requests.saved()
            except GPUManagerError as error:
                print(f"save not reported: {error}", flush=True)  # still due: reported with the next step
    if ending:
        checkpoints.save(job_id, json.dumps({"step": step}).encode())
        return 128 + signal.SIGTERM
    checkpoints.remove(job_id)
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
