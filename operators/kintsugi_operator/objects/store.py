"""Objects of the store: one RayService with a worker group per shard, and the shards' volumes.

Nothing here depends on the model, the engines or their image, so a change of these restarts no shard. KubeRay
does not upgrade the store (`upgradeStrategy: None`), because a second cluster would need the same volumes.
The operator upgrades it, one pod at a time (`desired.shards`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kintsugi.core.deploy import SHARD_METRICS_PORT, SHARD_PORT
from kintsugi.core.sizing import RAY_NODE_GIB, shard_memory_gib
from kintsugi_operator.api.blend_service import BlendServiceSpec
from kintsugi_operator.objects.base import (
    RAY_API_VERSION,
    Owner,
    fault_tolerance,
    make_claim,
    make_object,
    ray_cluster,
    ray_service_body,
    worker_group,
)
from kintsugi_operator.objects.deployed import (
    DATA,
    DIRECTORY_PORT,
    SHARD_RESOURCE,
    TIERS,
    head_template,
    pod_basics,
    shard_secrets,
    store_config,
)
from kintsugi_operator.objects.names import (
    ANNOTATION_CLUSTER,
    ANNOTATION_IMAGE,
    digest,
    join_name,
    labels,
    ray_named,
    selector,
)
from kintsugi_operator.objects.pods import (
    Manifest,
    Pod,
    Volume,
    claim_spec,
    claim_volume,
    ephemeral,
    mebibytes,
    process_health,
    spread,
    template,
)

PART = "store"


@dataclass(frozen=True)
class StoreImage:
    """The image of the shards. It changes only with `store.image`, not with the service's image."""

    image: str
    ray_version: str


def choose_store_image(spec: BlendServiceSpec, running: StoreImage | None) -> StoreImage:
    """The shards' image: `store.image`, else the running image, else the service's. The running image stays
    until the RayService is deleted if another one needs a restart of the whole store. `running`: None for a
    store with nothing to lose (`observed.protection`)."""
    if running is None:
        return StoreImage(spec.store.image or spec.image, spec.expert.ray_version)
    is_kept = not spec.store.image or needs_restart(spec, running)
    return running if is_kept else replace(running, image=spec.store.image)


def needs_restart(spec: BlendServiceSpec, running: StoreImage | None) -> bool:
    """Whether `store.image` is a new image with another version of Ray, the service's, than the running
    shards have. A Ray cluster accepts no worker with another version, so it cannot be rolled out shard by
    shard."""
    if running is None or spec.store.image in ("", running.image):
        return False
    return spec.expert.ray_version != running.ray_version


def ray_service_name(name: str) -> str:
    """Name of the store's RayService."""
    return ray_named(name, PART)


def claim_names(spec: BlendServiceSpec, name: str, index: int) -> dict[str, tuple[str, float, str]]:
    """Claim name, GiB and storage class of each of a shard's volumes, by volume name."""
    volumes = spec.store.expert.volumes
    claims = {"data": (join_name(name, "data", str(index)), volumes.data_gib, volumes.storage_class)}
    for tier in spec.store.tiers:
        claims[f"tier-{tier.name}"] = (join_name(name, tier.name, str(index)), tier.gib, tier.storage_class)
    return claims


def store_objects(spec: BlendServiceSpec, owner: Owner, image: StoreImage, groups: int) -> list[Manifest]:
    """The claims, then the RayService. `groups`: the largest number of worker groups so far. Groups without a
    shard stay, with 0 replicas, because KubeRay forgets the pods of a removed group. Raises
    `InvalidField`."""
    objects = []
    if spec.store.expert.volumes.kind == "Persistent":
        for index in range(spec.store.shards):
            for claim, gib, storage_class in claim_names(spec, owner.name, index).values():
                tags = labels(owner.name, part=PART, shard=str(index))
                is_owned = not spec.store.expert.volumes.retain
                objects.append(make_claim(owner, claim, tags, gib, storage_class, is_owned))
    tags = labels(owner.name, part=PART)
    cluster = ray_cluster(
        head_of_store(spec, owner, image),
        [_group(spec, owner, image, index) for index in range(max(groups, spec.store.shards))],
        image.ray_version,
    )
    cluster |= fault_tolerance(spec.expert.redis)
    body = ray_service_body(store_config(spec), "None", cluster)
    name = ray_service_name(owner.name)
    service = make_object(owner, "RayService", name, tags, body, RAY_API_VERSION)
    service["metadata"]["annotations"] = {ANNOTATION_CLUSTER: digest(cluster)}
    return [*objects, service]


def shard_templates(spec: BlendServiceSpec, owner: Owner, image: StoreImage) -> list[Manifest]:
    """Pod templates of the shards, by index."""
    return [_shard(spec, owner, image, index) for index in range(spec.store.shards)]


def head_of_store(spec: BlendServiceSpec, owner: Owner, image: StoreImage) -> Manifest:
    """Pod template of the store's head."""
    ports, tags = {"directory": DIRECTORY_PORT}, labels(owner.name, part=PART)
    return head_template(spec, owner.name, tags, image=image.image, ports=ports)


def _group(spec: BlendServiceSpec, owner: Owner, image: StoreImage, index: int) -> Manifest:
    return worker_group(
        name=f"shard-{index}",
        template=_shard(spec, owner, image, index),
        replicas=int(index < spec.store.shards),
        resources={SHARD_RESOURCE: 1},
        cpus=spec.store.cpus,
        fixed=True,
    )


def _shard(spec: BlendServiceSpec, owner: Owner, image: StoreImage, index: int) -> Manifest:
    tags = labels(owner.name, part=PART, role="shard", shard=str(index))
    return template(
        Pod(
            **{**pod_basics(spec, owner.name, tags), "image": image.image},
            cpus=spec.store.cpus,
            memory=mebibytes(_memory_gib(spec)),
            annotations={ANNOTATION_IMAGE: f"{image.ray_version} {image.image}"},
            ports={"shard": SHARD_PORT, "shard-metrics": SHARD_METRICS_PORT},
            volumes=[*_volumes(spec, owner, index), *shard_secrets(spec)],
            readiness=process_health("shard-metrics"),
            affinity=spread(
                selector(owner.name, role="shard"), apart_from=selector(owner.name, role="engine")
            ),
            more=spec.pod_template("store"),
        )
    )


def _memory_gib(spec: BlendServiceSpec) -> float:
    """Memory of a shard's pod with full tiers."""
    store, has_bucket = spec.store, bool(spec.store.bucket_url)
    lower_gib = sum(tier.gib for tier in store.tiers) + store.bucket_gib * has_bucket
    return RAY_NODE_GIB + shard_memory_gib(store.ram_gib, lower_gib, has_bucket)


def _volumes(spec: BlendServiceSpec, owner: Owner, index: int) -> list[Volume]:
    volumes = []
    for volume, (claim, gib, storage_class) in claim_names(spec, owner.name, index).items():
        path = DATA if volume == "data" else f"{TIERS}/{volume.removeprefix('tier-')}"
        if spec.store.expert.volumes.kind == "Persistent":
            volumes.append(claim_volume(volume, path, claim))
        else:
            volumes.append(ephemeral(volume, path, claim_spec(gib, storage_class)))
    return volumes
