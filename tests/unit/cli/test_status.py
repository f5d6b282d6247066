"""`kintsugi status`: what it finds out, decides and says."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kintsugi.cli import service_facts
from kintsugi.cli.commands.status import describe_status
from kintsugi.cli.exits import ExitCode
from kintsugi.cli.main import app
from kintsugi.cli.service_facts import (
    AnswerCount,
    CallerFacts,
    Contact,
    EngineFacts,
    LostFacts,
    ServiceFacts,
    ServiceLink,
    StoreFacts,
    ask_service,
    parse_url,
)
from kintsugi.core.errors import InvalidField

RUNNER = CliRunner()
ENGINES = EngineFacts(None, "small", 4096, "chat", "on", version="0.1.0", vllm="0.32.0")
STORE = StoreFacts(None, shards=2, chunks=120, bytes_used=1 << 30, bytes_capacity=4 << 30)
HEALTHY = ServiceFacts(
    "http://127.0.0.1:8000",
    Contact.ANSWERED,
    version="0.1.0",
    caller=CallerFacts("anyone", ("*",), ("generate",)),
    engines=ENGINES,
    store=STORE,
    answers=(AnswerCount("blended", "none", 9), AnswerCount("prefix_hit", "prefix_hit", 5)),
)


def test_a_healthy_service_needs_no_help() -> None:
    status = describe_status(HEALTHY)
    assert (status.running, status.blending, status.why_not, status.helps) == (True, "on", [], [])
    assert dict(status.runs) == {
        "gateway": "Kintsugi 0.1.0",
        "engines": "small, 4,096 tokens, chat, vLLM 0.32.0",
        "token": "none needed: every client that can connect may call the gateway",
        "store": "2 shards, 120 chunks, 1 GiB of 4 GiB",
        "answers": "14 since the gateway started: 9 blended, 5 prefix_hit",
    }


@pytest.mark.parametrize("engines", [ENGINES, EngineFacts("no engine answered within 5 s")])
def test_the_last_lost_processes_are_told(engines: EngineFacts) -> None:
    lost = tuple(LostFacts("Engine", float(number), "killed", f"Engine {number}") for number in range(5))
    status = describe_status(dataclasses.replace(HEALTHY, engines=engines, lost=lost))
    assert ("lost", "Engine 2 · Engine 3 · Engine 4") in status.runs


def test_blending_that_is_on_says_since_when_at_which_cost_and_what_follows() -> None:
    progress = {
        "detail": "at 69% of the work",
        "since": "2026-11-27T12:00:00+00:00",
        "loss_upper": 0.05,
        "pairs_missing": 9,
    }
    facts = dataclasses.replace(HEALTHY, engines=dataclasses.replace(ENGINES, progress=progress))
    expected = (
        "on since 2026-11-27T12:00:00+00:00: at 69% of the work (at most 0.050 with a confidence of 95 %); "
        "cheaper after about 9 more prompts"
    )
    assert describe_status(facts).blending == expected


def test_learning_says_how_long_it_takes_and_what_failed() -> None:
    engines = dataclasses.replace(
        ENGINES,
        blending="learning: 3 of about 40 prompts were measured",
        progress={"minutes_missing": 12},
        learning={"failure": "the engine was busy for 300 s"},
    )
    status = describe_status(dataclasses.replace(HEALTHY, engines=engines))
    assert status.blending.endswith("40 prompts were measured; about 12 more minutes at this pace")
    assert dict(status.runs)["learning"].endswith(
        "tried again with the next prompt: the engine was busy for 300 s"
    )


@pytest.mark.parametrize("contact", [one for one in Contact if one is not Contact.ANSWERED])
def test_whatever_keeps_a_gateway_from_answering_there_is_something_to_do(contact: Contact) -> None:
    facts = ServiceFacts("http://127.0.0.1:8000", contact, "why")
    status = describe_status(facts)
    assert not status.running
    assert status.helps
    assert ("gateway", "why") in status.runs


@pytest.mark.parametrize(
    ("blending", "word"),
    [
        ("learning: 3 of about 40 prompts were measured", "kintsugi calibrate"),
        ("closed: prompts of 1 to 512 tokens: 3 of about 40", "found wrong blends"),
        ("weights_changed: since then", "restart the engines"),
        ("sliding_window: layer 3", "kintsugi doctor --model"),
    ],
)
def test_blending_that_is_off_says_what_turns_it_on(blending: str, word: str) -> None:
    facts = dataclasses.replace(HEALTHY, engines=dataclasses.replace(ENGINES, blending=blending))
    status = describe_status(facts)
    assert (status.running, status.blending) == (True, blending)
    assert word in status.helps[0]


def test_only_frequent_reasons_are_named_and_advised_on() -> None:
    answers = (
        AnswerCount("blended", "none", 40),
        AnswerCount("declined", "unmeasured", 14),
        AnswerCount("declined", "no_chunk_cached", 40),
        AnswerCount("declined", "busy", 3),
        AnswerCount("declined", "something_new", 15),
        AnswerCount("unknown", "none", 20),
    )
    status = describe_status(dataclasses.replace(HEALTHY, answers=answers))
    assert status.why_not == [
        "no_chunk_cached: 40 answers",
        "something_new: 15 answers",
        "unmeasured: 14 answers",
    ]
    assert [word in line for word, line in zip(("precompute", "in idle time"), status.helps, strict=True)]


@pytest.mark.parametrize(
    ("discovering", "tokens", "said", "advice"),
    [
        (None, None, None, None),
        ((), 0, "off", "kintsugi serve --discover default, or privacy: {default: {discover: true}}"),
        (("default",), 0, "on in default; 0 tokens hit in chunks", "no discovered chunk was hit yet"),
        (("a", "b", "c", "d"), 1234, "on in a, b, c, d; 1,234 tokens hit in chunks", None),
        ((), 7, "off; 7 tokens hit in chunks that no request declared", None),
    ],
)
def test_whether_chunks_are_discovered_is_said_and_advised_where_none_are_stored(
    discovering: tuple[str, ...] | None, tokens: int | None, said: str | None, advice: str | None
) -> None:
    known = dataclasses.replace(HEALTHY, discovering=discovering, tokens_discovered=tokens)
    status = describe_status(known)
    found = dict(status.runs).get("discovery")
    assert found is None if said is None else found is not None and found.startswith(said)
    assert status.helps == []
    answers = (AnswerCount("declined", "no_chunk_cached", 9),)
    for missing in (
        dataclasses.replace(known, answers=answers),
        dataclasses.replace(known, store=dataclasses.replace(STORE, chunks=0)),
    ):
        first, *more = describe_status(missing).helps
        assert "kintsugi precompute" in first
        assert [advice in one for one in more if advice is not None] == ([] if advice is None else [True])


def test_engines_that_do_not_answer_are_not_running() -> None:
    facts = dataclasses.replace(HEALTHY, engines=EngineFacts("no engine answered within 5 s"))
    status = describe_status(facts)
    assert not status.running
    assert ("engines", "no engine answered within 5 s") in status.runs
    assert status.helps


@pytest.mark.parametrize(
    ("store", "word"),
    [
        (StoreFacts("the directory does not answer"), "log"),
        (StoreFacts(None, shards=0), "log"),
        (dataclasses.replace(STORE, shards_away=("h:7400",)), "--store grpc://h:7400"),
        (dataclasses.replace(STORE, chunks=0), "precompute"),
    ],
)
def test_a_store_that_lacks_something_is_noticed(store: StoreFacts, word: str) -> None:
    facts = dataclasses.replace(HEALTHY, store=store)
    assert word in describe_status(facts).helps[0]


def test_versions_that_differ_are_advised_on() -> None:
    for facts in (
        dataclasses.replace(HEALTHY, version="0.0.9"),
        dataclasses.replace(HEALTHY, engines=dataclasses.replace(ENGINES, version="0.0.9")),
    ):
        (advice,) = describe_status(facts).helps
        assert advice.startswith("install one version everywhere")
        assert "0.0.9" in advice


def test_a_token_that_sees_little_is_said() -> None:
    tenant = dataclasses.replace(HEALTHY, has_tokens=True, store=None, answers=None)
    told = dict(describe_status(tenant).runs)
    assert (
        told["token"]
        == "anyone: generate in *; to see shards and answers, the token needs the verb admin in *"
    )
    assert {"store", "answers"}.isdisjoint(told)


def test_urls_are_taken_as_they_are_copied() -> None:
    for text in ("127.0.0.1:8000", "http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"):
        assert parse_url(text) == "http://127.0.0.1:8000"
    assert parse_url("https://host/v1") == "https://host"
    for text in ("grpc://127.0.0.1:7500", "http://", "127.0.0.1:http", "http://[::1:8000", "127.0.0.1:0"):
        with pytest.raises(InvalidField, match="HTTP address"):
            parse_url(text)


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server whose one connection is given to ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if status == 302:
                self.send_header("location", body)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_nothing_there_is_told_from_something_else_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # bound and not listening: refused
        bound.bind(("127.0.0.1", 0))
        refused = ask_service(ServiceLink(url=f"127.0.0.1:{bound.getsockname()[1]}"))
    assert (refused.contact, refused.detail) == (Contact.REFUSED, "Connection refused")
    http2 = bytes.fromhex("00000604000000000000030000006400000000")
    with listening(lambda connection: (connection.recv(4096), connection.sendall(http2))[0]) as address:
        assert ask_service(ServiceLink(url=address)).contact is Contact.FOREIGN
    with listening(lambda connection: None) as address:  # closes at once, as a TLS server would
        assert ask_service(ServiceLink(url=address)).contact is Contact.FOREIGN
    with listening(lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")) as address:
        assert ask_service(ServiceLink(url=f"https://{address}")).contact is Contact.UNTRUSTED
    monkeypatch.setattr(service_facts, "TIMEOUT_S", 0.05)
    let_go = threading.Event()
    with listening(lambda connection: (let_go.wait(30), None)[1]) as address:
        assert ask_service(ServiceLink(url=address)).contact is Contact.SILENT
        let_go.set()


@pytest.mark.parametrize(
    ("status", "body", "contact"),
    [
        (404, "no such page", Contact.FOREIGN),
        (200, "<html>", Contact.FOREIGN),
        (200, '{"status": "ok"}', Contact.FOREIGN),
        (200, "[]", Contact.FOREIGN),
        (200, "[" * 100_000, Contact.FOREIGN),
        (503, "[" * 100_000, Contact.FAILED),
        (401, '{"error": {"message": "this token expired at noon"}}', Contact.UNAUTHENTICATED),
        (503, "overloaded", Contact.FAILED),
        (302, "/elsewhere", Contact.FAILED),
    ],
)
def test_http_servers_are_told_apart(status: int, body: str, contact: Contact) -> None:
    with answering(status, body) as url:
        found = ask_service(ServiceLink(url=url))
    assert found.contact is contact
    assert status != 401 or found.detail == "this token expired at noon"


@pytest.mark.parametrize("key", ["kg_secret\n", "kg_secret\u00e9", "kg_secret\ud800"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(InvalidField, match=r"^api_key: ") as refused:
        ask_service(ServiceLink(api_key=key))
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_an_authority_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("none")
    with pytest.raises(InvalidField, match="not a PEM file"):
        ask_service(ServiceLink(tls_ca=tmp_path / "ca.pem"))


def test_the_commands_exit_codes_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ServiceLink] = []

    def answer_with(facts: ServiceFacts) -> None:
        def ask(link: ServiceLink) -> ServiceFacts:
            asked.append(link)
            return facts

        monkeypatch.setattr("kintsugi.cli.commands.status.ask_service", ask)

    answer_with(HEALTHY)
    result = RUNNER.invoke(app, ["status", "--json"])
    assert result.exit_code == ExitCode.OK
    document = json.loads(result.stdout)
    assert (document["running"], document["runs"]["gateway"]) == (True, "Kintsugi 0.1.0")
    assert document["facts"]["store"]["chunks"] == 120
    assert RUNNER.invoke(app, ["status", "--url", "u", "--api-key", "t"]).exit_code == ExitCode.OK
    assert asked[-1] == ServiceLink(url="u", api_key="t")
    answer_with(ServiceFacts("http://127.0.0.1:8000", Contact.REFUSED, "Connection refused"))
    down = RUNNER.invoke(app, ["status"])
    assert down.exit_code == ExitCode.UNAVAILABLE
    assert "kintsugi serve --model" in down.stdout
    answer_with(ServiceFacts("http://127.0.0.1:8000", Contact.UNAUTHENTICATED, "no token"))
    assert RUNNER.invoke(app, ["status"]).exit_code == ExitCode.BAD_INPUT
