"""The logits processors with which requests of one batch sample each in their own way."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import stats

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.transformers


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """Imported only for these tests: it takes seconds, in every process that collects tests."""
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def sampling(torch: ModuleType) -> ModuleType:
    """The processors, whose module needs torch."""
    return importlib.import_module("gapmeter.servers.transformers.sampling")


def _request(position: int = 10, **arguments: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(position_offset=position, logit_processor_kwargs=arguments))


def _run(processor: Any, requests: list[Any], scores: Tensor) -> Tensor:
    argument = processor.prepare_tensor_args(requests)
    storage = argument.new_full((16,), 77)  # longer than the batch, as Transformers' own
    storage[: len(argument)] = argument
    return processor(scores, storage)


def test_draws_follow_the_softmax_of_logits_over_temperature(torch: ModuleType, sampling: ModuleType) -> None:
    temperature, draws = 0.7, 20_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    keys = torch.tensor([sampling.noise_key(3, position) for position in range(draws)], dtype=torch.int32)
    drawn = torch.argmax(logits / temperature + sampling.gumbel(keys, 5), dim=-1)
    expected = torch.softmax(logits / temperature, dim=-1).numpy().astype(float) * draws
    counts = np.bincount(drawn.numpy(), minlength=5)
    assert stats.chisquare(counts, expected / expected.sum() * draws).pvalue > 0.001


def test_neighboring_draws_do_not_depend_on_each_other(torch: ModuleType, sampling: ModuleType) -> None:
    keys = torch.tensor([sampling.noise_key(3, position) for position in range(4000)], dtype=torch.int32)
    noise = sampling.gumbel(keys, 2).numpy()
    assert abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(noise[:, 0], noise[:, 1])[0, 1]) < 0.06


def test_noise_depends_on_seed_and_position_and_on_nothing_else_in_the_batch(
    torch: ModuleType, sampling: ModuleType
) -> None:
    scores = torch.zeros(3, 50)
    mine, other = _request(temperature=1.0, seed=1), _request(temperature=1.0, seed=2)
    together = _run(sampling.Noise(graphs=False), [other, mine, other], scores)
    alone = _run(sampling.Noise(graphs=False), [mine], scores[:1])
    later = _run(sampling.Noise(graphs=False), [_request(11, temperature=1.0, seed=1)], scores[:1])
    assert torch.equal(together[1], alone[0]) and torch.equal(together[0], together[2])
    assert not torch.equal(together[0], together[1]) and not torch.equal(alone, later)


@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1, -(1 << 63)])
def test_every_seed_gives_a_key_that_is_not_the_one_for_greedy(sampling: ModuleType, seed: int) -> None:
    assert all(0 < sampling.noise_key(seed, position) < 1 << 31 for position in range(1000))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_greedy_request_keeps_its_logits_beside_one_that_samples(
    torch: ModuleType, sampling: ModuleType, graphs: bool
) -> None:
    scores = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    greedy, hot = _request(temperature=0.0, seed=1), _request(temperature=0.5, seed=1)
    assert torch.equal(_run(sampling.Noise(graphs), [greedy, hot], scores)[0], scores[0])
    assert torch.equal(_run(sampling.Temperature(graphs), [greedy, hot], scores), scores / torch.tensor([[1.0], [0.5]]))
    assert torch.equal(_run(sampling.Noise(graphs), [greedy, greedy], scores), scores)


def test_a_batch_that_wants_nothing_costs_nothing(torch: ModuleType, sampling: ModuleType) -> None:
    scores = torch.zeros(1, 4)
    for processor in (sampling.Noise(False), sampling.Temperature(False), sampling.MinTokens(False, [2])):
        assert _run(processor, [_request(temperature=0.0, seed=1, min_length=10)], scores) is scores


@pytest.mark.parametrize("graphs", [False, True])
def test_the_end_is_forbidden_until_the_fewest_tokens_are_there(
    torch: ModuleType, sampling: ModuleType, graphs: bool
) -> None:
    scores = torch.arange(8.0).reshape(2, 4)
    before, after = _request(9, min_length=10), _request(10, min_length=10)
    result = _run(sampling.MinTokens(graphs, [1, 3]), [before, after], scores)
    assert result[0].tolist() == [0.0, -torch.inf, 2.0, -torch.inf]
    assert torch.equal(result[1], scores[1]) and scores[0, 1] == 1.0


def test_a_captured_graph_copies_nothing_from_the_host(torch: ModuleType, sampling: ModuleType) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class FromTheHost(TorchDispatchMode):
        """What is made of Python's values, which a captured graph could not copy to its device."""

        def __init__(self) -> None:
            super().__init__()
            self.copied: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.ops.aten.lift_fresh.default, torch.ops.aten._to_copy.default) and args[0].dim():
                self.copied.append(str(function))
            return function(*args, **(kwargs or {}))

    scores, argument = torch.randn(3, 50), torch.tensor([1, 0, 1], dtype=torch.int32)
    for processor in (sampling.Temperature(True), sampling.MinTokens(True, [2, 7])):
        with FromTheHost() as seen:
            processor(scores, argument)
        assert not seen.copied, processor
