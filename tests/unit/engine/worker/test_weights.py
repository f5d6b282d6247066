"""What counts as other weights than an engine started with, on toy modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from kintsugi.engine.worker.weights import (
    SAMPLES_MIN,
    LoadedWeights,
    ParameterLocation,
    Snapshot,
    difference,
    sample,
)
from tests.fakes.pretend_cuda import CUDA, PretendCuda

ROWS, COLUMNS = 512, 384


class Toy(nn.Module):
    """A parameter, a tied one, an empty one as a backend leaves that repacks, a scalar, and a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.inner = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
        self.inner.weight = parameter(torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16))
        self.tied = nn.Module()
        self.tied.weight = self.inner.weight
        self.repacked = parameter(torch.empty(0))
        self.scale = parameter(torch.tensor(float("nan")))
        self.register_buffer("seen", torch.zeros(3))

    def load_weights(self, weights: dict[str, Tensor]) -> set[str]:
        """Keep the weights where a parameter does not show them."""
        self.__dict__["packed"] = weights
        return set(weights)


def parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def loaded(toy: Toy) -> Iterator[LoadedWeights]:
    loaded = LoadedWeights(toy)
    assert loaded.check() is None
    yield loaded
    loaded.close()


def sleep_and_wake(toy: Toy) -> None:
    """As sleep level 1 does: the bytes come back to where they were, behind torch's back."""
    memory = toy.inner.weight.data.view(torch.uint8).numpy()
    kept = memory.copy()
    memory[:] = 0
    memory[:] = kept


def discard(toy: Toy) -> None:
    """As sleep level 2 does."""
    toy.inner.weight.data.view(torch.uint8).numpy()[:] = 0


def train_one_step(toy: Toy) -> None:
    """As vLLM's loaders write, on one value in twenty."""
    weight = toy.inner.weight.data
    chosen = torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) < 0.05
    weight.copy_(torch.where(chosen, weight + 1, weight))


def write_one_value(toy: Toy) -> None:
    toy.inner.weight[3, 5] = 9.0


def run_on(toy: Toy) -> None:
    toy.inner(torch.ones(2, COLUMNS, dtype=torch.bfloat16))
    toy.seen += 1


def move(toy: Toy) -> None:
    toy.inner.weight.data = toy.inner.weight.data.clone()


def replace(toy: Toy) -> None:
    toy.inner.weight = parameter(toy.inner.weight.clone())


def remove(toy: Toy) -> None:
    del toy.inner.weight


def reload(toy: Toy) -> None:
    assert toy.load_weights({"repacked": torch.ones(4)}) == {"repacked"}


@pytest.mark.parametrize("act", [sleep_and_wake, run_on])
def test_what_leaves_the_weights_alone_is_no_change(
    toy: Toy, loaded: LoadedWeights, act: Callable[[Toy], None]
) -> None:
    act(toy)
    assert loaded.check() is None


@pytest.mark.parametrize(
    ("act", "change"),
    [
        (discard, "values of parameters differ"),
        (train_one_step, "values of parameters differ"),
        (write_one_value, "inner.weight was written or replaced"),
        (move, "inner.weight was written or replaced"),
        (replace, "inner.weight was written or replaced"),
        (remove, "parameters cannot be compared: KeyError: 'weight'"),
        (reload, "load_weights was called"),
    ],
)
def test_other_weights_are_a_change_for_good(
    toy: Toy, loaded: LoadedWeights, act: Callable[[Toy], None], change: str
) -> None:
    act(toy)
    assert loaded.check() == change
    if "weight" in toy.inner._parameters:
        sleep_and_wake(toy)
    assert loaded.check() == change


def test_a_load_that_fails_midway_is_a_change(toy: Toy) -> None:
    def broken(weights: dict[str, Tensor]) -> set[str]:
        raise OSError("by the test")

    toy.__dict__["load_weights"] = broken
    loaded = LoadedWeights(toy)
    with pytest.raises(OSError, match="by the test"):
        toy.load_weights({})
    assert loaded.check() == "load_weights was called"


def test_on_a_gpu_one_look_is_on_its_way_and_another_at_each_end_of_a_pass(toy: Toy) -> None:
    with PretendCuda() as device:
        loaded = LoadedWeights(toy, CUDA)
        device.clear()
        device.is_behind = True
        for _ in range(5):
            assert loaded.check() is None
        discard(toy)
        assert (loaded.check(), len(loaded._looks)) == (None, 1)
        loaded.look()
        assert (loaded.compare(), len(loaded._looks)) == (None, 2)
        device.is_behind = False
        assert loaded.compare() == "values of parameters differ"
        assert loaded.check() == "values of parameters differ"
        assert not device.syncs
        loaded.close()


def test_closed_it_leaves_the_model_as_it_was(toy: Toy) -> None:
    before = toy.load_weights
    loaded = LoadedWeights(toy)
    assert toy.load_weights != before
    loaded.close()
    loaded.close()
    assert toy.load_weights == before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS),
        torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).t(),
        torch.arange(ROWS * COLUMNS).view(8, ROWS // 8, COLUMNS),
        torch.arange(10 * ROWS * COLUMNS)[ROWS * COLUMNS : 2 * ROWS * COLUMNS].view(ROWS, COLUMNS),
        torch.arange(SAMPLES_MIN - 1),
        torch.tensor(7),
        torch.tensor(7).expand(4, 4),
    ],
    ids=["matrix", "transposed", "stacked", "part of another", "short", "scalar", "expanded"],
)
def test_a_sample_lies_inside_its_tensor_in_many_rows_and_columns(tensor: Tensor) -> None:
    values = sample(tensor)
    unique = set(values.tolist())
    assert unique <= set(tensor.flatten().tolist())
    assert len(unique) >= min(SAMPLES_MIN, len(set(tensor.flatten().tolist())))
    if tensor.numel() == ROWS * COLUMNS:
        assert len({value % COLUMNS for value in unique}) > COLUMNS / 2
        assert len({value // COLUMNS for value in unique}) > ROWS / 4


def test_snapshots_are_compared_bit_for_bit() -> None:
    place = ParameterLocation("w", 1, (2,), 0)
    nans = sample(torch.full((2,), float("nan"), dtype=torch.bfloat16))
    before = Snapshot((place,), (nans,))
    assert difference(before, Snapshot((place,), (nans.clone(),))) is None
    assert difference(before, Snapshot((place,), (nans ^ 1,))) == "values of parameters differ"
    moved = ParameterLocation("w", 2, (2,), 0)
    assert difference(before, Snapshot((moved,), (nans,))) == "w was written or replaced"
