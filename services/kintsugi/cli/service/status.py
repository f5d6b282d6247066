"""The status of a running service: what runs, what is blended, why not, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kintsugi import __version__
from kintsugi.cli.render import format_bytes, format_count
from kintsugi.cli.service.facts import AnswerCount, Contact, ServiceFacts, StoreFacts
from kintsugi.core.accounting import Outcome, label_of_reason
from kintsugi.models.reference import REFERENCE

DISCOVERING_SHOWN_MAX = 3
"""Maximum number of namespaces with discovery that are named."""
CLOCK_APART_MAX_S = 2.0
"""Clock difference from which on advice is given: expiry and the order of erasures depend on clocks."""
MENTIONED_SHARE = 0.1
"""Minimum share of the answers for a reason to be mentioned."""

_NEXT = {
    Contact.REFUSED: (
        f"start one here: kintsugi serve --model {REFERENCE.name}",
        "if one runs elsewhere, name it: kintsugi status --url http://HOST:PORT",
    ),
    Contact.SILENT: ("if it is still starting, ask again in a minute; if not, look into its log",),
    Contact.UNKNOWN_HOST: ("check the host in --url",),
    Contact.UNTRUSTED: ("name the authority of its certificate with --tls-ca, or use http:// in --url",),
    Contact.NOT_HTTP: (
        "name the HTTP port, which kintsugi serve prints as OpenAI; this may be its gRPC port",
        "if it serves TLS, use https:// in --url",
    ),
    Contact.FOREIGN: ("name the HTTP port of a gateway: kintsugi serve prints it as OpenAI",),
    Contact.UNAUTHENTICATED: (
        "pass a token with --api-key or in OPENAI_API_KEY",
        "an operator makes one: kintsugi token NAME --namespace NAMESPACE --file TOKENS_FILE",
    ),
    Contact.FAILED: ("look into the gateway's log",),
}

_CALIBRATE = "kintsugi calibrate --model MODEL --store URL"
_BLENDING_OFF = {
    "not_calibrated": f"calibrate: {_CALIBRATE} (kintsugi serve does it by itself while it serves)",
    "calibration_outdated": f"calibrate again: {_CALIBRATE}",
    "calibration_unreadable": f"calibrate again: {_CALIBRATE}",
    "calibration_of_another": f"calibrate again for this model, prefix and version: {_CALIBRATE}",
    "calibration_failed": "calibrate on questions like those you serve: kintsugi calibrate --questions FILE",
    "drift": f"answers drifted from what was calibrated: find out why, then calibrate again: {_CALIBRATE}",
    "weights_changed": "restart the engines: their weights are not those that they started with",
}
_BLENDING_OFF_ELSE = "see what is missing: kintsugi doctor --model MODEL"

_NO_CHUNK = "no_chunk_cached"
_DISCOVER = (
    "have passages that recur found, where all callers of a namespace may know of each other's texts "
    "(docs/TENANTS.md): kintsugi serve --discover default, or privacy: {default: {discover: true}}; default "
    "is the namespace of requests that name none"
)
_CALIBRATE_SEGMENTS = (
    "nothing discovered was hit yet: what recurs is saved while the engine is idle, where calibration holds "
    "for it: kintsugi calibrate --segments"
)
_NOT_BLENDED = {
    _NO_CHUNK: "store what prompts repeat: kintsugi precompute SOURCE, or put_chunks of the client",
    "outside_calibration": "calibrate on prompts like those you serve: kintsugi calibrate --questions FILE, "
    "with --segments where chunks are discovered",
    "loading_is_slower": "nothing to do, or a faster store: loading these chunks takes longer than prefill",
    "blending_is_slower": "nothing to do: prompts are so short that a prefill is faster",
    "store_unavailable": "see which shards answer: kintsugi status --url URL",
    "store_timeout": "see which shards answer: kintsugi status --url URL",
    "foreign_prefix": "begin prompts with the system prompt that chunks are prefilled behind",
    "prompt_logprobs": "do not ask for logprobs of prompt tokens: they need a full prefill",
    "busy": "add engines (--engines): lookups wait for the store",
}


@dataclass(frozen=True)
class ServiceStatus:
    """The output of `kintsugi status`."""

    running: bool
    """Whether a gateway and an engine answered."""
    url: str
    contact: Contact
    runs: list[tuple[str, str]] = field(default_factory=list)
    """(part, description) pairs."""
    blending: str = ""
    """`on`, or why not; empty: unknown."""
    why_not: list[str] = field(default_factory=list)
    """Why answers were not blended, the most frequent reason first."""
    helps: list[str] = field(default_factory=list)
    """What would help, each with a command where there is one."""


def describe_status(facts: ServiceFacts) -> ServiceStatus:
    """Describe what runs, what is blended, why not, and what would help."""
    if facts.contact is not Contact.ANSWERED:
        return ServiceStatus(
            False,
            facts.url,
            facts.contact,
            runs=[("gateway", facts.detail)],
            helps=list(_NEXT[facts.contact]),
        )
    engines = facts.engines
    runs = [("gateway", f"Kintsugi {facts.version}")]
    if engines is None or engines.error is not None:
        runs.append(("engines", engines.error or "none" if engines is not None else "none"))
        runs += _describe_store(facts.store)
        return ServiceStatus(
            False,
            facts.url,
            facts.contact,
            runs,
            helps=["wait until an engine has started; if none does, look into the log of kintsugi serve"],
        )
    version = f"vLLM {engines.vllm}" if engines.vllm else ""
    known = (engines.model, f"{engines.max_model_len:,} tokens", engines.form, version)
    runs.append(("engines", ", ".join(filter(None, known))))
    runs.append(("token", _describe_caller(facts)))
    runs += _describe_store(facts.store)
    if facts.answers is not None:
        runs.append(("answers", describe_answers(facts.answers)))
    runs += _describe_discovery(facts)
    helps = []
    if engines.blending != "on":
        helps.append(advise_on_gate(engines.blending))
    helps += [] if facts.store is None else _advise_on_store(facts.store)
    frequent = find_frequent_reasons(facts.answers or ())
    helps += [_NOT_BLENDED[one.reason] for one in frequent if one.reason in _NOT_BLENDED]
    if _NOT_BLENDED[_NO_CHUNK] in helps:
        helps += _advise_on_discovery(facts)
    helps += [*_advise_on_versions(facts), *_advise_on_clock(facts)]
    return ServiceStatus(
        True,
        facts.url,
        facts.contact,
        runs,
        engines.blending,
        [f"{one.reason}: {format_count(one.count, 'answer')}" for one in frequent],
        list(dict.fromkeys(helps)),
    )


def advise_on_gate(blending: str) -> str:
    """Return advice for turning blending on; ``blending`` says why it is off."""
    return _BLENDING_OFF.get(label_of_reason(blending), _BLENDING_OFF_ELSE)


def find_frequent_reasons(answers: Sequence[AnswerCount]) -> list[AnswerCount]:
    """Return the reasons, frequent enough to matter, why answers were not blended; most frequent first."""
    total = sum(one.count for one in answers)
    other = (Outcome.BLENDED, Outcome.PREFIX_HIT, Outcome.SAVED, Outcome.AUDITED)
    found = [
        one
        for one in answers
        if one.outcome not in other and one.reason != "none" and one.count >= MENTIONED_SHARE * total
    ]
    return sorted(found, key=lambda one: -one.count)


def describe_answers(answers: Sequence[AnswerCount]) -> str:
    """Format as `14 since the gateway started: 9 blended, 5 declined`."""
    totals: dict[str, int] = {}
    for one in answers:
        totals[one.outcome] = totals.get(one.outcome, 0) + one.count
    if not totals:
        return "none yet"
    parts = ", ".join(f"{count:,} {outcome}" for outcome, count in totals.items())
    return f"{sum(totals.values()):,} since the gateway started: {parts}"


def describe_store(store: StoreFacts) -> str:
    """Format as `2 shards, 120 chunks, 1.2 GiB of 4 GiB`."""
    if store.error is not None:
        return store.error
    away = f" ({', '.join(store.shards_away)} did not answer)" if store.shards_away else ""
    return (
        f"{format_count(store.shards, 'shard')}{away}, {format_count(store.chunks, 'chunk')}, "
        f"{format_bytes(store.bytes_used)} of {format_bytes(store.bytes_capacity)}"
    )


def _describe_store(store: StoreFacts | None) -> list[tuple[str, str]]:
    return [] if store is None else [("store", describe_store(store))]


def _advise_on_store(store: StoreFacts) -> list[str]:
    if store.error is not None or not store.shards:
        return ["start a shard, or look into the log of kintsugi serve: without one nothing is blended"]
    if store.shards_away:
        return [
            f"see what ails {store.shards_away[0]}: kintsugi store status --store grpc://{store.shards_away[0]}"
        ]
    if not store.chunks:
        return [_NOT_BLENDED[_NO_CHUNK]]
    return []


def _describe_caller(facts: ServiceFacts) -> str:
    caller = facts.caller
    if not facts.has_tokens or caller is None:
        return "none needed: everybody who reaches the gateway may call it"
    hidden = "" if facts.store is not None else "; shards and answers need the verb admin in *"
    return f"{caller.name}: {', '.join(caller.verbs)} in {', '.join(caller.namespaces)}{hidden}"


def _advise_on_versions(facts: ServiceFacts) -> list[str]:
    found = {"kintsugi here": __version__, "gateway": facts.version}
    if facts.engines is not None and facts.engines.version:
        found["engines"] = facts.engines.version
    if len(set(found.values())) == 1:
        return []
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    return [f"install one version everywhere: {shown}"]


def _advise_on_clock(facts: ServiceFacts) -> list[str]:
    apart_s = abs(facts.clock_ahead_s) - facts.round_trip_s / 2
    if apart_s < CLOCK_APART_MAX_S:
        return []
    side = "ahead of" if facts.clock_ahead_s > 0 else "behind"
    return [f"synchronise the clocks with NTP: the gateway's is {apart_s:.0f} s {side} this machine's"]


def _advise_on_discovery(facts: ServiceFacts) -> list[str]:
    if facts.discovering is None or facts.tokens_discovered:
        return []
    return [_CALIBRATE_SEGMENTS if facts.discovering else _DISCOVER]


def _describe_discovery(facts: ServiceFacts) -> list[tuple[str, str]]:
    """Format as `on in default; 1,234 tokens hit that their prompts did not declare`."""
    if facts.discovering is None:
        return []
    if not facts.discovering and not facts.tokens_discovered:
        return [("discovery", "off")]
    shown = facts.discovering[:DISCOVERING_SHOWN_MAX]
    more = len(facts.discovering) - len(shown)
    names = ", ".join(shown) + (f" and {more} more" if more else "")
    hit = f"{facts.tokens_discovered or 0:,} tokens hit that their prompts did not declare"
    return [("discovery", f"on in {names}; {hit}" if shown else f"off; {hit}")]
