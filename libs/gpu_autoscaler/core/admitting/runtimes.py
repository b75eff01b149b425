"""Whether a request fits the kind of object that it wants its members made by. Called by admission."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from gpu_autoscaler.events.job import JobRequested
from gpu_autoscaler.model.jobs import Mistake, Runtime

# Others' controllers make names of Services and pods of the job's id: those begin with a letter, and each has a limit
# of its own (63 characters with what is appended; KubeRay 1.3 allows a RayJob 47; JobSet 0.8 appends the name of its
# part, two indexes and five characters). This fits them all.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_LENGTH_MAX = 40


def runtime_mistakes(request: JobRequested) -> Iterator[Mistake]:
    """Yield what is wrong with the runtime, or with the rest of the request for this runtime."""
    known = [each.value for each in Runtime]
    asked = request.runtime.lower()
    if asked not in known:
        nearest = get_close_matches(asked, known, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        yield Mistake("runtime", f"{request.runtime[:40]!r} is no runtime (known: {', '.join(known)}){hint}")
        return
    if asked == Runtime.JOB:
        return
    job_id = request.job_id
    if job_id is not None and (len(job_id) > NAME_LENGTH_MAX or not _NAME.fullmatch(job_id)):
        reason = f"begin with a letter and have at most {NAME_LENGTH_MAX} characters: names of its pods are made of it"
        yield Mistake("job_id", f"{job_id[:80]!r}: the id of a {asked} must {reason}")
    if request.min_members is not None:
        yield Mistake("min_members", f"is for the runtime job alone; a {asked} starts with all its members")
    if asked == Runtime.RAYJOB and not request.container.command:
        yield Mistake("container.command", "is empty; a rayjob needs one: Ray runs it as its entrypoint")
