"""What a connection may cost before anybody has authenticated on it, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kintsugi.core.errors import Unauthenticated
from kintsugi.core.exchange import CHAT_PATH
from kintsugi.gateway.fronts import http_connection, openai_server
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.http_connection import HEAD_BYTES_MAX, HEADERS_MAX, PIPELINED_MAX, Connections
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.gateway.gateway import GatewayLimits
from kintsugi.store.protocol.access import Access, Caller
from tests.fakes.openai_backend import ScriptedBackend, answered, gateway_over

DEADLINE_S = 20.0
BODY = b'{"messages": [{"role": "user", "content": "hello"}]}'
POST = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\n".encode()
TOKEN = b"Authorization: Bearer good\r\n"
ASK = POST + TOKEN + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large"


class Good(Access):
    has_tokens = True

    def caller(self, token: str | None, identities: Collection[str] = ()) -> Caller:
        if token != "good":
            raise Unauthenticated("no such token")
        return Caller("good", ("acme",))


class Peer:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self, data: bytes = b"") -> bytes:
        """The status line of the answer to these bytes; empty if the connection is closed without one."""
        self.writer.write(data)
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        for line in head.split(b"\r\n"):
            if line.startswith(b"content-length: "):
                await self.reader.readexactly(int(line.partition(b": ")[2]))
            elif line == b"transfer-encoding: chunked":
                await self.reader.readuntil(b"\r\n0\r\n\r\n")
        return head.partition(b"\r\n")[0]

    async def wait_closed(self) -> None:
        """Waits for it, whatever is sent before."""
        with suppress(ConnectionError):
            await self.reader.read()

    async def is_closed(self) -> bool:
        """Waits for it; whether nothing was sent before."""
        try:
            return not await self.reader.read()
        except ConnectionError:
            return True


Connect = Callable[[], Awaitable[Peer]]


def serve(body: Callable[[Connect], Awaitable[None]], delay_s: float = 0.0, **limits: Any) -> None:
    """Runs a test on a gateway that one token opens and that answers after ``delay_s``."""

    @asynccontextmanager
    async def connecting() -> AsyncIterator[Connect]:
        backend = ScriptedBackend(lambda call: [delay_s, *answered("fine")])
        gateway = gateway_over(backend, access=Good(), limits=GatewayLimits(**limits))
        server = HttpServer(HttpFront(gateway).app, "127.0.0.1", 0)
        await server.start()
        host, port = server.address.split(":")
        peers: list[Peer] = []

        async def connect() -> Peer:
            peers.append(Peer(*await asyncio.open_connection(host, int(port))))
            return peers[-1]

        try:
            yield connect
        finally:
            for peer in peers:
                peer.writer.close()
            await server.stop()

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S), connecting() as connect:
            await body(connect)

    asyncio.run(bounded())


class Standing:
    """A connection by its state."""

    def __init__(self, name: str, is_answered: bool = False, is_waiting: bool = True) -> None:
        self.name, self.is_answered, self.is_waiting = name, is_answered, is_waiting


@pytest.mark.parametrize(
    ("asking", "strangers", "callers", "cut"),
    [
        ([("refused", True)], 5, [True], "refused"),
        ([("asks", False), ("refused later", True)], 5, [True], "stranger 0"),
        ([("asks", False)], 1, [True], "asks"),
        ([], 1, [True], "caller 0"),
        ([], 1, [False], "stranger 0"),
    ],
    ids=["answered without a token", "no head", "head has arrived", "idle caller", "newest"],
)
def test_a_flood_of_connections_cuts_those_whose_head_has_arrived_last(
    asking: list[tuple[str, bool]], strangers: int, callers: list[bool], cut: str
) -> None:
    connections = Connections(100, 100)
    for number, is_waiting in enumerate(callers):
        caller: Any = Standing(f"caller {number}", is_waiting=is_waiting)
        connections.add(caller)
        connections.expect_token(caller)
        connections.admit(caller)
    for name, is_answered in asking:
        one: Any = Standing(name, is_answered)
        connections.add(one)
        connections.expect_token(one)
    for number in range(strangers):
        new: Any = Standing(f"stranger {number}")
        connections.add(new)
    assert vars(connections._find_least_wanted())["name"] == cut


HEADS = {
    "one header without an end": POST + b"X: " + b"x" * HEAD_BYTES_MAX,
    "a path without an end": b"GET /" + b"x" * HEAD_BYTES_MAX,
    "headers without an end": POST + b"X: y\r\n" * HEAD_BYTES_MAX,
    "many headers": POST + b"X: y\r\n" * (HEADERS_MAX + 1),
    "blanks without an end": b"\r\n" * HEAD_BYTES_MAX,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=[name.replace(" ", "_") for name in HEADS])
def test_a_head_has_an_end(head: bytes) -> None:
    async def body(connect: Connect) -> None:
        peer = await connect()
        assert await peer.answer(head) == TOO_LARGE
        assert await peer.is_closed()
        assert await (await connect()).answer(ASK) == b"HTTP/1.1 200 OK"

    serve(body)


def test_the_largest_head_is_read() -> None:
    async def body(connect: Connect) -> None:
        peer = await connect()
        rest = len(HEALTH) + len(b"X: \r\n")
        assert await peer.answer(HEALTH[:-2] + b"X: %b\r\n\r\n" % (b"x" * (HEAD_BYTES_MAX - rest - 1))) != b""
        headers = b"X: y\r\n" * (HEADERS_MAX - 1)
        assert await peer.answer(HEALTH[:-2] + headers + b"\r\n") == b"HTTP/1.1 200 OK"

    serve(body)


@pytest.mark.parametrize("tail", [b"0\r\nX: ", b"1;"], ids=["trailer", "chunk_extension"])
def test_what_stands_in_a_body_and_is_none_has_an_end(tail: bytes) -> None:
    async def body(connect: Connect) -> None:
        peer = await connect()
        chunked = POST + TOKEN + b"Transfer-Encoding: chunked\r\n\r\n"
        assert await peer.answer(chunked + tail + b"x" * 4 * HEAD_BYTES_MAX) == b""
        assert await peer.is_closed()

    serve(body)


def test_a_body_in_pieces_of_one_byte_is_read() -> None:
    async def body(connect: Connect) -> None:
        text = b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"x" * HEAD_BYTES_MAX)
        pieces = b"".join(b"1\r\n%c\r\n" % letter for letter in text)
        chunked = POST + TOKEN + b"Transfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % pieces
        assert await (await connect()).answer(chunked) == b"HTTP/1.1 200 OK"

    serve(body)


@pytest.mark.parametrize("sent", [b"", b"P", POST, b"\r\n"], ids=["nothing", "a_letter", "half", "a_blank"])
def test_a_head_has_to_arrive_in_time(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_READ_S", 0.05)

    async def body(connect: Connect) -> None:
        peer = await connect()
        peer.writer.write(sent)
        assert await peer.is_closed()
        used = await connect()
        assert await used.answer(ASK) == b"HTTP/1.1 200 OK"
        if sent:  # the time between two requests has a longer bound
            used.writer.write(sent)
            assert await used.is_closed()

    serve(body)


def test_blanks_behind_a_request_do_not_end_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_READ_S", 0.1)

    async def body(connect: Connect) -> None:
        peer = await connect()
        assert await peer.answer(ASK + b"\r\n") == b"HTTP/1.1 200 OK"

    serve(body, delay_s=0.3)


def test_few_requests_wait_on_one_connection() -> None:
    async def body(connect: Connect) -> None:
        peer = await connect()
        peer.writer.write(HEALTH * (PIPELINED_MAX + 1))
        for _ in range(PIPELINED_MAX + 1):
            assert await peer.answer() == b"HTTP/1.1 200 OK"
        assert await peer.answer(HEALTH * 100) == b""

    serve(body)


def test_the_oldest_stranger_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "STRANGERS_MAX", 2)

    async def body(connect: Connect) -> None:
        caller = await connect()
        assert await caller.answer(ASK) == b"HTTP/1.1 200 OK"
        first, second, third = [await connect() for _ in range(3)]
        assert await first.is_closed()
        for peer in (second, third, caller):
            assert await peer.answer(ASK) == b"HTTP/1.1 200 OK"
        strangers = [await connect() for _ in range(4)]
        assert await strangers[0].is_closed()
        for peer in (second, third, caller, strangers[-1]):
            assert await peer.answer(ASK) == b"HTTP/1.1 200 OK", "callers do not give way to strangers"

    serve(body)


def test_who_has_asked_without_a_token_gives_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "STRANGERS_MAX", 3)

    async def body(connect: Connect) -> None:
        caller = await connect()
        refused = [await connect() for _ in range(2)]
        for stranger in refused:
            stranger.writer.write(POST + b"Content-Length: 100\r\n\r\n{")
            assert (await stranger.reader.readline()).startswith(b"HTTP/1.1 401")
        await connect()
        await refused[0].wait_closed()
        assert await caller.answer(ASK) == b"HTTP/1.1 200 OK"

    serve(body)


def test_a_probe_stays_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "STRANGERS_MAX", 1)

    async def body(connect: Connect) -> None:
        probe = await connect()
        assert await probe.answer(HEALTH) == b"HTTP/1.1 200 OK"
        await connect()
        assert await probe.is_closed()

    serve(body)


def test_where_all_connections_are_taken_the_longest_idle_one_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_server, "CONNECTIONS_MAX", 3)

    async def body(connect: Connect) -> None:
        callers = [await connect() for _ in range(3)]
        for caller in (callers[1], callers[0], callers[2]):
            assert await caller.answer(ASK) == b"HTTP/1.1 200 OK"
        another = await connect()
        assert await callers[1].is_closed()
        for peer in (callers[0], callers[2], another):
            assert await peer.answer(ASK) == b"HTTP/1.1 200 OK"

    serve(body)


def test_strangers_whose_bodies_do_not_come_take_no_place() -> None:
    """A refused request waits for the rest of its body, so that its sender sees the answer."""

    async def body(connect: Connect) -> None:
        for _ in range(5):
            stranger = await connect()
            stranger.writer.write(POST + b"Content-Length: 100\r\n\r\n{")
            assert (await stranger.reader.readline()).startswith(b"HTTP/1.1 401")
        assert await (await connect()).answer(ASK) == b"HTTP/1.1 200 OK"

    serve(body, http_concurrent_max=1)


def test_a_closed_connection_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Connections] = []
    monkeypatch.setattr(
        openai_server, "Connections", lambda *limits: made.append(Connections(*limits)) or made[0]
    )

    async def body(connect: Connect) -> None:
        for data in (HEALTH, POST, HEADS["many headers"], ASK):
            peer = await connect()
            peer.writer.write(data)
            peer.writer.close()
            await peer.writer.wait_closed()
        assert await (await connect()).answer(ASK) == b"HTTP/1.1 200 OK"
        (connections,) = made
        while len(connections) > 1:
            await asyncio.sleep(0)

    serve(body)
