"""What is learnt of a loaded model as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kintsugi.core.errors import NotBlendable
from kintsugi.engine.worker import anatomy
from kintsugi.engine.worker.anatomy import _find_on_every_rank, _num_positions, _total_heads
from kintsugi.engine.worker.rotation import UNROTATED


class Rotation(nn.Module):
    def __init__(self, positions: int) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.zeros(positions, 4), persistent=False)


def model_of(max_model_len: int, *tables: int) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
    root = nn.Sequential(nn.Linear(1, 1), *(Rotation(length) for length in tables))
    return SimpleNamespace(vllm_config=config, root=root)


def test_a_rotation_is_known_at_every_position_of_a_prompt() -> None:
    assert _num_positions(model_of(100)) == 100
    assert _num_positions(model_of(100, 4096, 100)) == 100


def test_a_table_that_ends_before_the_longest_prompt_is_declined() -> None:
    """vLLM's table of a dynamic NTK scaling has the length that the model was trained for."""
    with pytest.raises(NotBlendable, match="rotation table of 100 positions") as raised:
        _num_positions(model_of(101, 4096, 100))
    assert raised.value.reason == "rope_length"
    assert "set max_model_len to at most the length that the model was trained for" in str(raised.value)


def test_a_rotation_that_one_rank_does_not_find_is_declined_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that went on would wait for it for ever."""
    finder: Any = SimpleNamespace(find=lambda _layer: UNROTATED)
    monkeypatch.setattr(anatomy, "is_so_on_any_rank", lambda flag: flag)
    assert _find_on_every_rank(finder, 3) is UNROTATED
    monkeypatch.setattr(anatomy, "is_so_on_any_rank", lambda _flag: True)
    with pytest.raises(NotBlendable, match="layer 3 has keys without a known rotation on another rank"):
        _find_on_every_rank(finder, 3)


def test_a_rank_without_the_rotation_tells_the_others_before_it_declines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []
    mine = NotBlendable("rope", "found here")

    def fail(_layer: int) -> None:
        raise mine

    def tell(flag: bool) -> bool:
        told.append(flag)
        return flag

    finder: Any = SimpleNamespace(find=fail)
    monkeypatch.setattr(anatomy, "is_so_on_any_rank", tell)
    with pytest.raises(NotBlendable) as raised:
        _find_on_every_rank(finder, 0)
    assert raised.value is mine
    assert told == [True]


@pytest.mark.parametrize(
    ("own", "ranks", "of_layer", "of_config", "total"),
    [
        (3, 1, None, 8, 3),
        (4, 2, 8, 8, 8),
        (1, 2, 2, 8, 2),
        (1, 4, 2, 8, 2),
        (4, 2, None, 8, 8),
        (1, 4, None, 1, 1),
    ],
    ids=["one rank", "all", "fewer than in other layers", "shared by ranks", "config alone", "one head"],
)
def test_the_heads_of_a_layer_are_counted_over_all_ranks(
    monkeypatch: pytest.MonkeyPatch, own: int, ranks: int, of_layer: int | None, of_config: int, total: int
) -> None:
    monkeypatch.setattr(anatomy, "rank_and_size", lambda: (0, ranks))
    assert _total_heads(*sharded(own, of_layer, of_config)) == total


def test_heads_that_fit_no_total_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy, "rank_and_size", lambda: (0, 2))
    with pytest.raises(NotBlendable, match=r"3 KV heads on each of 2 ranks, .* \[4, 8\]"):
        _total_heads(*sharded(3, 4, 8))


def sharded(own: int, of_layer: int | None, of_config: int) -> tuple[Any, Any]:
    """A model and a layer with a projection as vLLM has it."""
    module: Any = nn.Sequential(nn.Linear(1, 1))
    if of_layer is not None:
        module[0].total_num_kv_heads = of_layer
    config = SimpleNamespace(get_total_num_kv_heads=lambda: of_config)
    model = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
    return model, SimpleNamespace(kv=SimpleNamespace(heads=own), module=module)
