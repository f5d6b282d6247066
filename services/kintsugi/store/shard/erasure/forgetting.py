"""Which erasures a shard forgets once it has recorded too many, and what it remembers of those. Pure.

Whoever records the most loses first: the tenant (what stands before the first `/` of a namespace), within it
the namespace, and in that the oldest. So a flood of erasures costs the namespace that sends it. A *mark* says
up to which number erasures of some namespaces may be forgotten: a shard that has not seen them when it
returns has to give up what it holds of these namespaces.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from kintsugi.core.namespaces.parts import enclosing, is_within
from kintsugi.store.protocol.callers import EVERY_NAMESPACE

MARKS_MAX = 1_000


def choose_to_forget(recorded: Mapping[int, str], count: int) -> list[int]:
    """The numbers of `count` erasures to forget. `recorded`: namespaces by number, in ascending order."""
    ranks_in_namespace: Counter[str] = Counter()
    ranked: list[tuple[int, int, str]] = []
    for number, namespace in reversed(list(recorded.items())):
        ranks_in_namespace[namespace] += 1
        ranked.append((ranks_in_namespace[namespace], -number, namespace))
    ranks_in_tenant: Counter[str] = Counter()
    fair: list[tuple[int, int]] = []
    for _, newest_first, namespace in sorted(ranked):
        tenant = _tenant_of(namespace)
        ranks_in_tenant[tenant] += 1
        fair.append((ranks_in_tenant[tenant], newest_first))
    return [-newest_first for _, newest_first in sorted(fair, reverse=True)[:count]]


def add_marks(marks: Mapping[str, int], forgotten: Mapping[int, str]) -> dict[str, int]:
    """The marks after more is forgotten: namespaces by number.

    Beyond `MARKS_MAX` the namespaces of a tenant share a mark, and then the oldest marks become one of every
    namespace, which concerns only shards that have seen nothing since.
    """
    added = dict(marks)
    for number, namespace in forgotten.items():
        added[namespace] = max(added.get(namespace, 0), number)
    if len(added) > MARKS_MAX:
        added = _join_tenants(added)
    if len(added) > MARKS_MAX:
        newest = sorted(added.items(), key=lambda mark: mark[1])
        oldest = newest[: len(newest) - MARKS_MAX // 2]
        added = dict(newest[len(oldest) :])
        added[EVERY_NAMESPACE] = max(added.get(EVERY_NAMESPACE, 0), oldest[-1][1])
    return added


def find_mark(marks: Mapping[str, int], namespace: str) -> int:
    """The number up to which erasures of a namespace may be forgotten; 0: none is."""
    patterns = {*enclosing(namespace), *map(_group_of, enclosing(namespace)), EVERY_NAMESPACE}
    return max(marks.get(pattern, 0) for pattern in patterns)


def matches(pattern: str, namespace: str) -> bool:
    """Whether a mark, of this version or a later one, concerns a namespace."""
    return namespace.startswith(pattern[:-1]) if pattern.endswith("*") else is_within(namespace, pattern)


def _join_tenants(marks: Mapping[str, int]) -> dict[str, int]:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for pattern in marks:
        groups[_group_of(pattern)].append(pattern)
    return {group: max(marks[pattern] for pattern in patterns) for group, patterns in groups.items()}


def _group_of(namespace: str) -> str:
    """The pattern of a tenant's namespaces, or one without a `/` itself."""
    return f"{_tenant_of(namespace)}/*" if "/" in namespace else namespace


def _tenant_of(namespace: str) -> str:
    return namespace.partition("/")[0]
