"""The rights that the operator's requests need, and no others. A test holds the chart's role to them."""

from __future__ import annotations

from typing import NamedTuple

from kintsugi_operator.api.manifest import GROUP

APPLY = ("create", "delete", "get", "list", "patch")


class PolicyRule(NamedTuple):
    """Verbs on resources of one API group."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


RULES = (
    PolicyRule(GROUP, ("blendservices", "corpusprecomputes"), ("get", "list", "watch")),
    # The finalizer.
    PolicyRule(GROUP, ("blendservices",), ("patch",)),
    PolicyRule(GROUP, ("blendservices/status", "corpusprecomputes/status"), ("patch",)),
    # Where the admission plugin OwnerReferencesPermissionEnforcement runs, whoever names an owner that blocks
    # deletion must be allowed this.
    PolicyRule(GROUP, ("blendservices/finalizers", "corpusprecomputes/finalizers"), ("update",)),
    PolicyRule("ray.io", ("rayservices", "rayjobs"), (*APPLY, "watch")),
    PolicyRule("ray.io", ("rayclusters",), ("get", "patch")),
    PolicyRule("", ("configmaps", "persistentvolumeclaims", "serviceaccounts", "services"), APPLY),
    PolicyRule("", ("pods",), ("list",)),
    PolicyRule("", ("pods/eviction",), ("create",)),
    PolicyRule("policy", ("poddisruptionbudgets",), APPLY),
    PolicyRule("networking.k8s.io", ("networkpolicies",), APPLY),
)
"""Rights in the namespaces that the operator looks after."""

LEASE_RULES = (PolicyRule("coordination.k8s.io", ("leases",), ("create", "get", "update")),)
"""Rights in the operator's own namespace."""


def expand_rules(rules: tuple[PolicyRule, ...]) -> frozenset[tuple[str, str, str]]:
    """Group, resource and verb of everything that rules allow."""
    return frozenset(
        (rule.group, resource, verb) for rule in rules for resource in rule.resources for verb in rule.verbs
    )
