"""What BaguaStrategy's constructor and its algorithms take, and what they refuse."""

import inspect
import pickle
from datetime import timedelta

import pytest
import torch
from tests.hand_loop import Net, parts, start
from tests.ranks import each, in_ranks

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat_bagua import (
    AsyncModelAverageAlgorithm,
    BaguaStrategy,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)

ALGORITHMS = {
    "gradient_allreduce": (GradientAllReduceAlgorithm, {"hierarchical": False, "average": True}),
    "bytegrad": (ByteGradAlgorithm, {"hierarchical": True, "average": True}),
    "qadam": (QAdamAlgorithm, {"q_adam_optimizer": None, "hierarchical": True}),
    "decentralized": (
        DecentralizedAlgorithm,
        {"hierarchical": True, "peer_selection_mode": "all", "communication_interval": 1},
    ),
    "low_precision_decentralized": (
        LowPrecisionDecentralizedAlgorithm,
        {"hierarchical": True, "communication_interval": 1},
    ),
    "async": (
        AsyncModelAverageAlgorithm,
        {"peer_selection_mode": "all", "sync_interval_ms": 500, "warmup_steps": 0},
    ),
}


def test_the_signature_is_that_of_lightning_and_what_every_strategy_has():
    parameters = inspect.signature(BaguaStrategy).parameters
    assert [(name, parameter.default) for name, parameter in parameters.items()] == [
        ("algorithm", "gradient_allreduce"),
        ("flatten", True),
        ("accelerator", None),
        ("parallel_devices", None),
        ("cluster_environment", None),
        ("checkpoint_io", None),
        ("precision_plugin", None),
        ("process_group_backend", None),
        ("timeout", timedelta(seconds=1800)),
        ("start_method", "popen"),
        ("find_unused_parameters", False),
        ("bagua_kwargs", inspect.Parameter.empty),
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_baguas_options_and_pickles(name):
    cls, options = ALGORITHMS[name]
    assert {key: one.default for key, one in inspect.signature(cls).parameters.items()} == options
    strategy = pickle.loads(pickle.dumps(BaguaStrategy(name)))
    assert type(strategy.algorithm) is cls
    assert strategy.replicates_state == (not cls.replicas_differ)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"algorithm": "byte_grad"}, RequestError, "did you mean 'bytegrad'?"),
        ({"algorithm": "zzz"}, RequestError, "algorithm 'zzz' is not one of async, bytegrad, decentralized"),
        ({"algorithm": 3}, MisuseError, "algorithm 3 must be an instance of dstrat_bagua.Algorithm, or one of async"),
        ({"algorithm": "bytegrad", "hierarchial": True}, MisuseError, "did you mean 'hierarchical'?"),
        ({"algorithm": "bytegrad", "flaten": True}, MisuseError, "did you mean 'flatten'?"),
        ({"sync_interval_ms": 3}, MisuseError, "which neither it nor the algorithm 'gradient_allreduce' has; it has"),
        (
            {"algorithm": ByteGradAlgorithm(), "average": True},
            ConflictError,
            "got 'average' beside an instance of Byte",
        ),
        ({"flatten": "yes"}, MisuseError, "flatten 'yes' must be True or False"),
        ({"algorithm": "bytegrad", "hierarchical": 1}, MisuseError, "hierarchical 1 must be True or False"),
        (
            {"algorithm": "decentralized", "peer_selection_mode": "shift_on"},
            RequestError,
            "peer_selection_mode 'shift_on' is not 'all' or 'shift_one'; did you mean 'shift_one'?",
        ),
        ({"algorithm": "async", "peer_selection_mode": "ring"}, RequestError, "'ring' is not 'all'"),
        (
            {"algorithm": "decentralized", "communication_interval": 0},
            RequestError,
            "communication_interval 0 must be a whole number of optimizer steps, at least 1",
        ),
        ({"algorithm": "async", "sync_interval_ms": 0.5}, RequestError, "0.5 must be a whole number of milliseconds"),
        ({"algorithm": "async", "warmup_steps": -1}, RequestError, "warmup_steps -1 must be a whole number"),
        ({"algorithm": "qadam", "q_adam_optimizer": "adam"}, MisuseError, "'adam' must be a QAdamOptimizer, or left"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, message):
    with pytest.raises(error) as refused:
        BaguaStrategy(**options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 0}, "warmup_steps 0 must be a whole number of optimizer steps, at least 1"),
        ({"lr": -1.0}, "lr -1.0 of QAdamOptimizer must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\) of QAdamOptimizer must be two numbers from 0 to below 1"),
        ({"eps": -1}, "eps -1 of QAdamOptimizer must be at least 0"),
        ({"weight_decay": -1}, "weight_decay -1 of QAdamOptimizer must be at least 0"),
    ],
)
def test_numbers_of_the_optimizer_are_checked(options, message):
    with pytest.raises(RequestError, match=message):
        QAdamOptimizer([torch.zeros(1, requires_grad=True)], **options)


class ComplexNet(Net):
    def __init__(self):
        super().__init__()
        self.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class PartlyOptimized(Net):
    def configure_optimizers(self):
        return QAdamOptimizer(self.layers[0].parameters())


def refusal(cluster, module=Net, **options):
    strategy = BaguaStrategy(**options)
    try:
        start(strategy, module(), parts(cluster))
    except (MisuseError, RequestError) as error:
        return str(error)
    finally:
        strategy.teardown()
    return "accepted"


REFUSED = {
    "another optimizer": (
        {"algorithm": "qadam"},
        "algorithm 'qadam' needs one QAdamOptimizer, and configure_optimizers returned Adam: return dstrat_bagua.QAdam",
    ),
    "some parameters": ({"algorithm": "qadam", "module": PartlyOptimized}, "QAdamOptimizer lacks layers.2.weight, "),
    "complex numbers": (
        {"algorithm": "bytegrad", "module": ComplexNet},
        "algorithm 'bytegrad' compresses real numbers, and 'phase' has the dtype torch.complex64",
    ),
    "three ranks in pairs": (
        {"algorithm": "decentralized", "peer_selection_mode": "shift_one", "hierarchical": False},
        "peer_selection_mode 'shift_one' pairs ranks, and there are 3: use an even number, or peer_selection",
    ),
    "three ranks in a ring": ({"algorithm": "low_precision_decentralized", "hierarchical": False}, "accepted"),
}


def test_what_an_algorithm_cannot_serve_is_refused_on_every_rank():
    cases = {name: options for name, (options, _) in REFUSED.items()}
    for messages in in_ranks(each, 3, function=refusal, cases=cases):
        for name, (_, words) in REFUSED.items():
            assert words in messages[name], name
