"""`kintsugi status`: shows what a service runs, what it blends, why not, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from kintsugi import __version__
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.render import format_bytes, format_count
from kintsugi.cli.screen import Screen
from kintsugi.cli.service_facts import (
    AnswerCount,
    Contact,
    EngineFacts,
    ServiceFacts,
    ServiceLink,
    StoreFacts,
    ask_service,
)
from kintsugi.core.accounting import NO_CHUNK, NOT_SAVED_YET, Outcome, label_of_reason
from kintsugi.models.reference import REFERENCE

MENTIONED_SHARE = 0.1
"""Minimum share of all answers at which a reason is shown."""

LOST_SHOWN = 3
"""Lost processes that are shown; the JSON has more."""

_NEXT = {
    Contact.REFUSED: (
        f"start a service here: kintsugi serve --model {REFERENCE.name}",
        "if a service runs elsewhere, name it: kintsugi status --url http://HOST:PORT",
    ),
    Contact.SILENT: ("if it is still starting, try again in a minute; otherwise read its log",),
    Contact.UNTRUSTED: ("name the authority of its certificate with --tls-ca, or use http:// in --url",),
    Contact.FOREIGN: (
        "name the gateway's HTTP port, which kintsugi serve prints as OpenAI; this may be its gRPC port",
        "if the gateway serves TLS, use https:// in --url",
    ),
    Contact.UNAUTHENTICATED: (
        "pass a token with --api-key or in OPENAI_API_KEY",
        "operators create tokens: kintsugi token NAME --namespace NAMESPACE --file TOKENS_FILE",
    ),
    Contact.FAILED: ("check --url, and read the gateway's log",),
}

_BLENDING_OFF = {
    "learning": "send prompts with pauses: engines measure in idle time how much blends lose; or "
    "decide on questions of your own: kintsugi calibrate --model MODEL --questions FILE --store URL",
    "closed": "read the engines' log: checks found wrong blends or stored chunks; engines measure again",
    "weights_changed": "restart the engines: their weights changed while they ran",
}
_BLENDING_OFF_ELSE = "find out why: kintsugi doctor --model MODEL"

_DISCOVER = (
    "discover passages that recur, if the callers of a namespace may learn of each other's texts "
    "(docs/TENANTS.md): kintsugi serve --discover default, or privacy: {default: {discover: true}}; default "
    "is the namespace of requests that name none"
)
_IDLE = "no discovered chunk was hit yet: passages that recur are saved and measured while the engine is idle"
_NOT_BLENDED = {
    NO_CHUNK: "store passages that recur: kintsugi precompute run SOURCE, or the client's put_chunks",
    NOT_SAVED_YET: "send prompts with pauses: passages that recur are saved while the engine is idle",
    "unmeasured": "do nothing: engines measure prompts with such chunks in idle time",
    "loading_is_slower": "use a faster store, or do nothing: loading these chunks takes longer than prefill",
    "blending_is_slower": "do nothing: a prefill of such short prompts is faster",
    "store_unavailable": "find out which shards answer: kintsugi status --url URL",
    "store_timeout": "find out which shards answer: kintsugi status --url URL",
    "foreign_prefix": "begin prompts with the system prompt that chunks are prefilled after",
    "prompt_logprobs": "do not request logprobs of prompt tokens: they need a full prefill",
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
    """`on`, with what the evidence shows, or why blending is off; empty: unknown."""
    why_not: list[str] = field(default_factory=list)
    """Why answers were not blended, the most frequent reason first."""
    helps: list[str] = field(default_factory=list)
    """Advice, with commands."""


def run(screen: Screen, link: ServiceLink) -> ExitCode:
    """Show the status. Returns `UNAVAILABLE` if no gateway or no engine answers, `BAD_INPUT` if the gateway
    rejects the caller's token."""
    facts = ask_service(link)
    status = describe_status(facts)
    screen.show(status_document(facts, status), lambda console: _render(console, status))
    if facts.contact is Contact.UNAUTHENTICATED:
        return ExitCode.BAD_INPUT
    return ExitCode.OK if status.running else ExitCode.UNAVAILABLE


def status_document(facts: ServiceFacts, status: ServiceStatus) -> dict[str, Any]:
    """JSON form: the status, and under `facts` the facts that it was derived from."""
    return {**asdict(status), "runs": dict(status.runs), "facts": asdict(facts)}


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
    if facts.lost:
        runs.append(("lost", " · ".join(one.text for one in facts.lost[-LOST_SHOWN:])))
    if engines is None or engines.error is not None:
        runs.append(("engines", "none" if engines is None else str(engines.error)))
        runs += _describe_store(facts.store)
        return ServiceStatus(
            False,
            facts.url,
            facts.contact,
            runs,
            helps=["wait until an engine has started; if none does, read the log of kintsugi serve"],
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
    if failure := engines.learning.get("failure"):
        runs.append(("learning", f"failed, and is tried again with the next prompt: {failure}"))
    helps += [] if facts.store is None else _advise_on_store(facts.store)
    frequent = find_frequent_reasons(facts.answers or ())
    helps += [_NOT_BLENDED[one.reason] for one in frequent if one.reason in _NOT_BLENDED]
    if _NOT_BLENDED[NO_CHUNK] in helps:
        helps += _advise_on_discovery(facts)
    helps += _advise_on_versions(facts)
    return ServiceStatus(
        True,
        facts.url,
        facts.contact,
        runs,
        describe_blending(engines),
        [f"{one.reason}: {format_count(one.count, 'answer')}" for one in frequent],
        list(dict.fromkeys(helps)),
    )


def describe_blending(engines: EngineFacts) -> str:
    """Format as `on since 2026-11-27T12:00:00+00:00: prompts of …: at 41% of a full prefill's work, …`, with
    the 95 % bound of the loss; until blending is on, with the time that learning still takes."""
    progress = engines.progress
    if engines.blending != "on" or not progress.get("detail"):
        minutes = progress.get("minutes_missing")
        takes = f"; about {format_count(minutes, 'more minute')} at this pace" if minutes else ""
        return f"{engines.blending}{takes}"
    since = f" since {progress['since']}" if progress.get("since") else ""
    missing = progress.get("pairs_missing")
    cheaper = f"; cheaper after about {format_count(missing, 'more prompt')}" if missing else ""
    bound = progress.get("loss_upper")
    lost = f" (at most {bound:.3f} with a confidence of 95 %)" if bound is not None else ""
    return f"on{since}: {progress['detail']}{lost}{cheaper}"


def advise_on_gate(blending: str) -> str:
    """Return advice on how to turn blending on. ``blending``: why it is off."""
    return _BLENDING_OFF.get(label_of_reason(blending), _BLENDING_OFF_ELSE)


def find_frequent_reasons(answers: Sequence[AnswerCount]) -> list[AnswerCount]:
    """Return the frequent reasons why answers were not blended, the most frequent first."""
    total = sum(one.count for one in answers)
    other = (Outcome.BLENDED, Outcome.PREFIX_HIT, Outcome.MIXED, Outcome.SAVED, Outcome.AUDITED)
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


def _describe_store(store: StoreFacts | None) -> list[tuple[str, str]]:
    """Format as `2 shards, 120 chunks, 1.2 GiB of 4 GiB`."""
    if store is None:
        return []
    if store.error is not None:
        return [("store", store.error)]
    away = f" ({', '.join(store.shards_away)} did not answer)" if store.shards_away else ""
    return [
        (
            "store",
            f"{format_count(store.shards, 'shard')}{away}, {format_count(store.chunks, 'chunk')}, "
            f"{format_bytes(store.bytes_used)} of {format_bytes(store.bytes_capacity)}",
        )
    ]


def _advise_on_store(store: StoreFacts) -> list[str]:
    if store.error is not None or not store.shards:
        return ["start a shard, or read the log of kintsugi serve: without a shard nothing is blended"]
    if store.shards_away:
        return [
            f"check the shard {store.shards_away[0]}: kintsugi store status --store grpc://{store.shards_away[0]}"
        ]
    if not store.chunks:
        return [_NOT_BLENDED[NO_CHUNK]]
    return []


def _describe_caller(facts: ServiceFacts) -> str:
    caller = facts.caller
    if not facts.has_tokens or caller is None:
        return "none needed: every client that can connect may call the gateway"
    hidden = (
        "" if facts.store is not None else "; to see shards and answers, the token needs the verb admin in *"
    )
    return f"{caller.name}: {', '.join(caller.verbs)} in {', '.join(caller.namespaces)}{hidden}"


def _advise_on_versions(facts: ServiceFacts) -> list[str]:
    found = {"kintsugi here": __version__, "gateway": facts.version}
    if facts.engines is not None and facts.engines.version:
        found["engines"] = facts.engines.version
    if len(set(found.values())) == 1:
        return []
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    return [f"install one version everywhere: {shown}"]


def _advise_on_discovery(facts: ServiceFacts) -> list[str]:
    if facts.discovering is None or facts.tokens_discovered:
        return []
    return [_IDLE if facts.discovering else _DISCOVER]


def _describe_discovery(facts: ServiceFacts) -> list[tuple[str, str]]:
    """Format as `on in default; 1,234 tokens hit in chunks that no request declared`."""
    if facts.discovering is None:
        return []
    if not facts.discovering and not facts.tokens_discovered:
        return [("discovery", "off")]
    names = ", ".join(facts.discovering)
    hit = f"{facts.tokens_discovered or 0:,} tokens hit in chunks that no request declared"
    return [("discovery", f"on in {names}; {hit}" if names else f"off; {hit}")]


def _render(console: Console, status: ServiceStatus) -> None:
    state = (
        "runs" if status.running else "is not ready" if status.contact == "answered" else "does not answer"
    )
    console.print(Text(f"{status.url} {state}", style="bold"))
    lines = [*status.runs]
    if status.blending:
        lines.append(("blending", status.blending))
    if status.why_not:
        lines.append(("not blended", " · ".join(status.why_not)))
    for part, detail in lines:
        console.print(Text(f"  {part:<12}", style="dim") + Text(detail), soft_wrap=True)
    if status.helps:
        console.print(Text("What would help", style="bold"))
        for help_text in status.helps:
            console.print(Text(f"  {help_text}"), soft_wrap=True)
