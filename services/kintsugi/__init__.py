"""Kintsugi: CacheBlend as a chunk KV-cache service for retrieval-augmented generation.

`kintsugi.Client` and `kintsugi.AsyncClient` talk to a gateway; `kintsugi.sdk.types` has their types.

Import layers, top to bottom (checked by import-linter)::

    cli · serving, bench · gateway · sdk · precompute, quality · engine · store, fusor, models · core
"""

import os
from typing import TYPE_CHECKING, Any

# Before gRPC is imported: it would print a line for each fork, "skipping fork() handlers", though grpcio
# handles forks only if this is 1.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from kintsugi.sdk.client import AsyncClient as AsyncClient
    from kintsugi.sdk.client import Client as Client
    from kintsugi.sdk.client import ClientOptions as ClientOptions
    from kintsugi.sdk.types import DocumentChunk as DocumentChunk
    from kintsugi.sdk.types import Key as Key
    from kintsugi.sdk.types import Plain as Plain
    from kintsugi.sdk.types import Sampling as Sampling
    from kintsugi.sdk.types import Tokens as Tokens

__version__ = "0.1.0"

_SDK = ("AsyncClient", "Client", "ClientOptions")
_SDK_TYPES = ("DocumentChunk", "Key", "Plain", "Sampling", "Tokens")


def __getattr__(name: str) -> Any:
    """The SDK, imported at its first use, because everything else here needs no gRPC."""
    if name in _SDK:
        from kintsugi.sdk import client as sdk

        return getattr(sdk, name)
    if name in _SDK_TYPES:
        from kintsugi.sdk import types as sdk_types

        return getattr(sdk_types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
