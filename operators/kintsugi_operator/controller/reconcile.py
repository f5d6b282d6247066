"""Observe, decide, apply the difference: the I/O around the pure functions of `desired`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from kintsugi.core.deploy import ENGINE_METRICS_PORT
from kintsugi.core.errors import InvalidField
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.api.corpus_precompute import CorpusPrecomputeSpec
from kintsugi_operator.api.manifest import from_live_spec, status_of, to_manifest
from kintsugi_operator.api.status import BlendServiceStatus, Condition, CorpusPrecomputeStatus, OperatorStatus
from kintsugi_operator.controller.cluster import (
    BLEND_SERVICE,
    BY_KIND,
    CLAIM,
    CORPUS_PRECOMPUTE,
    OWNED,
    POD,
    RAY_CLUSTER,
    RAY_CRON_JOB,
    RAY_JOB,
    RAY_SERVICE,
    ApiServer,
    Refused,
    Resource,
)
from kintsugi_operator.controller.events import EventRecorder
from kintsugi_operator.controller.finalizer import is_held, set_finalizer
from kintsugi_operator.controller.metrics import OperatorMetrics
from kintsugi_operator.controller.owners import Owners
from kintsugi_operator.controller.queue import ObjectKey
from kintsugi_operator.controller.scrape import Web
from kintsugi_operator.desired.claims import fit_claim
from kintsugi_operator.desired.compare import drift, needs_write
from kintsugi_operator.desired.corpus import CorpusObserved, Target, figures_in, plan_corpus
from kintsugi_operator.desired.plan import Desired, plan_service
from kintsugi_operator.desired.teardown import DRAIN_S_MAX, must_drain, next_teardown
from kintsugi_operator.desired.validation import check_corpus, check_service
from kintsugi_operator.objects.base import Owner
from kintsugi_operator.objects.deployed import EngineRevision
from kintsugi_operator.objects.jobs import CORPUS
from kintsugi_operator.objects.names import (
    ANNOTATION_CLUSTER,
    LABEL_CORPUS,
    LABEL_PART,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_SERVICE,
    join_name,
    selector,
)
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.objects.store import PART as STORE
from kintsugi_operator.objects.store import ray_service_name
from kintsugi_operator.observed import conditions as c
from kintsugi_operator.observed.blending import describe_blending
from kintsugi_operator.observed.changes import Change, list_changes
from kintsugi_operator.observed.refusals import join_problems, list_refusals
from kintsugi_operator.observed.views import (
    CorpusView,
    JobView,
    Observed,
    corpus_view,
    digest_of,
    is_leaving,
    is_pod_ready,
    job_view,
    label_of,
    ray_service_view,
    revision_of,
    store_pod,
)

logger = logging.getLogger(__name__)
Problem = InvalidField | Refused
S = TypeVar("S", BlendServiceStatus, CorpusPrecomputeStatus)

SOON_S = 10.0
"""Seconds until the next call while a change is in progress."""
LATER_S = 60.0
"""Seconds until the next call while no change is in progress. Watches report changes at once; this call
handles changes that only time causes, such as a schedule."""
CONTESTED_S = 30.0
"""Seconds until the next call for a service that another operator owns."""
UNENFORCEABLE_MAX = 10_000
STORE_ROLES = ("shard", "head")


class Reads(Protocol):
    """The reading methods of `ApiServer`, which may answer from a cache."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None: ...

    async def list(
        self, resource: Resource, namespace: str, labels: Mapping[str, str]
    ) -> Sequence[Manifest]: ...

    def serves(self, resource: Resource) -> bool: ...


class Reconciler:
    """Brings one object after another to its desired state. Has no state that must survive a restart."""

    def __init__(
        self,
        cluster: ApiServer,
        reads: Reads,
        web: Web,
        clock: Callable[[], datetime],
        me: OperatorStatus,
        metrics: OperatorMetrics,
        home: str = "",
    ) -> None:
        """`reads` answers without a request, and is used by every reconciliation. `cluster` takes the writes,
        and the reads before a decision that cannot be undone. `me`: the owner of the reconciled objects.
        `home`: the namespace of the operator's own pods."""
        self._events = EventRecorder(cluster, clock)
        self._metrics = metrics
        self._owners = Owners(cluster, me, lambda: clock().timestamp())
        self._cluster = cluster
        self._reads = reads
        self._web = web
        self._clock = clock
        self._home = home
        self._unenforceable: dict[tuple[str, str, str], str] = {}
        """Digest of each manifest that the API server stored differently: applying it again would not
        help."""

    async def service(self, namespace: str, name: str) -> float | None:
        """Reconcile a BlendService. Returns the seconds until the next call; None if the object is gone."""
        live = await self._reads.get(BLEND_SERVICE, namespace, name)
        if live is None:
            return None
        owner, before = _owner(live), status_of(BlendServiceStatus, live)
        if not await self._owners.is_mine(before.operator):
            # The owner exports the service's metrics: the last state that this operator saw must not raise
            # alerts.
            self._metrics.forget(ObjectKey.of(live))
            return CONTESTED_S
        if before.operator != self._owners.me:
            before = replace(before, operator=self._owners.me)
            live = await self._cluster.apply_status(live, to_manifest(before))
        if is_leaving(live):
            return await self._teardown(live, owner, before)
        try:
            spec = _service_spec_of(live)
        except InvalidField as error:
            return await self._report_invalid(live, before, error)
        owned = await self._list(OWNED, namespace, selector(name))
        pods = await self._reads.list(POD, namespace, selector(name))
        ray = [one for one in owned if one["kind"] in (RAY_SERVICE.kind, RAY_JOB.kind)]
        if must_drain(ray, pods):
            live = await set_finalizer(self._cluster, live, True)
        observed = await self._observe(owner, owned, pods)
        result = plan_service(spec, owner, before, observed, self._clock())
        if not observed.is_kuberay_installed:
            # Keep the state from which to continue when KubeRay is back.
            kept = {name: getattr(before, name) for name in ("rollout", "shard_groups", "store_image")}
            await self._write_status(live, before, replace(result.status, **kept))
            return SOON_S

        async def act() -> tuple[Problem, ...]:
            mine = [one for one in owned if not label_of(one, LABEL_CORPUS)]
            problems = await self._apply(result.objects, mine)
            # A refused object may need the quota that pruning frees.
            await self._prune(owner, result.objects, mine)
            await self._upgrade(namespace, result)
            return problems

        status, is_in_progress = result.status, any(map(c.is_false, result.status.conditions))
        blending = None if is_in_progress else await self._blending(pods)
        if blending is not None:
            status = replace(status, conditions=(*status.conditions, blending))
        # The observation precedes the change of a RayService, so it does not describe this spec yet.
        is_current = not self._changes_any(result.objects, ray)
        is_done = await self._act_and_report(act(), live, before, status, status, is_current)
        return LATER_S if is_done and is_current and not is_in_progress else SOON_S

    async def corpus(self, namespace: str, name: str) -> float | None:
        """Reconcile a CorpusPrecompute. Returns as `service` does. Without a drain, it needs no finalizer."""
        live = await self._reads.get(CORPUS_PRECOMPUTE, namespace, name)
        if live is None or is_leaving(live):
            return None
        service = await self._reads.get(BLEND_SERVICE, namespace, str(live["spec"].get("service") or ""))
        # The owner of the service also owns its corpora.
        if service is not None and not await self._owners.is_mine(
            status_of(BlendServiceStatus, service).operator
        ):
            self._metrics.forget(ObjectKey.of(live))
            return CONTESTED_S
        owner, before = _owner(live), status_of(CorpusPrecomputeStatus, live)
        try:
            spec = from_live_spec(CorpusPrecomputeSpec, live)
            check_corpus(spec)
        except InvalidField as error:
            return await self._report_invalid(live, before, error)
        tags = {LABEL_CORPUS: name}
        owned = await self._list((CLAIM, RAY_JOB), namespace, tags)
        jobs = {one["metadata"]["name"]: job_view(one) for one in owned if one["kind"] == RAY_JOB.kind}
        target = await self._target(service)
        report = await self._report(jobs.get(before.job))
        pods = await self._reads.list(POD, namespace, tags)
        clusters = await self._reads.list(RAY_CLUSTER, namespace, tags)
        failure = list_refusals(pods, (), clusters, (), self._clock()).get(CORPUS)
        observed = CorpusObserved(target, jobs, report, failure)
        result = plan_corpus(spec, owner, before, observed, self._clock())

        async def act() -> tuple[Problem, ...]:
            problems = await self._apply(result.objects, owned)
            for job in result.superfluous:
                await self._cluster.delete(RAY_JOB, namespace, job)
            return problems

        refused = replace(before, conditions=(c.true(c.VALID, "Accepted"),))
        is_done = await self._act_and_report(act(), live, before, result.status, refused)
        is_at_rest = result.status.phase in ("Succeeded", "Failed", "Suspended")
        return LATER_S if is_done and is_at_rest else SOON_S

    async def _report_invalid(self, live: Manifest, before: S, error: InvalidField) -> float:
        message = f"{error}. Whatever runs continues unchanged"
        refused = [c.false(type_, "InvalidSpec", message) for type_ in (c.VALID, c.READY)]
        await self._write_status(live, before, before, refused)
        return LATER_S

    async def _act_and_report(
        self,
        acting: Awaitable[tuple[Problem, ...]],
        live: Manifest,
        before: S,
        done: S,
        refused: S,
        is_current: bool = True,
    ) -> bool:
        """Act, then write the status `done`, or `refused` after a refusal. Returns whether all was
        applied."""
        try:
            problems = await acting
        except (InvalidField, Refused) as error:
            problems = (error,)
        outcome = c.true(c.RECONCILED, "Applied")
        if problems:
            told = join_problems(problems)
            done, outcome = refused, c.false(c.RECONCILED, told.reason, told.message)
        await self._write_status(live, before, done, (*done.conditions, outcome), is_current)
        return outcome.status == "True"

    async def _teardown(self, live: Manifest, owner: Owner, before: BlendServiceStatus) -> float | None:
        if not is_held(live):
            return None
        if await self._cluster.is_terminating(owner.namespace):
            logger.info("%s/%s is not drained: its namespace is being deleted", owner.namespace, owner.name)
            await set_finalizer(self._cluster, live, False)
            return None
        since = datetime.fromisoformat(live["metadata"]["deletionTimestamp"])
        age_s = (self._clock() - since).total_seconds()
        step = next_teardown(*await self._remaining(self._reads, owner), age_s)
        if step.is_done:
            # The finalizer is removed next, so this decision needs reads that are not stale.
            step = next_teardown(*await self._remaining(self._cluster, owner), age_s)
        for one in step.delete:
            await self._cluster.delete(BY_KIND[one["kind"]], owner.namespace, one["metadata"]["name"])
        if step.is_done:
            await set_finalizer(self._cluster, live, False)
            drained = Change("Drained", "engines have finished their requests and shards have written back")
            timed_out = Change("DrainTimedOut", f"it did not drain within {DRAIN_S_MAX:.0f} s", True)
            await self._events.record(live, [timed_out if step.delete else drained])
            return None
        await self._write_status(live, before, before, [c.false(c.READY, "Draining", step.message)])
        return SOON_S

    async def _remaining(
        self, reads: Reads | ApiServer, owner: Owner
    ) -> tuple[Sequence[Manifest], Sequence[Manifest]]:
        """The service's RayServices and RayJobs, and its pods."""
        tags = selector(owner.name)
        ray = [await reads.list(one, owner.namespace, tags) for one in (RAY_SERVICE, RAY_JOB)]
        return [*ray[0], *ray[1]], await reads.list(POD, owner.namespace, tags)

    async def _list(
        self, resources: Iterable[Resource], namespace: str, tags: dict[str, str]
    ) -> list[Manifest]:
        """Objects of these kinds with the labels."""
        lists = await asyncio.gather(*(self._reads.list(one, namespace, tags) for one in resources))
        return [one for found in lists for one in found]

    async def _observe(self, owner: Owner, owned: Sequence[Manifest], pods: Sequence[Manifest]) -> Observed:
        now = self._clock()
        store_pods = [one for one in pods if label_of(one, LABEL_PART) == STORE]
        engines, gateways = (
            [one for one in pods if label_of(one, LABEL_ROLE) == role and not is_leaving(one)]
            for role in ("engine", "gateway")
        )
        services = {label_of(one, LABEL_REVISION): one for one in owned if one["kind"] == RAY_SERVICE.kind}
        everything = dict(services)
        claims = [one for one in owned if one["kind"] == CLAIM.kind and not label_of(one, LABEL_CORPUS)]
        clusters = await self._reads.list(RAY_CLUSTER, owner.namespace, selector(owner.name))
        store = services.pop("", None)
        view = ray_service_view(store, now) if store is not None else None
        cluster_digest = ""
        if view is not None and view.cluster:
            cluster = await self._reads.get(RAY_CLUSTER, owner.namespace, view.cluster)
            cluster_digest = digest_of(cluster, ANNOTATION_CLUSTER) if cluster is not None else ""
        revisions = [revision_of(one) for one in owned if one["kind"] == "ConfigMap"]
        grpc = ("Service", join_name(owner.name, "grpc"))
        (front,) = [one for one in owned if (one["kind"], one["metadata"]["name"]) == grpc] or [{}]
        return Observed(
            is_kuberay_installed=all(map(self._reads.serves, (RAY_SERVICE, RAY_JOB, RAY_CLUSTER))),
            is_kuberay_recent=self._reads.serves(RAY_CRON_JOB),
            store=view,
            cluster_digest=cluster_digest,
            pods=tuple(store_pod(one, now) for one in store_pods if label_of(one, LABEL_ROLE) in STORE_ROLES),
            services={revision: ray_service_view(one, now) for revision, one in services.items()},
            engines=_count_by_revision(engines),
            engines_ready=_count_by_revision(filter(is_pod_ready, engines)),
            gateways_ready=_count_by_revision(filter(is_pod_ready, gateways)),
            refusals=list_refusals(pods, claims, clusters, list(everything.values()), now),
            revisions=dict(one for one in revisions if one is not None),
            selected=(front.get("spec", {}).get("selector") or {}).get(LABEL_REVISION, ""),
            corpora=await self._corpora(owner),
            home=self._home,
        )

    async def _corpora(self, owner: Owner) -> tuple[CorpusView, ...]:
        found = await self._reads.list(CORPUS_PRECOMPUTE, owner.namespace, {})
        return tuple(
            corpus_view(one)
            for one in found
            if one["spec"].get("service") == owner.name and not is_leaving(one)
        )

    async def _target(self, service: Manifest | None) -> Target | None:
        """The service of a corpus, with the revision that its spec requests; None without a valid service."""
        if service is None or is_leaving(service):
            return None
        try:
            spec = _service_spec_of(service)
        except InvalidField:
            return None
        metadata = service["metadata"]
        name = ray_service_name(metadata["name"])
        store = await self._reads.get(RAY_SERVICE, metadata["namespace"], name)
        is_ready = store is not None and ray_service_view(store, self._clock()).is_ready
        return Target(spec, EngineRevision.of(spec), is_ready)

    async def _report(self, job: JobView | None) -> Mapping[str, Any]:
        """The report in a corpus job's log; empty without one."""
        if job is None or not (job.dashboard and job.job_id):
            return {}
        host = job.dashboard.removeprefix("http://")
        return figures_in(await self._web.fetch(f"http://{host}/api/jobs/{job.job_id}/logs"))

    async def _blending(self, pods: Sequence[Manifest]) -> Condition | None:
        """Whether the service blends, as one of its engines reports; None if none reports it. All engines
        follow one report."""
        engines = [one for one in pods if label_of(one, LABEL_ROLE) == "engine" and is_pod_ready(one)]
        address = next((one["status"]["podIP"] for one in engines if one["status"].get("podIP")), "")
        if not address:
            return None
        host = f"[{address}]" if ":" in address else address
        return describe_blending(await self._web.fetch(f"http://{host}:{ENGINE_METRICS_PORT}/metrics"))

    async def _apply(self, wanted: Iterable[Manifest], live: Sequence[Manifest]) -> tuple[Problem, ...]:
        """Apply the objects that differ, in order: claims before the pods that mount them. Returns what was
        refused; one refusal stops no other object."""
        by_name = {(one["kind"], one["metadata"]["name"]): one for one in live}
        problems = []
        for one in wanted:
            try:
                await self._apply_one(one, by_name.get((one["kind"], one["metadata"]["name"])))
            except (InvalidField, Refused) as error:
                problems.append(error)
        return tuple(problems)

    async def _apply_one(self, one: Manifest, found: Manifest | None) -> None:
        metadata = one["metadata"]
        key = (one["kind"], metadata["namespace"], metadata["name"])
        if found is not None and one["kind"] == CLAIM.kind:
            step = fit_claim(one, found)
            one = step.manifest
            if step.kept:
                raise InvalidField("spec.store", step.kept)
            if step.must_replace:
                # The next reconciliation creates it, once no pod waits for it.
                await self._cluster.delete(CLAIM, metadata["namespace"], metadata["name"])
                return
        if not self._must_write(one, found):
            return
        if found is None:
            await self._check_unowned(one)
        applied = await self._cluster.apply(one)
        logger.info("applied %s %s/%s", *key)
        if (path := drift(one, applied)) is not None:
            if len(self._unenforceable) >= UNENFORCEABLE_MAX:
                self._unenforceable.clear()
            self._unenforceable[key] = digest_of(one)
            logger.warning("%s %s/%s: something else keeps changing %s, so it stays as it is", *key, path)

    def _must_write(self, one: Manifest, found: Manifest | None) -> bool:
        """Whether applying an object would change what the API server has."""
        metadata = one["metadata"]
        stored = self._unenforceable.get((one["kind"], metadata["namespace"], metadata["name"]))
        is_in_vain = found is not None and stored == digest_of(one) == digest_of(found)
        return not is_in_vain and needs_write(one, found)

    def _changes_any(self, wanted: Iterable[Manifest], live: Iterable[Manifest]) -> bool:
        """Whether one of these live objects is about to be changed."""
        by_name = {(one["kind"], one["metadata"]["name"]): one for one in live}
        pairs = ((one, by_name.get((one["kind"], one["metadata"]["name"]))) for one in wanted)
        return any(self._must_write(one, found) for one, found in pairs if found is not None)

    async def _check_unowned(self, wanted: Manifest) -> None:
        """Raise `InvalidField` if an object of this name exists and does not belong to this service."""
        metadata = wanted["metadata"]
        there = await self._cluster.get(BY_KIND[wanted["kind"]], metadata["namespace"], metadata["name"])
        if there is not None and label_of(there, LABEL_SERVICE) != metadata["labels"][LABEL_SERVICE]:
            raise InvalidField(
                "metadata.name",
                f"{wanted['kind']} {metadata['name']} exists and does not belong to this service: choose "
                "another name, or delete it",
            )

    async def _prune(self, owner: Owner, wanted: Sequence[Manifest], live: Sequence[Manifest]) -> None:
        """Delete objects that the service owns and no longer needs, such as network policies and retired
        revisions. Never deletes a claim, which may hold chunks, nor an object that KubeRay created."""
        kept = {(one["kind"], one["metadata"]["name"]) for one in wanted}
        for one in live:
            owners = [ref.get("uid") for ref in one["metadata"].get("ownerReferences", [])]
            is_kept = (one["kind"], one["metadata"]["name"]) in kept or one["kind"] == CLAIM.kind
            if is_kept or owner.uid not in owners or is_leaving(one):
                continue
            await self._cluster.delete(BY_KIND[one["kind"]], owner.namespace, one["metadata"]["name"])
            logger.info("deleted %s %s/%s", one["kind"], owner.namespace, one["metadata"]["name"])

    async def _upgrade(self, namespace: str, result: Desired) -> None:
        """Update the RayCluster, or else evict pods, which KubeRay recreates from the new templates."""
        if result.cluster_patch is not None:
            patch = result.cluster_patch
            live = await self._cluster.get(RAY_CLUSTER, namespace, patch.cluster) or {}
            await self._cluster.merge(RAY_CLUSTER, namespace, patch.cluster, patch.over(live))
            logger.info("updated RayCluster %s/%s", namespace, patch.cluster)
            return
        for pod in result.shard_step.pods:
            is_evicted = await self._cluster.evict(namespace, pod)
            outcome = "evicted" if is_evicted else "a disruption budget forbids the eviction of"
            logger.info("%s %s/%s", outcome, namespace, pod)

    async def _write_status(
        self,
        live: Manifest,
        before: S,
        after: S,
        conditions: Sequence[Condition] | None = None,
        is_current: bool = True,
    ) -> None:
        """Write the status if it has changed, and an Event for each change. Without `is_current`, its
        generation stays that of the earlier spec. Raises `Refused` if the object has changed
        since it was read."""
        generation = int(live["metadata"].get("generation", 0)) if is_current else before.observed_generation
        now = self._clock()
        given = conditions or after.conditions
        merged = c.merge_conditions(before.conditions, given, generation, now)
        self._metrics.see(ObjectKey.of(live), merged)
        written = replace(after, observed_generation=generation, conditions=merged)
        if written == before:
            return
        await self._cluster.apply_status(live, to_manifest(written))
        await self._events.record(live, list_changes(before, written))


def utc_now() -> datetime:
    """The time now, in UTC."""
    return datetime.now(UTC)


def _count_by_revision(pods: Iterable[Manifest]) -> Counter[str]:
    return Counter(label_of(one, LABEL_REVISION) for one in pods)


def _owner(live: Manifest) -> Owner:
    metadata = live["metadata"]
    return Owner(live["kind"], metadata["name"], metadata["namespace"], metadata["uid"])


def _service_spec_of(live: Manifest) -> BlendServiceSpec:
    """The spec of a BlendService. Raises `InvalidField` for a spec that could not run."""
    spec = from_live_spec(BlendServiceSpec, live)
    check_service(spec)
    return spec
