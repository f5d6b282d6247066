"""Classes that other distributions add by an entry point: selectors and eviction policies.

An entry point is loaded when its name is first used. Its code runs in Kintsugi's processes with all their
permissions, like that of every installed package.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kintsugi.core.errors import InvalidField

SELECTORS = "kintsugi.selectors"
"""Group of subclasses of `fusor.selectors.Selector`."""
EVICTION_POLICIES = "kintsugi.eviction_policies"
"""Group of subclasses of `store.shard.eviction.policy.EvictionPolicy`."""


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    """Entry points by name. Metadata is read once: later installations need a restart."""
    return {entry.name: entry for entry in entry_points(group=group)}


def plugin_names(group: str) -> tuple[str, ...]:
    """Return the names that installed distributions add to a group, sorted."""
    return tuple(sorted(_entries(group)))


@cache
def _load(entry: EntryPoint) -> object:
    return entry.load()


def load_plugin(group: str, name: str, field: str, base: type) -> Any:
    """Return the class of an entry point. ``name`` is one of `plugin_names`. Raises `InvalidField` for
    ``field`` if the class cannot be imported or is not a subclass of ``base``."""
    entry = _entries(group)[name]
    named = f"{name!r}, entry point {entry.value} of group {group},"
    try:
        loaded = _load(entry)
    except Exception as error:
        raise InvalidField(
            field,
            f"{named} cannot be imported ({type(error).__name__}: {error}); repair its distribution",
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise InvalidField(field, f"{named} must be a subclass of {base.__module__}.{base.__qualname__}")
    return loaded
