"""Kintsugi: CacheBlend as a chunk KV-cache service for retrieval-augmented generation.

`kintsugi.Client` and `kintsugi.AsyncClient` talk to a gateway; `kintsugi.client.sdk_types` has their types.

Import layers, top to bottom (checked by import-linter)::

    cli · serving · precompute, quality · engine, store · client, fusor, checkpoints · core
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kintsugi.client.sdk import AsyncClient as AsyncClient
    from kintsugi.client.sdk import Client as Client
    from kintsugi.client.sdk import ClientOptions as ClientOptions
    from kintsugi.client.sdk_types import DocumentChunk as DocumentChunk
    from kintsugi.client.sdk_types import Key as Key
    from kintsugi.client.sdk_types import Plain as Plain
    from kintsugi.client.sdk_types import Sampling as Sampling
    from kintsugi.client.sdk_types import Tokens as Tokens

__version__ = "0.1.0"

_SDK = ("AsyncClient", "Client", "ClientOptions")
_SDK_TYPES = ("DocumentChunk", "Key", "Plain", "Sampling", "Tokens")


def __getattr__(name: str) -> Any:
    """The SDK, imported when it is asked for: everything else here does without gRPC."""
    if name in _SDK:
        from kintsugi.client import sdk

        return getattr(sdk, name)
    if name in _SDK_TYPES:
        from kintsugi.client import sdk_types

        return getattr(sdk_types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
