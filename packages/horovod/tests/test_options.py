"""The constructor of HorovodStrategy: what it takes, and what it refuses."""

import inspect
import pickle
from datetime import timedelta

import pytest

from dstrat.errors import ConflictError, RequestError
from dstrat_horovod import HorovodStrategy

pytestmark = pytest.mark.without_horovod


def test_the_signature_is_the_known_one_and_horovods_options():
    parameters = inspect.signature(HorovodStrategy).parameters
    assert [(name, parameter.default) for name, parameter in parameters.items()] == [
        ("accelerator", None),
        ("parallel_devices", None),
        ("checkpoint_io", None),
        ("precision_plugin", None),
        ("cluster_environment", None),
        ("compression", "none"),
        ("op", "Average"),
        ("gradient_predivide_factor", 1.0),
        ("num_groups", 0),
        ("groups", None),
        ("sparse_as_dense", False),
        ("timeout", timedelta(seconds=1800)),
        ("start_method", "popen"),
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"op": "Mean"}, RequestError, "op 'Mean' is not one of 'Average', 'Sum', 'Adasum'"),
        ({"compression": "bf16"}, RequestError, "compression 'bf16' is not one of none, fp16, nor a class like"),
        ({"gradient_predivide_factor": 0}, RequestError, "gradient_predivide_factor 0 must be a positive number"),
        (
            {"gradient_predivide_factor": 2.0, "op": "Sum"},
            ConflictError,
            "gradient_predivide_factor=2.0 needs op='average', not op='sum'",
        ),
        ({"num_groups": 2, "groups": 3}, ConflictError, "num_groups=2 and groups=3 say the same: pass one of them"),
        ({"num_groups": -1}, RequestError, "groups -1 must be a number from 1 upwards"),
        ({"groups": "layers"}, RequestError, "groups 'layers' must be a number from 1 upwards, or lists"),
        (
            {"op": "Adasum", "num_groups": 2},
            ConflictError,
            "op='Adasum' combines updates of parameters one by one: leave out groups and num_groups",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, message):
    with pytest.raises(error) as refused:
        HorovodStrategy(**options)
    assert message in str(refused.value)


def test_the_name_of_an_operation_may_have_any_case():
    assert HorovodStrategy(op="adasum").reduction_options.op == "Adasum"


def test_a_strategy_pickles_before_it_trains():
    strategy = pickle.loads(pickle.dumps(HorovodStrategy(compression="fp16", num_groups=3)))
    assert (strategy.reduction_options.compression, strategy.reduction_options.groups) == ("fp16", 3)
