"""Each algorithm gives what its formula gives, written plainly with all ranks in one process."""

import pytest
import torch
from packages.bagua.tests import formulas
from tests.hand_loop import Net, parts, start, train
from tests.ranks import each, in_ranks

from dstrat_bagua import BaguaStrategy, QAdamOptimizer

WARMUP = 5
EXACT = 1e-5
COMPRESSED = 2e-5


class SGDNet(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class QAdamNet(Net):
    def configure_optimizers(self):
        return QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=WARMUP)


def trained(cluster, module=SGDNet, **options):
    """Return the losses, and the weights of this rank, in the order of the formulas."""
    strategy = BaguaStrategy(**options)
    start(strategy, module(), parts(cluster))
    losses = train(strategy)
    order = -1 if strategy.algorithm.exchanges_gradients else 1
    weights = formulas.flat([*strategy.module.parameters()][::order])
    strategy.teardown()
    return losses, weights


FLAT = {"hierarchical": False}
CASES = {
    "gradient_allreduce": ({"algorithm": "gradient_allreduce"}, EXACT),
    "gradient_allreduce, copied back": ({"algorithm": "gradient_allreduce", "flatten": False}, EXACT),
    "gradient_allreduce, summed": ({"algorithm": "gradient_allreduce", "average": False}, EXACT),
    "bytegrad": ({"algorithm": "bytegrad", **FLAT}, COMPRESSED),
    "bytegrad, summed": ({"algorithm": "bytegrad", "average": False, **FLAT}, COMPRESSED),
    "qadam": ({"algorithm": "qadam", "module": QAdamNet, **FLAT}, COMPRESSED),
    "decentralized": ({"algorithm": "decentralized", **FLAT}, EXACT),
    "decentralized, every third step": ({"algorithm": "decentralized", "communication_interval": 3, **FLAT}, EXACT),
    "decentralized in pairs": ({"algorithm": "decentralized", "peer_selection_mode": "shift_one", **FLAT}, EXACT),
    "decentralized in pairs, every second step": (
        {"algorithm": "decentralized", "peer_selection_mode": "shift_one", "communication_interval": 2, **FLAT},
        EXACT,
    ),
    "low_precision_decentralized": ({"algorithm": "low_precision_decentralized", **FLAT}, COMPRESSED),
    "low_precision_decentralized, every second step": (
        {"algorithm": "low_precision_decentralized", "communication_interval": 2, **FLAT},
        COMPRESSED,
    ),
    "async in its warm-up": ({"algorithm": "async", "warmup_steps": 100}, EXACT),
}


def formula(name, size):
    options = CASES[name][0]
    algorithm, interval = options["algorithm"], options.get("communication_interval", 1)
    scale = 1 if options.get("average", True) else size
    if algorithm in ("gradient_allreduce", "async"):
        return formulas.gradient_formula(size, lambda gradients: formulas.average(gradients) * scale)
    if algorithm == "bytegrad":
        return formulas.gradient_formula(size, lambda gradients: formulas.compressed_average(gradients) * scale)
    if algorithm == "qadam":
        return formulas.qadam_formula(size, WARMUP)
    if algorithm == "decentralized":
        return formulas.decentralized_formula(size, options.get("peer_selection_mode", "all"), interval)
    return formulas.low_precision_formula(size, interval)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_training_is_that_of_the_formula(size):
    cases = {name: options for name, (options, _) in CASES.items()}
    outcomes = in_ranks(each, size, function=trained, cases=cases)
    for name, (_, tolerance) in CASES.items():
        losses, weights = formula(name, size)
        for rank in range(size):
            found_losses, found_weights = outcomes[rank][name]
            assert found_losses == pytest.approx(losses, rel=tolerance), name
            difference = (found_weights - weights[rank]).abs().max() / weights[rank].abs().max()
            assert difference < tolerance, (name, rank)


def test_what_is_lossy_differs_from_what_is_not():
    exact, _ = formula("gradient_allreduce", 2)
    for name in ("bytegrad", "low_precision_decentralized", "decentralized in pairs, every second step"):
        assert formula(name, 2)[0] != pytest.approx(exact, rel=COMPRESSED), name
