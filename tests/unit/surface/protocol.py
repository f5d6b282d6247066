"""What travels: gRPC messages and services, HTTP routes, the keys of requests and responses."""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest.mock import Mock

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from starlette.routing import Route

import kintsugi.rpc
from kintsugi.core.accounting import Accounting, LayerTiming, Outcome
from kintsugi.core.namespaces import NAMESPACE_HEADER
from kintsugi.core.request import PARAMS_KEY, PARAMS_VERSION, KintsugiParams, Op, SelectorName
from kintsugi.engine.config import EngineConfig
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_request import DOCUMENT_TEXT_KEYS
from kintsugi.sdk.transport import SERVICE as GATEWAY_SERVICE
from kintsugi.store.client.directory import DIRECTORY_SERVICE
from kintsugi.store.protocol.grpc_status import ERROR_METADATA
from kintsugi.store.protocol.wire import PROTOCOL_METADATA, PROTOCOL_VERSION
from kintsugi.store.protocol.wire import SERVICE as STORE_SERVICE
from kintsugi_operator.controller.metrics import OperatorMetrics
from tests.unit.surface.python_api import fields_of


def messages_and_services() -> dict[str, Any]:
    """By proto package: messages, enums and services."""
    packages: dict[str, dict[str, Any]] = {}
    for file in _proto_files():
        package = packages.setdefault(file.package, {"messages": {}, "enums": {}, "services": {}})
        for message in file.message_type:
            package["messages"].update(_message(message, ""))
        for enum in file.enum_type:
            package["enums"][enum.name] = _enum(enum)
        for service in file.service:
            package["services"][service.name] = {
                method.name: f"({_streamed(method.client_streaming)}{method.input_type})"
                f" -> {_streamed(method.server_streaming)}{method.output_type}"
                for method in service.method
            }
    return packages


def _proto_files() -> Iterator[FileDescriptorProto]:
    names = [found.name for found in pkgutil.walk_packages(kintsugi.rpc.__path__, "kintsugi.rpc.")]
    for name in sorted(name for name in names if name.endswith("_pb2")):
        file = FileDescriptorProto()
        import_module(name).DESCRIPTOR.CopyToProto(file)
        yield file


def _message(message: DescriptorProto, outer: str) -> dict[str, Any]:
    name = f"{outer}{message.name}"
    found: dict[str, Any] = {name: {str(field.number): _field(message, field) for field in message.field}}
    if message.reserved_range or message.reserved_name:
        ranges = [[one.start, one.end] for one in message.reserved_range]
        found[name]["reserved"] = [*ranges, *message.reserved_name]
    for enum in message.enum_type:
        found[name][f"enum {enum.name}"] = _enum(enum)
    for nested in message.nested_type:
        found.update(_message(nested, f"{name}."))
    return found


def _field(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Label, type and name, as in a proto file, and the oneof that the field belongs to."""
    label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
    kind = field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.proto3_optional:
        return f"explicit optional {kind} {field.name}"
    text = f"{label} {kind} {field.name}"
    return (
        f"{text} in oneof {message.oneof_decl[field.oneof_index].name}"
        if field.HasField("oneof_index")
        else text
    )


def _enum(enum: EnumDescriptorProto) -> dict[str, int]:
    return {value.name: value.number for value in enum.value}


def _streamed(streaming: bool) -> str:
    return "stream " if streaming else ""


def http_routes() -> dict[str, list[str]]:
    """Methods and paths by server. An engine's own HTTP server has `/metrics` alone."""
    front = HttpFront(Mock())
    return {
        "gateway": sorted(
            f"{method} {route.path}"
            for route in front.app.routes
            if isinstance(route, Route)
            for method in route.methods or ()
        ),
        "operator": asyncio.run(_operator_routes()),
    }


async def _operator_routes() -> list[str]:
    runner = await OperatorMetrics().serve(0)
    try:
        resources = runner.app.router.resources()
        return sorted(f"{route.method} {resource.canonical}" for resource in resources for route in resource)
    finally:
        await runner.cleanup()


def requests() -> dict[str, Any]:
    """Keys that requests, responses and metadata carry, and those of the connector's configuration."""
    return {
        "kv_transfer_params": {
            "key": PARAMS_KEY,
            "version": PARAMS_VERSION,
            "request": fields_of(KintsugiParams),
            "op": [op.value for op in Op],
            "selector": sorted(name.value for name in SelectorName),
            "response": fields_of(Accounting),
            "response only": sorted(_answered() - fields_of(Accounting).keys()),
            "timeline": fields_of(LayerTiming),
            "outcome": [outcome.value for outcome in Outcome],
        },
        "kv_connector_extra_config": fields_of(EngineConfig),
        "http": {"namespace header": NAMESPACE_HEADER, "text keys of documents": list(DOCUMENT_TEXT_KEYS)},
        "grpc": {
            "services": sorted([DIRECTORY_SERVICE, GATEWAY_SERVICE, STORE_SERVICE]),
            "error metadata": ERROR_METADATA,
            "protocol metadata": PROTOCOL_METADATA,
            "protocol version": PROTOCOL_VERSION,
        },
    }


def _answered() -> set[str]:
    return set(Accounting(Outcome.BLENDED).to_mapping())
