"""Rules for namespaces as callers meet them over gRPC."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi import Client
from kintsugi.core.errors import InvalidField, PermissionDenied, ResourceExhausted
from kintsugi.core.namespaces import NamespaceLimits, NamespacePrivacy, NamespaceRules, PrivacyExpert
from kintsugi.gateway.gateway import Gateway
from kintsugi.sdk.types import Key
from tests.fakes.stub_backend import StubDelays
from tests.integration.serving.gateways import Setup, bundled_tokenize, running

TEXT = "The warden of the northern lighthouse keeps a ledger of every ship that passed in the night."
QUESTION = " Who keeps the ledger?"


def ruled(**rules: Any) -> Setup:
    return Setup(gateway={"rules": NamespaceRules(**rules)})


def test_limits_hold_for_every_operation() -> None:
    setup = ruled(limits={"acme": NamespaceLimits(requests_per_s=2)})
    with running(setup) as gateway, Client(gateway.address, "acme") as client:
        calls = [
            lambda: client.generate([TEXT], QUESTION),
            lambda: client.put_chunks([TEXT]),
            lambda: list(client.list_chunks()),
            lambda: client.tokenize([TEXT]),
        ]
        for call in calls:
            call()
        for call in calls:
            with pytest.raises(ResourceExhausted, match="'acme' sends more than 2 requests a second"):
                call()
        with Client(gateway.address, "other") as other:
            for _ in range(6):
                other.tokenize([TEXT])


def test_chunks_that_are_put_cost_their_tokens() -> None:
    setup = ruled(limits={"acme": NamespaceLimits(tokens_per_s=1)})
    with running(setup) as gateway, Client(gateway.address, "acme") as client:
        client.put_chunks([TEXT])
        with pytest.raises(ResourceExhausted, match="tokens a second"):
            client.put_chunks([TEXT + " And another."])


def test_hidden_accounting_is_empty_and_keys_are_no_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gateway, "hides_chunks", lambda *_: True)
    setup = ruled(privacy={"acme": NamespacePrivacy(expert=PrivacyExpert(accounting=False))})
    with running(setup) as gateway, Client(gateway.address, "acme") as client:
        (put,) = client.put_chunks([TEXT])
        answer = client.generate([TEXT], QUESTION, explain=True)
        assert not answer.accounting
        assert answer.usage.cached_tokens == 0
        for key in (put.key, "00" * 32):
            with pytest.raises(PermissionDenied, match="send their texts"):
                client.generate([Key(key)], QUESTION)


def test_a_padded_answer_says_the_time_at_which_it_left() -> None:
    setup = ruled(privacy={"acme": NamespacePrivacy(expert=PrivacyExpert(ttft_step_ms=80))})
    setup.delays = StubDelays(first_token_s=0.01)
    with running(setup) as gateway, Client(gateway.address, "acme") as client:
        assert client.generate([TEXT], QUESTION).ttft_ms == pytest.approx(80, abs=1)


def test_chunks_have_a_multiple_of_tokens_and_prompts_all_of_them() -> None:
    ids = bundled_tokenize()(TEXT)
    length = len(ids) - len(ids) % 8
    assert 0 < length < len(ids)
    setup = ruled(privacy={"acme": NamespacePrivacy(expert=PrivacyExpert(chunk_tokens_multiple=8))})
    with running(setup) as gateway, Client(gateway.address, "acme") as client:
        (put,) = client.put_chunks([TEXT])
        assert put.num_tokens == length
        answer = client.generate([TEXT, "no"], QUESTION)
        assert answer.segments[0].key == put.key
        assert answer.segments[0].end - answer.segments[0].start == length
        assert not answer.segments[1].key
        (request,) = gateway.backend.seen.requests
        whole = [1, *ids, *bundled_tokenize()("no"), *bundled_tokenize()(QUESTION)]
        assert list(request.prompt_token_ids) == whole
        assert answer.accounting["chunks_hit"] == 1
        again = client.generate([Key(put.key)], QUESTION)
        assert again.accounting["chunks_hit"] == 1
        with pytest.raises(InvalidField, match="at least 8"):
            client.put_chunks(["no"])


def test_a_user_reads_what_is_shared_and_stores_apart() -> None:
    setup = ruled(privacy={"team/users/*": NamespacePrivacy(shared="team")})
    with running(setup) as gateway:
        with Client(gateway.address, "team") as team:
            (shared,) = team.put_chunks([TEXT])
        with Client(gateway.address, "team/users/ada") as ada:
            (put,) = ada.put_chunks([TEXT])
            assert not put.new  # shared: nothing to store
            ada.put_chunks([TEXT + " A note of Ada's."])
            ada.generate([Key(shared.key)], QUESTION)
            assert len(list(ada.list_chunks())) == 1
        (request,) = gateway.backend.seen.requests
        assert (request.params.namespace, request.params.shared) == ("team/users/ada", "team")
        with Client(gateway.address, "team/users/bob") as bob:
            assert not list(bob.list_chunks())
            (note,) = bob.put_chunks([TEXT + " A note of Ada's."])
            assert note.new
