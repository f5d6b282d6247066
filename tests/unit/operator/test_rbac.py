"""The rights are those that a whole life of a service uses, and no others."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from kintsugi_operator.controller.rbac import LEASE_RULES, RULES, PolicyRule, expand_rules
from kintsugi_operator.desired.rollout import RETIRE_AFTER_S
from kintsugi_operator.objects.deployed import EngineRevision
from tests.unit.operator.specs import spec_of
from tests.unit.operator.test_reconcile import OLD, World, run

ROOT = Path(__file__).resolve().parents[3]
UNSEEN = {("kintsugi.dev", "blendservices/finalizers", "update")}
UNSEEN |= {("kintsugi.dev", "corpusprecomputes/finalizers", "update")}
"""Asked by an admission plugin, not by a request."""
WATCHED = {("kintsugi.dev", "blendservices"), ("kintsugi.dev", "corpusprecomputes")}
WATCHED |= {("ray.io", "rayservices"), ("ray.io", "rayjobs")}
ALIKE = {"delete"}
"""Of kinds that are pruned the same way: which of them become superfluous is up to the spec."""


def test_every_right_is_used_and_every_use_is_a_right() -> None:
    world = World()
    world.up(store={"shards": 2})
    world.fill()
    run(world.reconciler.corpus("default", "docs"))
    world.make(model={"path": "/models/other"}, store={"shards": 2, "ramGib": 8}, network={"policies": False})
    world.make(
        model={"path": "/models/other"},
        store={"shards": 2, "ramGib": 8, "insecure": True},
        network={"policies": False},
    )
    world.look()
    new = EngineRevision.of(spec_of(model={"path": "/models/other"})).name
    world.kuberay.serve("acme-store")
    world.kuberay.serve(f"acme-{new}")
    for _ in range(4):
        world.look()
        run(world.reconciler.corpus("default", "docs"))
        for job in world.cluster.named("RayJob"):
            world.kuberay.finish(job)
        world.kuberay.pods("acme-store-c1")
    world.now += timedelta(seconds=RETIRE_AFTER_S + 1)
    world.look()
    assert f"acme-{OLD}" not in world.cluster.named("RayService")
    world.cluster.find("BlendService", "acme")["metadata"]["deletionTimestamp"] = world.now.isoformat()
    world.now += timedelta(hours=1)
    world.look()
    world.look()
    assert world.cluster.named("BlendService") == []

    rights, used = expand_rules(RULES), world.cluster.used
    assert used <= rights
    unused = rights - used - UNSEEN - {(*one, verb) for one in WATCHED for verb in ("list", "watch")}
    assert {verb for _, _, verb in unused} <= ALIKE


def test_the_charts_role_says_the_same() -> None:
    """Read without helm: what varies in the template are names."""
    text = (ROOT / "charts/kintsugi/templates/rbac.yaml").read_text()
    blocks = re.findall(r"^rules:\n(.*?)^---", text, re.S | re.M)
    roles = [
        expand_rules(
            tuple(
                PolicyRule(group, tuple(rule["resources"]), tuple(rule["verbs"]))
                for rule in yaml.safe_load(re.sub(r"\{\{.*?\}\}", "x", block))
                for group in rule["apiGroups"]
            )
        )
        for block in blocks
    ]
    assert roles[0] == expand_rules(RULES)
    lease: Any = expand_rules(LEASE_RULES)
    assert roles[1] == lease
    assert len(roles) == 2
