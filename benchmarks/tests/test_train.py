"""What training feeds the model, and that the model it trains is the one that is evaluated."""

from __future__ import annotations

import torch

from benchmarks.testbed.evaluate import run_tokens
from benchmarks.testbed.generator import Shape
from benchmarks.testbed.model import ModelShape, TinyModel, causal_mask, initialise, rotation
from benchmarks.testbed.recipes import Stage
from benchmarks.testbed.tokenizer import BOS, build_vocabulary, piece_ids
from benchmarks.testbed.train import NO_REFERENCE, forward_loss, make_batch, stretched

VOCABULARY = build_vocabulary()
CHUNK_END = piece_ids(["\n"], VOCABULARY)[0]
STAGE = Stage(1, 160, 4, Shape())


def test_positions_jump_at_the_ends_of_chunks_alone() -> None:
    batch = make_batch(Stage(1, 160, 4, Shape(), stretch=3000), 9, VOCABULARY)
    steps = batch.positions.diff(dim=1)
    behind_chunk = batch.tokens[:, :-1] == CHUNK_END
    assert (steps[~behind_chunk] == 1).all()
    assert (steps[behind_chunk] >= 1).all()
    assert (steps > 1).any()
    assert int(batch.positions.max()) < 160 + 3000
    plain = make_batch(STAGE, 9, VOCABULARY)
    assert (plain.positions == torch.arange(160)).all()
    assert torch.equal(plain.tokens, batch.tokens)


def test_stretching_is_reproducible() -> None:
    tokens = torch.tensor([[1, CHUNK_END, 2, CHUNK_END, 3]])
    first, second = (stretched(tokens, CHUNK_END, 50, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, second)


def test_a_reference_is_asked_for_where_it_stands() -> None:
    batch = make_batch(STAGE, 3, VOCABULARY)
    words = {index: word for word, index in VOCABULARY.items()}
    asked = (batch.references != NO_REFERENCE).nonzero().tolist()
    assert asked
    for row, column in asked:
        assert words[int(batch.tokens[row, column - 1])][1:] in ("by", "in", "for", "is", "lies")


def test_what_is_trained_is_what_is_evaluated() -> None:
    shape = ModelShape(vocab_size=len(VOCABULARY), intermediate_size=96, num_hidden_layers=6)
    model = TinyModel(shape)
    initialise(model, 0)
    batch = make_batch(STAGE, 5, VOCABULARY)
    cos, sin = (part[:, None] for part in rotation(shape, batch.positions))
    with torch.no_grad():
        _, hidden = model(batch.tokens, cos, sin, causal_mask(160))
        for row in range(2):
            expected, _ = run_tokens(model, batch.tokens[row], [])
            torch.testing.assert_close(model.lm_head(hidden[row, -1]), expected, rtol=1e-3, atol=1e-4)


def test_the_loss_counts_answers_and_references() -> None:
    shape = ModelShape(vocab_size=len(VOCABULARY), intermediate_size=96, num_hidden_layers=6)
    model = TinyModel(shape)
    initialise(model, 0)
    batch = make_batch(STAGE, 5, VOCABULARY)
    assert batch.tokens[0, 0] == VOCABULARY[BOS]
    done = forward_loss(model, model.lm_head, batch, shape)
    done.loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(done.loss)
    assert all(parameter.grad is not None for parameter in model.model.layers.parameters())
    assert 0 <= done.answers_right <= int(batch.answers.sum())
    assert 0 <= done.references_right <= int((batch.references != NO_REFERENCE).sum())
