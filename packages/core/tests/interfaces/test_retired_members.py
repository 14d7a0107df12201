"""Members that only Lightning's classes have: overrides are logged, and reading one names its successor."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import TYPE_CHECKING

import pytest
from torch import nn

from dstrat import (
    Callback,
    ClusterEnvironment,
    ModelCheckpoint,
    RichProgressBar,
    SimpleProfiler,
    SingleDeviceStrategy,
    Timer,
)
from dstrat.callbacks import LearningRateFinder
from dstrat.interfaces.retired_members import RetiredMembers
from dstrat.plugins.precision import MixedPrecision

if TYPE_CHECKING:
    from torch import Tensor


def all_subclasses(kind: type) -> set[type]:
    return {kind, *(deeper for each in kind.__subclasses__() for deeper in all_subclasses(each))}


def test_override_of_a_method_that_is_never_called_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Bar(RichProgressBar):
        def configure_columns(self, trainer: object) -> list[object]:
            return []

    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        "Bar.configure_columns has no effect, as Lightning calls it and dstrat does not: theme= has the styles"
        in record.getMessage()
    )


def test_overrides_in_precisions_and_clusters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(MixedPrecision):
        def post_backward(self, tensor: Tensor) -> Tensor:
            return tensor

        def clip_gradients(self, *args: object, **options: object) -> None:
            """A method that is called."""

    class Cluster(ClusterEnvironment):  # type: ignore[misc]  # it has no other method
        def set_global_rank(self, rank: int) -> None: ...

    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(" has no")[0].rpartition(".<locals>.")[2] for text in texts] == [
        "Scaled.post_backward",
        "Cluster.set_global_rank",
    ]


def test_reading_a_missing_member_names_its_successor() -> None:
    class FineTuned(LearningRateFinder):
        pass

    with pytest.raises(AttributeError, match=r"FineTuned has no lr_find.*Tuner\(trainer\)\.lr_find\(module\)"):
        FineTuned().lr_find  # noqa: B018 - it raises
    assert not hasattr(Timer(), "start_time")
    with pytest.raises(AttributeError, match="'Timer' object has no attribute 'starts'"):
        Timer().starts  # noqa: B018 - it raises


def test_a_module_and_callback_in_one_has_its_layers() -> None:
    class Probe(Callback, nn.Module):  # type: ignore[misc]  # both have state_dict
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.layer = nn.Linear(2, 1)

    assert Probe().layer.out_features == 1
    with pytest.raises(AttributeError, match="'Probe' object has no attribute 'layers'"):
        Probe().layers  # noqa: B018 - it raises


def test_the_error_of_a_property_stays_what_it_was() -> None:
    class Best(Callback):
        @property
        def score(self) -> object:
            return None.score  # type: ignore[attr-defined]  # the error that is looked for

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'score'"):
        Best().score  # noqa: B018 - it raises


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (ModelCheckpoint(), "kth_value", "kth_best_model_path"),
        (SimpleProfiler(), "recorded_durations", "totals"),
    ],
)
def test_attributes_of_lightnings_objects_name_their_successors(owner: object, name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"{type(owner).__name__} has no {name}, .*{instead}"):
        getattr(owner, name)
    assert hasattr(owner, instead)


def test_objects_can_be_copied_and_pickled() -> None:
    strategy = copy.deepcopy(SingleDeviceStrategy())
    assert strategy.retired_members == SingleDeviceStrategy.retired_members
    assert isinstance(pickle.loads(pickle.dumps(Timer())), Timer)


def test_no_class_has_a_member_that_it_calls_retired() -> None:
    # Not hasattr: a class that defines one has it in its dictionary.
    defined = {
        f"{kind.__name__}.{name}"
        for kind in all_subclasses(RetiredMembers)
        if kind.__module__.startswith("dstrat")
        for name in kind.retired_members
        if any(name in vars(base) for base in kind.__mro__)
    }
    assert not defined
