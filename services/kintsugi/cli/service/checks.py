"""The checks of `kintsugi doctor --url`: what is wrong with a running service, and what mends it."""

from __future__ import annotations

from collections.abc import Iterator

from kintsugi.cli.commands.doctor import Check, CheckResult
from kintsugi.cli.service.facts import Contact, ServiceFacts
from kintsugi.cli.service.status import (
    advise_on_gate,
    describe_answers,
    describe_status,
    describe_store,
    find_frequent_reasons,
)

CLOCK_WARNING_S = 2.0
CLOCK_FAILED_S = 60.0
"""Tokens and certificates expire by the clock, and erasures are ordered by it."""


def check_service(facts: ServiceFacts, own_version: str) -> list[Check]:
    """All checks, in the order in which a failure explains those behind it."""
    status = describe_status(facts)
    if facts.contact is Contact.UNAUTHENTICATED:
        return [
            Check("gateway", CheckResult.OK, f"{facts.url} answers"),
            Check("token", CheckResult.FAILED, _explain(facts.detail, status.helps)),
        ]
    if facts.contact is not Contact.ANSWERED:
        detail = f"{facts.url}: {_explain(facts.detail, status.helps)}"
        return [Check("gateway", CheckResult.FAILED, detail)]
    answer = f"{facts.url}, Kintsugi {facts.version}, answered in {facts.round_trip_s * 1e3:.0f} ms"
    return [
        Check("gateway", CheckResult.OK, answer),
        _check_token(facts),
        *_check_engines(facts),
        _check_versions(facts, own_version),
        *_check_store(facts),
        _check_clock(facts),
        *_check_answers(facts),
    ]


def _explain(detail: str, helps: list[str]) -> str:
    return "; ".join([detail, *helps])


def _check_token(facts: ServiceFacts) -> Check:
    caller = facts.caller
    if not facts.has_tokens or caller is None:
        return Check("token", CheckResult.OK, "none needed: everybody who reaches the gateway may call it")
    detail = f"{caller.name}: {', '.join(caller.verbs)} in {', '.join(caller.namespaces)}"
    if facts.store is None:
        return Check(
            "token",
            CheckResult.WARNING,
            f"{detail}; shards and answers need the verb admin in *, not checked",
        )
    return Check("token", CheckResult.OK, detail)


def _check_engines(facts: ServiceFacts) -> Iterator[Check]:
    engines = facts.engines
    if engines is None or engines.error is not None:
        helps = describe_status(facts).helps
        yield Check(
            "engines", CheckResult.FAILED, _explain(engines.error or "" if engines else "none", helps)
        )
        return
    yield Check("engines", CheckResult.OK, f"{engines.model}, {engines.max_model_len:,} tokens")
    if engines.blending == "on":
        yield Check("blending", CheckResult.OK, "on")
    else:
        detail = f"off, {engines.blending}; {advise_on_gate(engines.blending)}"
        yield Check("blending", CheckResult.WARNING, detail)


def _check_versions(facts: ServiceFacts, own_version: str) -> Check:
    found = {"kintsugi here": own_version, "gateway": facts.version}
    if facts.engines is not None and facts.engines.version:
        found["engines"] = facts.engines.version
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(set(found.values())) == 1:
        return Check("versions", CheckResult.OK, detail)
    return Check("versions", CheckResult.WARNING, f"{detail}; install one version everywhere")


def _check_store(facts: ServiceFacts) -> Iterator[Check]:
    store = facts.store
    if store is None:
        return
    if store.error is not None or not store.shards:
        yield Check(
            "store", CheckResult.FAILED, f"{describe_store(store)}; every prompt is prefilled in full"
        )
        return
    verdict = CheckResult.WARNING if store.shards_away else CheckResult.OK
    yield Check("store", verdict, describe_store(store))


def _check_clock(facts: ServiceFacts) -> Check:
    apart_s = max(0.0, abs(facts.clock_ahead_s) - facts.round_trip_s / 2)
    if apart_s < CLOCK_WARNING_S:
        return Check("clock", CheckResult.OK, f"{apart_s:.1f} s apart")
    verdict = CheckResult.FAILED if apart_s >= CLOCK_FAILED_S else CheckResult.WARNING
    side = "ahead of" if facts.clock_ahead_s > 0 else "behind"
    detail = f"the gateway's is {apart_s:.0f} s {side} this machine's; synchronise both with NTP"
    return Check("clock", verdict, detail)


def _check_answers(facts: ServiceFacts) -> Iterator[Check]:
    if facts.answers is None:
        return
    frequent = find_frequent_reasons(facts.answers)
    detail = describe_answers(facts.answers)
    if frequent:
        detail = f"{detail}; not blended because of {', '.join(one.reason for one in frequent)}"
    defects = [one for one in facts.answers if one.outcome == "failed" or one.reason == "defect"]
    yield Check("answers", CheckResult.WARNING if defects else CheckResult.OK, detail)
