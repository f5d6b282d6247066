"""`kintsugi serve`: runs shards, engines and a gateway on this machine until interrupted."""

from __future__ import annotations

import dataclasses
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from kintsugi.cli.exits import ExitCode
from kintsugi.cli.machine import find_shortage
from kintsugi.cli.models import choose_model, prepare_model
from kintsugi.cli.options import ServeTask, read_yaml
from kintsugi.cli.screen import Screen
from kintsugi.core.deploy import (
    ModelSpec,
    ServiceSpec,
    StoreSpec,
    TierSpec,
    directory_url,
    serve_config,
    spec_from_yaml_mapping,
)
from kintsugi.core.errors import InvalidField, KintsugiError, NotFound, Unavailable
from kintsugi.core.exchange import EngineInfo
from kintsugi.core.namespaces import EVERY_NAMESPACE, NamespacePrivacy, check_namespace_pattern
from kintsugi.gateway.access import add_grant, check_exposure, new_token
from kintsugi.gateway.addresses import format_address, free_port
from kintsugi.gateway.console import CONSOLE_PATH
from kintsugi.gateway.fronts.grpc_server import load_gateway_tls
from kintsugi.models.reference import REFERENCE
from kintsugi.serving.deployment import DeploymentProgress, Service, start_ray
from kintsugi.store.client.key_file import KeyFile
from kintsugi.store.protocol.access import Verb, open_access
from kintsugi.store.shard.opening import SsdSpec, parse_size

START_TIMEOUT_S = 900.0
"""Time for a service to become ready; a large model takes minutes to load."""
POLL_S = 0.5
INFO_PERIOD_S = 5.0
GIB = 1 << 30
DIRECTORY_PORTS = 16

T = TypeVar("T")


def build_service_spec(task: ServeTask) -> ServiceSpec:
    """Build the service that the options describe. Without a model in them, it serves the reference model.
    Raises `InvalidField`, `UnknownField` and `NotFound`."""
    if task.config is not None:
        spec = spec_from_yaml_mapping(read_yaml(task.config))
        model = spec.model if task.model is None else dataclasses.replace(spec.model, path=task.model)
    else:
        model = ModelSpec(task.model or REFERENCE.name)
        spec = ServiceSpec(model)
    if model.path.startswith((".", "/")) and not Path(model.path).is_dir():
        raise NotFound(f"{model.path} is not a folder; name the folder of a checkpoint")
    quality = None if task.quality is None else task.quality.value
    engines = _replace_given(spec.engines, replicas=task.engines, quality=quality)
    if task.engines is not None:
        engines = dataclasses.replace(engines, replicas_max=None)
    gateway = _replace_given(
        spec.gateway,
        grpc_port=task.grpc_port,
        http_port=task.http_port,
        insecure=task.insecure or None,
        **{
            name: str(path.resolve())
            for name in ("tokens_file", "tls_cert", "tls_key")
            if (path := getattr(task, name)) is not None
        },
    )
    return dataclasses.replace(
        spec,
        model=model,
        engines=engines,
        store=_store(spec.store, task),
        gateway=gateway,
        privacy=_privacy(spec, task.discover or []),
    )


def _replace_given(settings: T, **options: Any) -> T:
    """Apply the options that are not None."""
    given = {name: value for name, value in options.items() if value is not None}
    return cast("T", dataclasses.replace(cast("Any", settings), **given))


def _store(store: StoreSpec, task: ServeTask) -> StoreSpec:
    """Apply the options of the store. Without a data folder, shards store their identities on the first SSD
    tier."""
    store = _replace_given(store, shards=task.shards)
    if task.ram is not None:
        store = dataclasses.replace(store, ram_gib=parse_size(task.ram) / GIB)
    if not task.ssd:
        return store
    ssds = [SsdSpec.from_text(text) for text in task.ssd]
    tiers = tuple(TierSpec(str(one.path.resolve()), one.capacity_bytes / GIB) for one in ssds)
    return dataclasses.replace(store, tiers=tiers, data_dir=store.data_dir or f"{tiers[0].path}/shards")


def _privacy(spec: ServiceSpec, discovering: Sequence[str]) -> dict[str, NamespacePrivacy]:
    """Return the privacy rules, with discovery for the namespaces in ``discovering``. A new rule copies the
    rule that applied before, because only the most specific rule applies."""
    rules = {
        check_namespace_pattern(name, "discover"): dataclasses.replace(
            spec.rules.privacy_of(name), discover=True
        )
        for name in discovering
    }
    return {**spec.privacy, **rules}


def run(screen: Screen, task: ServeTask) -> ExitCode:
    """Serve until SIGINT or SIGTERM. Running answers then have `DRAIN_S` to finish."""
    if not (task.model or task.config or task.print_config):
        task = dataclasses.replace(task, model=choose_model(screen))
    spec = build_service_spec(task)
    if task.print_config:
        import yaml

        config = serve_config(spec)
        text = yaml.safe_dump(config, sort_keys=False)
        screen.show(config, text.rstrip())
        return ExitCode.OK
    return serve(screen, spec)


def serve(
    screen: Screen, spec: ServiceSpec, on_ready: Callable[[str], None] = lambda console_url: None
) -> ExitCode:
    """Serve until SIGINT or SIGTERM. Calls ``on_ready`` with the console's URL."""
    _check_here(spec)
    prepare_model(screen, spec.model.path)
    if shortage := find_shortage(spec):
        screen.note(f"memory is short: {shortage}")
    spec = _with_free_ports(spec)
    stop = threading.Event()
    with protect_store(spec) as spec, _run_service(screen, spec, stop) as service:
        if stop.is_set():
            return ExitCode.OK
        on_ready(_report_ready(screen, service))
        monitor = ServiceMonitor(service, screen)
        while not stop.wait(POLL_S):
            monitor.poll()
    screen.show_event("stopped", "stopped")
    return ExitCode.OK


def _check_here(spec: ServiceSpec) -> None:
    """Check ports, files and exposure before Serve starts the gateway. Raises `InvalidField`.

    A configuration that is only printed is not checked: it may be for another machine.
    """
    gateway = spec.gateway
    if gateway.replicas > 1:
        raise InvalidField(
            "gateway.replicas",
            f"each of {gateway.replicas} gateways needs a node of its own; set it to 1, or deploy the output "
            "of --print-config on a Ray cluster",
        )
    open_access(gateway.tokens_file)
    open_access(spec.store.expert.tokens_file)
    if spec.store.expert.keys_file:
        KeyFile(Path(spec.store.expert.keys_file))
    files = load_gateway_tls(gateway)
    if files is not None:
        files.read()
    for port in (gateway.grpc_port, gateway.http_port):
        listen = format_address(gateway.host, port)
        check_exposure(listen, bool(gateway.tokens_file), files is not None, gateway.insecure)


@contextmanager
def protect_store(spec: ServiceSpec) -> Iterator[ServiceSpec]:
    """Make shards require a token if the gateway requires tokens, because every user of this machine can
    connect to their ports. The token is made for this run, and only this user can read its file."""
    if not spec.gateway.tokens_file or spec.store.expert.tokens_file or spec.store.tls_ca:
        yield spec
        return
    with tempfile.TemporaryDirectory(prefix="kintsugi-store-") as folder:
        tokens_file, token_file = Path(folder) / "tokens.json", Path(folder) / "token"
        token, grant = new_token("service", [EVERY_NAMESPACE], list(Verb))
        add_grant(tokens_file, grant)
        token_file.touch(mode=0o600)
        token_file.write_text(token)
        yield _with_store_expert(spec, tokens_file=str(tokens_file), token_file=str(token_file))


def _with_store_expert(spec: ServiceSpec, **changes: Any) -> ServiceSpec:
    expert = dataclasses.replace(spec.store.expert, **changes)
    return dataclasses.replace(spec, store=dataclasses.replace(spec.store, expert=expert))


def _with_free_ports(spec: ServiceSpec) -> ServiceSpec:
    """Choose a free port for the directory. Raises `Unavailable` if a port of the gateway is taken."""
    gateway, expert = spec.gateway, spec.store.expert
    for option, port in (("--grpc-port", gateway.grpc_port), ("--http-port", gateway.http_port)):
        try:
            if port:
                free_port(gateway.host, port, 1)
        except Unavailable as error:
            raise Unavailable(
                f"{error}; use {option} 0, or see whether kintsugi status finds a service"
            ) from error
    directory = free_port(expert.host, expert.directory_port, DIRECTORY_PORTS)
    return _with_store_expert(spec, directory_port=directory)


def _listen_for_signals(stop: threading.Event) -> None:
    """Set the event on SIGTERM and SIGINT. Must be called after Ray has installed its own handlers."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


@contextmanager
def _run_service(screen: Screen, spec: ServiceSpec, stop: threading.Event) -> Iterator[Service]:
    """Start Ray and the service, and stop both at the end."""
    try:
        with screen.engine_log():
            with screen.step("Starting Ray"):
                start_ray(spec)
            _listen_for_signals(stop)
            service = Service(spec)
            with screen.step("Starting shards, engines and the gateway") as say:
                service.deploy()
                service.wait(START_TIMEOUT_S, lambda found: say(describe_progress(found)), stop.is_set)
        yield service
    except BaseException:
        with suppress(KintsugiError):  # report the original error, not a failure to stop
            _stop_service(screen, spec)
        raise
    _stop_service(screen, spec)


def _stop_service(screen: Screen, spec: ServiceSpec) -> None:
    import ray

    if ray.is_initialized():
        with screen.engine_log(), screen.step("Stopping: waiting for answers and for shards to write back"):
            try:
                Service(spec).stop()
            finally:
                ray.shutdown()


def describe_progress(found: Sequence[DeploymentProgress]) -> str:
    """Format progress as `StoreShard 1 of 1, Engine 0 of 1`."""
    return (
        ", ".join(f"{one.deployment} {one.running} of {one.wanted}" for one in found) or "waiting for Serve"
    )


def _report_ready(screen: Screen, service: Service) -> str:
    """Print the addresses of a service that is ready. Returns the console's URL."""
    addresses, info = service.addresses(), service.info()
    scheme = "https" if service.spec.gateway.tls_cert else "http"
    details = {
        "model": info.model,
        "http": f"{scheme}://{addresses['http']}",
        "console": f"{scheme}://{addresses['http']}{CONSOLE_PATH}",
        "grpc": addresses["grpc"],
        "store": directory_url(service.spec.store),
        "blending": info.blending,
        "fingerprint": info.fingerprint,
    }
    text = (
        "serving {model}\n  OpenAI   {http}/v1\n  gRPC     {grpc}\n  console  {console}\n  store    {store}\n"
        "  blending {blending}"
    )
    screen.show_event("ready", text.format(**details), **details)
    return details["console"]


PAIRS_SHOWN = 10
"""Number of measured prompts between two reports."""
LOST_PERIOD_S = 1.0
INFO_TIMEOUT_S = 2.0
"""Short, so that a lost process is reported within 5 s even if no engine answers."""


class ServiceMonitor:
    """Watches a running service, and reports changes."""

    def __init__(self, service: Service, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._screen = screen
        self._clock = clock
        self._polled_s = self._looked_s = float("-inf")
        self._said: tuple[Any, ...] | None = None
        self._unhealthy: dict[str, str] = {}
        self._silence = ""

    def poll(self) -> None:
        """Look for lost processes every `LOST_PERIOD_S`, and check the replicas and the engine every
        `INFO_PERIOD_S`."""
        self._report_losses()
        if self._clock() - self._polled_s < INFO_PERIOD_S:
            return
        self._polled_s = self._clock()
        try:
            self._poll_replicas()
            info = self._service.info(INFO_TIMEOUT_S)
        except Unavailable as error:
            if str(error) != self._silence:
                self._silence = str(error)
                self._screen.show_event("engine", str(error), error=str(error))
            return
        self._silence = ""
        self._check_blending(info)

    def _report_losses(self) -> None:
        if self._clock() - self._looked_s < LOST_PERIOD_S:
            return
        self._looked_s = self._clock()
        with suppress(Unavailable):  # the next poll tries again; `_poll_replicas` reports it
            for lost in self._service.lost.find_new():
                self._screen.show_event("lost", str(lost), **dataclasses.asdict(lost))

    def _poll_replicas(self) -> None:
        for one in self._service.progress():
            state = "" if one.is_ready else one.status
            if state != self._unhealthy.get(one.deployment, ""):
                text = f"{one.deployment}: {one.running} of {one.wanted} running ({one.status})"
                self._screen.show_event(
                    "replicas",
                    text,
                    deployment=one.deployment,
                    running=one.running,
                    wanted=one.wanted,
                    status=one.status,
                )
            self._unhealthy[one.deployment] = state

    def _check_blending(self, info: EngineInfo) -> None:
        """Report which blends the evidence permits, when this changes and every `PAIRS_SHOWN` prompts."""
        progress = info.progress
        said = progress.state, progress.cost, progress.pairs // PAIRS_SHOWN
        if said != self._said and self._said is not None:
            text = f"blending: {progress.state}: {progress.detail}"
            self._screen.show_event("blending", text, **dataclasses.asdict(progress))
        self._said = said
