"""Machines as units of the exchange: four ranks on two machines."""

import pytest
from packages.bagua.tests import formulas
from packages.bagua.tests.test_formulas import COMPRESSED, EXACT, WARMUP, QAdamNet, SGDNet
from tests.hand_loop import parts, start, train
from tests.ranks import each, in_ranks

from dstrat.errors import RequestError
from dstrat_bagua import BaguaStrategy


class TwoMachines(BaguaStrategy):
    """Ranks of which the first two are on a machine, and the others on another one."""

    @property
    def node_rank(self):
        return int(self.global_rank >= 2)


def trained(cluster, module=SGDNet, **options):
    strategy = TwoMachines(hierarchical=True, **options)
    start(strategy, module(), parts(cluster))
    losses = train(strategy)
    order = 1 if strategy.algorithm.replicas_differ else -1
    weights = formulas.flat([*strategy.module.parameters()][::order])
    strategy.teardown()
    return losses, weights


def of_machines(combine):
    """Return what combines averages of machines."""
    return lambda values: combine([formulas.average(values[:2]), formulas.average(values[2:])])


CASES = {
    "gradient_allreduce": (
        {"algorithm": "gradient_allreduce"},
        lambda: formulas.gradient_formula(4, formulas.average),
        EXACT,
    ),
    "bytegrad": (
        {"algorithm": "bytegrad"},
        lambda: formulas.gradient_formula(4, of_machines(formulas.compressed_average)),
        COMPRESSED,
    ),
    "qadam": (
        {"algorithm": "qadam", "module": QAdamNet},
        lambda: formulas.qadam_formula(4, WARMUP, combine=of_machines(formulas.compressed_average)),
        COMPRESSED,
    ),
    "decentralized": ({"algorithm": "decentralized"}, lambda: formulas.decentralized_formula(4, "all"), EXACT),
    "decentralized in pairs": (  # of machines, of which there are two
        {"algorithm": "decentralized", "peer_selection_mode": "shift_one"},
        lambda: formulas.decentralized_formula(4, "all"),
        EXACT,
    ),
    "low_precision_decentralized": (
        {"algorithm": "low_precision_decentralized"},
        lambda: formulas.low_precision_formula(4, machines=2),
        COMPRESSED,
    ),
}


@pytest.mark.slow
def test_machines_average_inside_and_exchange_as_the_formula_says():
    cases = {name: options for name, (options, _, _) in CASES.items()}
    outcomes = in_ranks(each, 4, function=trained, cases=cases)
    for name, (_, formula, tolerance) in CASES.items():
        losses, weights = formula()
        for rank in range(4):
            found_losses, found_weights = outcomes[rank][name]
            assert found_losses == pytest.approx(losses, rel=tolerance), name
            assert (found_weights - weights[rank]).abs().max() < tolerance * weights[rank].abs().max(), (name, rank)


class UnevenMachines(TwoMachines):
    @property
    def node_rank(self):
        return int(self.global_rank >= 1)


def uneven(cluster):
    strategy = UnevenMachines("bytegrad")
    with pytest.raises(RequestError) as refused:
        start(strategy, SGDNet(), parts(cluster))
    strategy.teardown()
    return str(refused.value)


def test_machines_with_different_numbers_of_ranks_are_refused():
    for message in in_ranks(uneven, 3):
        assert message.startswith("hierarchical=True needs as many ranks on each machine, and they have 1, 2: set")
