"""What the jobs of a server's callers may use. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kintsugi.core.errors import PermissionDenied
from kintsugi.precompute.sources.roots import NOWHERE, SourceRoots
from kintsugi.precompute.spec import JobSpec


@dataclass(frozen=True)
class JobPolicy:
    """The sources, models and stores that a server offers, and what it alone decides. By default it offers
    nothing."""

    sources: SourceRoots = NOWHERE
    models: tuple[str, ...] = ()
    """As callers name them."""
    stores: tuple[str, ...] = ()
    """URLs, exactly as callers name them: a store's URL may name files with keys and tokens."""
    workers_max: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM` for every job. Callers give none: some load code or files."""

    def check(self, spec: JobSpec) -> None:
        """Raises `PermissionDenied` for a spec with anything that the server does not offer."""
        self.sources.check(spec.source)
        _check_offered("model", spec.model, self.models)
        _check_offered("store", spec.store, self.stores)
        if spec.workers > self.workers_max:
            raise PermissionDenied(
                f"workers: a job has at most {self.workers_max} here; ask for fewer, or start the server "
                "with --workers"
            )
        if spec.engine:
            raise PermissionDenied(
                f"engine: {', '.join(sorted(spec.engine))} cannot be set by callers; leave engine out, or "
                "start the server with --engine"
            )

    def complete(self, spec: JobSpec) -> JobSpec:
        """The spec to run: the caller's, with the server's engine arguments. Raises `PermissionDenied`."""
        self.check(spec)
        return replace(spec, engine=dict(self.engine))


def _check_offered(name: str, asked: str, offered: Sequence[str]) -> None:
    if asked not in offered:
        raise PermissionDenied(
            f"{name} {asked!r} is not among those of this server ({', '.join(offered) or 'none'}); start it "
            f"with --{name}, or choose one of them"
        )
