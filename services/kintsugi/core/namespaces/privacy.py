"""What answers reveal within a namespace. See docs/adr/0011."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kintsugi.core.settings import Settings, setting


@dataclass(frozen=True)
class PrivacyExpert(Settings):
    """What hides from callers of a namespace that others of its callers stored a chunk."""

    accounting: bool = True
    """Answers say what was found in the cache. If false, only callers with the permission to read reports
    are told, and chunks cannot be named by key."""
    ttft_step_ms: float = setting(0.0, minimum=0, maximum=600_000)
    """The first token leaves at a multiple of this time in milliseconds, plus `ttft_step_us_per_token` for
    each token of the prompt. With both 0 it leaves when it is ready."""
    ttft_step_us_per_token: float = setting(0.0, minimum=0, maximum=1_000_000)
    """Part of the time step that grows with the prompt, in microseconds per token."""
    chunk_tokens_multiple: int = setting(1, minimum=1, maximum=4096)
    """Chunks have a multiple of this many tokens; the rest of a text is computed with the prompt."""


@dataclass(frozen=True)
class NamespacePrivacy(Settings):
    """What answers reveal to callers of a namespace about chunks that others of its callers stored."""

    shared: str = setting("", maxLength=128)
    """A namespace whose chunks requests may use besides their own; empty: none."""
    discover: bool | None = setting(None)
    """Whether passages that recur in prompts are saved without being put. Everybody in the namespace can tell
    that they were sent. Unset: only where `shared` is set, in a namespace of one user."""
    expert: PrivacyExpert = field(default_factory=PrivacyExpert)

    @property
    def discovers(self) -> bool:
        """Whether chunks are discovered in the namespace's prompts."""
        return bool(self.shared) if self.discover is None else self.discover

    @property
    def pads(self) -> bool:
        """Whether first tokens are delayed."""
        return self.expert.ttft_step_ms > 0 or self.expert.ttft_step_us_per_token > 0

    def at_least(self, outer: NamespacePrivacy) -> NamespacePrivacy:
        """The stricter of this privacy and ``outer``, that of the namespace around it, field by field."""
        own, theirs = self.expert, outer.expert
        stricter = PrivacyExpert(
            accounting=own.accounting and theirs.accounting,
            ttft_step_ms=max(own.ttft_step_ms, theirs.ttft_step_ms),
            ttft_step_us_per_token=max(own.ttft_step_us_per_token, theirs.ttft_step_us_per_token),
            chunk_tokens_multiple=max(own.chunk_tokens_multiple, theirs.chunk_tokens_multiple),
        )
        discover = False if outer.discover is False else self.discover
        return replace(self, discover=discover, expert=stricter)

    def step_s(self, prompt_tokens: int) -> float:
        """The time step of a prompt."""
        return self.expert.ttft_step_ms / 1e3 + self.expert.ttft_step_us_per_token * prompt_tokens / 1e6


NO_PRIVACY = NamespacePrivacy()
