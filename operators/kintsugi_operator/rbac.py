"""What the operator may do: no more than its requests need. The chart's role says the same, and a test that
it does."""

from __future__ import annotations

from typing import NamedTuple

from kintsugi_operator.api import GROUP

APPLY = ("create", "delete", "get", "list", "patch")


class Rule(NamedTuple):
    """Verbs on resources of one API group."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


RULES = (
    Rule(GROUP, ("blendservices", "corpusprecomputes"), ("get", "list", "watch")),
    # The finalizer.
    Rule(GROUP, ("blendservices",), ("patch",)),
    Rule(GROUP, ("blendservices/status", "corpusprecomputes/status"), ("patch",)),
    # Where the admission plugin OwnerReferencesPermissionEnforcement runs, whoever names an owner that blocks
    # deletion must be allowed this.
    Rule(GROUP, ("blendservices/finalizers", "corpusprecomputes/finalizers"), ("update",)),
    Rule("ray.io", ("rayservices", "rayjobs"), (*APPLY, "watch")),
    Rule("ray.io", ("rayclusters",), ("get", "patch")),
    Rule("", ("configmaps", "persistentvolumeclaims", "serviceaccounts", "services"), APPLY),
    Rule("", ("pods",), ("list",)),
    Rule("", ("pods/eviction",), ("create",)),
    Rule("policy", ("poddisruptionbudgets",), APPLY),
    Rule("networking.k8s.io", ("networkpolicies",), APPLY),
)
"""In the namespaces that it looks after."""

LEASE_RULES = (Rule("coordination.k8s.io", ("leases",), ("create", "get", "update")),)
"""In its own."""


def granted(rules: tuple[Rule, ...]) -> frozenset[tuple[str, str, str]]:
    """Group, resource and verb of everything that rules allow."""
    return frozenset(
        (rule.group, resource, verb) for rule in rules for resource in rule.resources for verb in rule.verbs
    )
