"""The three patch formats of clients: JSON merge patch, strategic merge patch, JSON patch.

A patch returns a new object. Merge keys: the `patchMergeKey` tags of the Go types in `k8s.io/api` 1.36 (read
2026-11-21). Node taints and pod tolerations have none: they are replaced as a whole.
"""

from gpu_autoscaler.simcluster.answers import bad_request, failure
from gpu_autoscaler.simcluster.objects import Json, JsonValue, clone

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "schedulingGates": "name",
    "imagePullSecrets": "name",
    "conditions": "type",
    "addresses": "type",
    "ownerReferences": "uid",
}
_MERGED_SETS = frozenset({"finalizers"})


def merge(target: JsonValue, patch: JsonValue) -> JsonValue:
    """Return `target` under a JSON merge patch (RFC 7386): null removes, lists are replaced."""
    if not isinstance(patch, dict):
        return clone(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic_merge(target: JsonValue, patch: JsonValue) -> JsonValue:
    """Return `target` under a strategic merge patch: as a merge patch, but known lists merge by their key."""
    if not isinstance(patch, dict):
        return clone(patch)
    if patch.get("$patch") == "replace":
        return {key: clone(value) for key, value in patch.items() if key != "$patch"}
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name) or () if item not in value]
        elif key.startswith("$"):
            continue  # $setElementOrder and $retainKeys only order what is merged here anyway
        elif value is None:
            result.pop(key, None)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            result[key] = _merge_list(result.get(key) or [], value, _MERGE_KEYS[key])
        elif isinstance(value, list) and key in _MERGED_SETS:
            old = result.get(key) or []
            result[key] = [*old, *(item for item in value if item not in old)]
        else:
            result[key] = strategic_merge(result.get(key), value)
    return result


def _merge_list(old: list[JsonValue], patch: list[JsonValue], merge_key: str) -> list[JsonValue]:
    if any(isinstance(item, dict) and item.get("$patch") == "replace" for item in patch):
        return [clone(item) for item in patch if "$patch" not in item]
    result = list(old)
    for item in patch:
        if not isinstance(item, dict) or merge_key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {merge_key}")
        places = [index for index, entry in enumerate(result) if entry.get(merge_key) == item[merge_key]]
        if item.get("$patch") == "delete":
            result = [entry for entry in result if entry.get(merge_key) != item[merge_key]]
        elif places:
            result[places[0]] = strategic_merge(result[places[0]], item)
        else:
            result.append(strategic_merge({}, item))
    return result


def json_patch(target: Json, operations: JsonValue) -> Json:
    """Return `target` under a JSON patch (RFC 6902): add, remove, replace, test. Raises ApiRefusal 400, 422."""
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    result: Json = clone(target)
    for operation in operations:
        try:
            _operate(result, operation)
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            path = operation.get("path") if isinstance(operation, dict) else operation
            message = f"the server rejected our request due to an error in our request: {path}"
            raise failure(422, "Invalid", message, {}) from exc
    return result


def _operate(document: Json, operation: Json) -> None:
    """Apply one operation in place. Raises KeyError, IndexError, TypeError or ValueError where it cannot."""
    verb = operation["op"]
    steps = [step.replace("~1", "/").replace("~0", "~") for step in operation["path"].split("/")[1:]]
    parent: JsonValue = document
    for step in steps[:-1]:
        parent = parent[int(step)] if isinstance(parent, list) else parent[step]
    last: JsonValue = steps[-1]
    if isinstance(parent, list):
        last = len(parent) if last == "-" else int(last)
    if verb == "add" and isinstance(parent, list):
        parent.insert(last, clone(operation["value"]))
    elif verb == "add":
        parent[last] = clone(operation["value"])
    elif verb == "replace":
        if isinstance(parent, dict) and last not in parent:
            raise KeyError(last)
        parent[last] = clone(operation["value"])
    elif verb == "remove":
        del parent[last]
    elif verb != "test" or parent[last] != operation["value"]:
        raise ValueError(verb)
