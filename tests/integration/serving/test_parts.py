"""Two tenants of one namespace that send the same texts, through gateway and store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.namespaces import NamespacePrivacy, NamespaceRules, PrivacyExpert
from kintsugi.sdk.client import Client, ClientOptions
from kintsugi.sdk.types import Key
from tests.integration.serving.gateways import Running, Setup, running

PASSAGES = ["First passage, of a handful of words.", "Second passage, of some other words."]
QUESTION = "\nQuestion: which?\nAnswer:"


@pytest.fixture
def gateway() -> Iterator[Running]:
    with running() as started:
        yield started


@contextmanager
def tenant(gateway: Running, name: str | None, session: str | None = None) -> Iterator[Client]:
    options = ClientOptions(tenant=name, session=session)
    with Client(gateway.address, "docs", options=options) as client:
        yield client


def hits(client: Client) -> int:
    answer = client.generate(PASSAGES, QUESTION, max_tokens=1)
    return int(answer.accounting["chunks_hit"])


def test_nothing_crosses_between_tenants_that_send_the_same(gateway: Running) -> None:
    with tenant(gateway, "acme") as acme, tenant(gateway, "beta") as beta, tenant(gateway, None) as base:
        puts = acme.put_chunks(PASSAGES)
        assert [hits(one) for one in (acme, beta, base)] == [2, 0, 0]
        assert beta.get_chunk(puts[0].key) is None
        assert list(beta.list_chunks()) == list(base.list_chunks()) == []
        assert not beta.delete_chunk(puts[0].key)
        (theirs, _) = beta.put_chunks(PASSAGES)
        assert theirs.state == "stored", "computed anew: that it was there would tell"
        assert theirs.key != puts[0].key
        with pytest.raises(Exception, match="not known"):
            beta.generate([Key(puts[0].key)], QUESTION)
    salts = {request.params.namespace for request in gateway.backend.seen.requests}
    assert salts == {"docs", "docs/-/acme", "docs/-/beta"}


def test_sessions_of_a_tenant_are_apart_too(gateway: Running) -> None:
    with tenant(gateway, "acme", "one") as one, tenant(gateway, "acme", "two") as two:
        one.put_chunks(PASSAGES)
        assert [hits(client) for client in (one, two)] == [2, 0]


def test_a_rule_lets_parts_use_their_base() -> None:
    expert = PrivacyExpert(learn=False)
    rules = NamespaceRules(privacy={"docs/-/*": NamespacePrivacy(shared="docs", expert=expert)})
    with (
        running(Setup(gateway={"rules": rules})) as gateway,
        tenant(gateway, None) as base,
        tenant(gateway, "acme") as acme,
    ):
        base.put_chunks(PASSAGES)
        acme.generate(PASSAGES, QUESTION, max_tokens=1)
        params = gateway.backend.seen.requests[-1].params
        assert (params.shared, params.learn) == ("docs", False)
        assert [put.state for put in acme.put_chunks(PASSAGES)] == ["present", "present"]


def test_erasing_a_namespace_erases_its_parts_and_no_other_tenant(gateway: Running) -> None:
    with (
        tenant(gateway, "acme") as acme,
        tenant(gateway, "acme", "one") as session,
        tenant(gateway, "beta") as beta,
        tenant(gateway, None) as base,
    ):
        for client in (acme, session, beta, base):
            client.put_chunks(PASSAGES)
        assert acme.erase_namespace().deleted
        assert gateway.gateway.known._table.parts("docs") == ["docs/-/beta"]
        assert [hits(client) for client in (acme, session, beta, base)] == [0, 0, 2, 2]
        base.erase_namespace()
        assert gateway.gateway.known._table.parts("docs") == []
        assert [hits(client) for client in (beta, base)] == [0, 0]


def test_a_bad_tenant_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(InvalidField, match="tenant: must"):
        Client("127.0.0.1:1", "docs", options=ClientOptions(tenant="a/b"))
