"""What is said about a service that does not start, and how long one may take to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="install the extra `serving`")

from ray import serve
from ray.exceptions import GetTimeoutError, RayError

from kintsugi.core.deploy import SERVICE_APP, STORE_APP, EngineSpec, ModelSpec, ServiceSpec, StoreSpec
from kintsugi.core.errors import DeadlineExceeded, Unavailable
from kintsugi.serving import deployment as module
from kintsugi.serving.deployment import MESSAGE_CHARS_MAX, Service, cause_in, start_ray

TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:kintsugi:Engine.initialize_and_get_metadata()
  File "asynchronous.py", line 1, in start
ValueError: 3
The above exception was the direct cause of the following exception:
kintsugi.core.errors.Unavailable: vLLM did not start on nothing: ValueError: 3
RuntimeError: Traceback
kintsugi.core.errors.InvalidField: store: names no shard
more of Ray's words"""


def test_our_own_error_is_found_in_a_traceback() -> None:
    assert cause_in(TRACEBACK) == "InvalidField: store: names no shard"


def test_of_others_the_end_is_shown() -> None:
    assert cause_in("x" * 5000 + "the end") == ("x" * 5000 + "the end")[-MESSAGE_CHARS_MAX:]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


SPEC = ServiceSpec(ModelSpec("m"))
STATUS = "ray.serve.status"


@pytest.mark.parametrize(
    ("task", "name", "does"),
    [
        (lambda: start_ray(SPEC), "kintsugi.serving.deployment.start_local_ray", "start"),
        (Service(SPEC).deploy, "ray.serve._private.api.serve_start", "start Serve"),
        (Service(SPEC).progress, STATUS, "report its deployments"),
        (partial(Service(SPEC).wait, 1.0, print), STATUS, "report its deployments"),
        (Service(SPEC).addresses, "ray.serve.get_app_handle", "reach the gateway"),
        (Service(SPEC).stop, "ray.serve.delete", "end the service"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [GetTimeoutError("Get timed out."), TimeoutError("Get timed out."), RayError("a\nGet timed out.")],
)
def test_ray_that_times_out_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, task: Callable[[], Any], name: str, does: str, error: Exception
) -> None:
    monkeypatch.setattr(name, raising(error))
    with pytest.raises(Unavailable) as raised:
        task()
    says = str(raised.value)
    assert says.startswith(f"Ray does not {does} ({type(error).__name__}: Get timed out.); ")
    assert says.endswith("stop other processes and try again")
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Service(SPEC).deploy, "ray.serve._private.api.serve_start"),
        (Service(SPEC).progress, STATUS),
        (Service(SPEC).stop, "ray.serve.delete"),
    ],
)
def test_a_controller_that_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, task: Callable[[], Any], name: str
) -> None:
    forever = threading.Event()
    monkeypatch.setattr(name, lambda *_, **__: forever.wait())
    monkeypatch.setattr(module, "SERVE_ANSWER_S", 0.05)
    try:
        with pytest.raises(Unavailable, match="Serve's controller does not answer within 0 s"):
            task()
    finally:
        forever.set()


def test_our_own_error_at_ray_s_start_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = DeadlineExceeded("ours")
    monkeypatch.setattr(module, "start_local_ray", raising(ours))
    with pytest.raises(DeadlineExceeded) as raised:
        start_ray(SPEC)
    assert raised.value is ours


class StubServe:
    """As much of Serve as ends a service, on a clock of its own."""

    def __init__(self, ends_after_s: dict[str, float]) -> None:
        self.now_s = 0.0
        self.ended: list[str] = []
        self.is_down = False
        self._ends_after_s = ends_after_s
        self._ends_s = dict.fromkeys(ends_after_s, float("inf"))

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def delete(self, name: str, _blocking: bool = True) -> None:
        assert not _blocking, "Serve would wait for 60 s and no longer"
        self._ends_s[name] = self.now_s + self._ends_after_s[name]
        self.ended.append(name)

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(
            applications={n: None for n, end_s in self._ends_s.items() if end_s > self.now_s}
        )

    def shutdown(self) -> None:
        self.is_down = True


def stopped(monkeypatch: pytest.MonkeyPatch, stub: StubServe) -> StubServe:
    for name in ("delete", "status", "shutdown"):
        monkeypatch.setattr(serve, name, getattr(stub, name))
    monkeypatch.setattr(module, "time", stub)
    monkeypatch.setattr(module, "remove_directory", lambda: None)
    Service(ServiceSpec(ModelSpec("m"), EngineSpec(), StoreSpec())).stop()
    return stub


def test_a_service_may_take_as_long_to_end_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = stopped(monkeypatch, StubServe({SERVICE_APP: 70.0, STORE_APP: 80.0}))
    assert stub.ended == [SERVICE_APP, STORE_APP]
    assert stub.is_down
    assert stub.now_s == pytest.approx(150.0, abs=1.0)


def test_one_that_does_not_end_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeadlineExceeded, match="kintsugi-store did not end within 90 s"):
        stopped(monkeypatch, StubServe({SERVICE_APP: 1.0, STORE_APP: float("inf")}))
