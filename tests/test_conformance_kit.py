"""The conformance kit catches deliberately broken strategies, each by the test that names its fault."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from dstrat.errors import BrokenComponentError
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.component import Component
from dstrat.testing import StrategySuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GOOD = Component(
    kind="strategy",
    alias="good",
    target="tests.broken_strategies.good:Averaging",
    summary="averages gradients after the backward pass",
    options={"start_method": "popen"},
    accelerators=("cpu",),
    starts_processes=True,
    notebook_safe=False,
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A broken strategy, and how the kit tells of it.

    Attributes:
        target: Module and class in tests/broken_strategies.
        test: The standard test that fails.
        words: What its message says.
        case: The test's arguments.
        facts: What the record says otherwise.
    """

    target: str
    test: str
    words: str
    case: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


TWO = {"world_size": 2}
FOUR = {"world_size": 4}
PAIR = {"pair": 2}
PORTABLE = {"world_size": 2, "checkpoint_format": "portable"}
TORCH = {"world_size": 2, "checkpoint_format": "torch"}

AVERAGED = "test_gradients_are_averaged_over_the_ranks"
ACCUMULATED = "test_gradients_are_averaged_over_accumulated_batches"
CLIPPED = "test_clipping_by_norm_comes_after_averaging"
RAISES = "test_a_rank_that_raises_ends_the_job_with_its_own_words"
KEEPS_OPTIMIZER = "test_a_checkpoint_keeps_the_optimizer_state"
RESUMES = "test_resuming_equals_never_having_stopped_bit_for_bit"
GATHERS = "test_all_gather_stacks_in_the_order_of_ranks"
WAITS = "test_barrier_waits_for_every_rank"
RATES = "test_groups_of_parameters_have_the_learning_rates_of_their_scheduler"
SIZES = "test_the_state_for_a_checkpoint_is_no_larger_than_declared"
WRITTEN_ONCE = "test_a_checkpoint_is_written_once_and_every_rank_waits_for_it"

FAULTS = [
    Fault(target="gradients:ForgetsToAverage", test=AVERAGED, case=TWO, words="was not averaged over the ranks"),
    Fault(
        target="gradients:SumsGradients", test=AVERAGED, case=FOUR, words="summed over the ranks instead of averaged"
    ),
    Fault(target="gradients:DividesTwice", test=AVERAGED, case=TWO, words="divided twice by the number of ranks"),
    Fault(
        target="gradients:ScalesTheLossAgain", test=ACCUMULATED, case=TWO, words="divided twice by the number of accum"
    ),
    Fault(target="gradients:LosesWhatWasAccumulated", test=ACCUMULATED, case=TWO, words="accumulated before is lost"),
    Fault(target="gradients:IgnoresClipping", test=CLIPPED, case=TWO, words="was not clipped"),
    Fault(target="gradients:ClipsBeforeAveraging", test=CLIPPED, case=TWO, words="in each rank before it was averaged"),
    Fault(
        target="gradients:IgnoresTheLastGroup",
        test="test_the_last_group_of_an_epoch_may_have_fewer_batches",
        case=TWO,
        words="was dropped",
    ),
    Fault(
        target="gradients:IgnoresTheLastGroup",
        test="test_uneven_groups_are_the_mean_of_their_batches",
        case=TWO,
        words="the last group of an epoch has 2 of 3 batches, the parameters differ",
    ),
    Fault(
        target="gradients:DividesTwice",
        test="test_ranks_with_uneven_samples_take_the_same_steps",
        case=TWO,
        words="samples do not divide into equal batches, the parameters differ",
    ),
    Fault(
        target="gradients:AveragesWholeGroupsOnly",
        test="test_groups_of_a_loader_without_a_length_are_the_mean_of_their_batches",
        case=TWO,
        words="another number of batches, which is not known before, the parameters differ",
    ),
    Fault(
        target="gradients:KeepsItsOwnFirstValues",
        test="test_every_rank_begins_with_the_parameters_of_rank_0",
        case=PAIR,
        words="ranks have other values of the parameter 'layers.0.weight' in optimizer step 1",
    ),
    Fault(
        target="gradients:GivesNothingBack",
        test="test_the_user_gets_the_trained_module_back",
        case=TWO,
        words="are not those at the end of training",
    ),
    Fault(
        target="gradients:OptimizesACopy",
        test="test_optimizers_are_of_the_parameters_that_train",
        words="are not those of the module after setup",
    ),
    Fault(target="checkpoints:SendsTheOptimizerForASave", test=SIZES, case=PAIR, words="a save sends what is divided"),
    Fault(
        target="checkpoints:GathersTheOptimizerForASave", test=SIZES, case=PAIR, words="a save gathers what is divided"
    ),
    Fault(
        target="communication:DeclaresHalfOfItsBytes",
        test="test_a_step_communicates_the_declared_bytes",
        case=PAIR,
        words="kind all_reduce with 1740 bytes .*, and communication_layout declares 870",
    ),
    Fault(
        target="communication:SkipsTheBarrier",
        test="test_barrier_waits_for_every_rank",
        case=TWO,
        words="passed the barrier .* before rank",
    ),
    Fault(target="communication:GathersInItsOwnOrder", test=GATHERS, case=TWO, words="in the wrong order of ranks"),
    Fault(target="communication:GathersFlat", test=GATHERS, case=TWO, words="not the stack"),
    Fault(target="communication:GathersFromOneProcess", test=GATHERS, case=TWO, words="gather_from_processes gave"),
    Fault(
        target="communication:BroadcastsFromRank0",
        test="test_broadcast_sends_the_object_of_the_source_rank",
        case=TWO,
        words="gave rank 0 the object of rank 0",
    ),
    Fault(
        target="communication:SumsForTheMean",
        test="test_reduce_gives_mean_sum_max_and_min",
        case=TWO,
        words="which is the sum",
    ),
    Fault(
        target="communication:ReducesInPlace",
        test="test_reduce_leaves_its_argument_and_other_values_alone",
        case=TWO,
        words="changed the tensor that it was given",
    ),
    Fault(
        target="communication:DecidesAlone",
        test="test_decisions_are_taken_together",
        case=TWO,
        words="reduce_boolean_decision returned",
    ),
    Fault(
        target="communication:CountsItsRankFromOne",
        test="test_each_rank_knows_where_it_is",
        case=TWO,
        words="is_global_zero is False in rank 0",
    ),
    Fault(
        target="communication:SamplesTwice",
        test="test_its_ranks_divide_the_data_among_them",
        case=TWO,
        words="they read 1 of 2 parts of the data",
    ),
    Fault(
        target="communication:SamplesTwice",
        test="test_each_sample_is_used_once_in_an_epoch",
        case=TWO,
        words="32 samples were used more than once and 32 never",
    ),
    Fault(
        target="communication:EvaluatesEverythingEverywhere",
        test="test_validation_counts_each_sample_once",
        case=TWO,
        words="each sample once",
    ),
    Fault(
        target="communication:ListensToEverybody",
        test="test_it_listens_on_the_loopback_only",
        case=PAIR,
        words="listens on every address",
    ),
    Fault(target="checkpoints:LosesTheOptimizer", test=KEEPS_OPTIMIZER, case=TORCH, words="a checkpoint loses it"),
    Fault(
        target="checkpoints:ForgetsToLoadTheOptimizer", test=KEEPS_OPTIMIZER, case=PORTABLE, words="optimizer's state"
    ),
    Fault(
        target="checkpoints:ForgetsToLoadTheWeights",
        test="test_a_checkpoint_keeps_the_weights",
        case=PORTABLE,
        words="does not bring back the weights",
    ),
    Fault(
        target="checkpoints:LosesTheBuffers",
        test="test_batch_norm_takes_the_statistics_of_each_ranks_own_batch",
        case=PAIR,
        words="statistics of a layer of batch norm are not those",
    ),
    Fault(
        target="checkpoints:SavesTheNamesOfItsWrapper",
        test="test_a_checkpoint_goes_on_on_one_device",
        case=TWO,
        words="module.layers",
    ),
    Fault(
        target="checkpoints:DrawsRandomNumbersWhenItBegins",
        test=RESUMES,
        case=TWO,
        words="already draws other random numbers",
    ),
    Fault(
        target="checkpoints:KeepsMomentumToItself", test=RESUMES, case=TWO, words="add what is not saved to state_dict"
    ),
    Fault(
        target="checkpoints:GoesOnWithTheBuffersOfRank0",
        test="test_each_rank_goes_on_with_its_own_statistics_of_batch_norm",
        case=PAIR,
        words="validations after a resume log .* and not",
    ),
    Fault(
        target="processes:LeaksAProcess",
        test="test_no_process_is_left_after_a_training",
        case=PAIR,
        words="still ran after .*sleep 120",
    ),
    Fault(target="processes:SwallowsExceptions", test=RAISES, case=PAIR, words="as if nothing had happened"),
    Fault(
        target="processes:WaitsForTheOthersWhenItBreaks",
        test=RAISES,
        case=PAIR,
        words="it took .* until the job had ended",
    ),
    Fault(
        target="processes:WorksOnce",
        test="test_a_second_fit_in_the_same_processes_equals_the_first",
        case=TWO,
        words="the second fit in one process failed",
    ),
    Fault(
        target="processes:LeavesTheGroupOpen", test="test_teardown_leaves_nothing_open", words="process group is open"
    ),
    Fault(
        target="processes:CannotEndBeforeItHasBegun",
        test="test_it_may_end_before_it_has_begun_and_twice",
        words="on_exception before setup_environment raised AttributeError",
    ),
    Fault(
        target="processes:SetsTheAcceleratorUpTwice",
        test="test_each_part_is_set_up_and_ended_once",
        words="accelerator.setup was called 2 times",
    ),
    Fault(
        target="processes:KeepsTheWrapperAsModule",
        test="test_setup_puts_the_module_on_the_device_and_keeps_it_the_users",
        words="is not the user's module after setup",
    ),
    Fault(target="processes:CannotTravel", test="test_it_can_be_pickled", words="cannot be pickled"),
    Fault(
        target="processes:SharesItsHistory",
        test="test_it_is_constructed_without_touching_anything",
        words="share history",
    ),
    Fault(
        target="good:Averaging",
        test="test_its_notebook_fact_fits_its_start_method",
        facts={"notebook_safe": True},
        words="needs a script",
    ),
    Fault(
        target="good:Averaging",
        test="test_it_starts_processes_as_its_record_says",
        facts={"starts_processes": False},
        words="its record says starts_processes=False, and Averaging has start_method='popen'",
    ),
    Fault(
        target="good:Averaging",
        test="test_its_record_is_complete_and_true",
        facts={"options": {"start_methode": "popen"}, "precisions": ("8-true",)},
        words="names the unknown precision '8-true'.*presets 'start_methode'",
    ),
    Fault(
        target="gradients:SumsAgainWhatWasSummed",
        test=ACCUMULATED,
        case=TWO,
        words="summed again over the ranks with every further batch",
    ),
    Fault(
        target="gradients:HasOneLearningRate",
        test=RATES,
        case=PAIR,
        words="the two groups of parameters have the learning rates",
    ),
    Fault(target="gradients:StepsTheSchedulerInEachRank", test=RATES, case=PAIR, words="stepped once for each optim"),
    Fault(
        target="gradients:KeepsItsOwnBuffers",
        test="test_every_rank_begins_with_the_parameters_of_rank_0",
        case=PAIR,
        words="parameters and buffers of rank 0",
    ),
    Fault(
        target="gradients:AveragesOnlyAfterTheStep",
        test="test_manual_optimization_trains_as_on_one_device",
        case=PAIR,
        words="ranks have other values of the parameter 'layers.0.bias' in optimizer step 2",
    ),
    Fault(
        target="communication:GathersByConcatenation", test=GATHERS, case=TWO, words="for a tensor without dimensions"
    ),
    Fault(
        target="communication:OnlyRank0SkipsTheBarrier",
        test=WAITS,
        case=TWO,
        words="rank 1 of 2 did not get out of a barrier",
    ),
    Fault(target="communication:HoldsOnlyTheOthers", test=WAITS, case=TWO, words="rank 0 of 2 passed the barrier"),
    Fault(
        target="communication:DropsTheLastUnevenBatch",
        test="test_validation_counts_each_sample_once",
        case=TWO,
        words="ran over .* each sample once",
    ),
    Fault(
        target="checkpoints:RestoresTheOptimizerOntoOtherParameters",
        test=KEEPS_OPTIMIZER,
        case=PORTABLE,
        words="does not bring back the optimizer's state",
    ),
    Fault(
        target="checkpoints:GoesOnBeforeTheCheckpointIsThere",
        test=WRITTEN_ONCE,
        case=PAIR,
        words="returned in rank 1 of 2 before the checkpoint was there",
    ),
    Fault(
        target="checkpoints:WritesItInEveryRank", test=WRITTEN_ONCE, case=PAIR, words=r"written by ranks \[0, 1\] of 2"
    ),
    Fault(
        target="processes:SeedsAllRanksAlike",
        test="test_each_rank_keeps_its_own_random_numbers",
        case=PAIR,
        words="draw the same random number",
    ),
    Fault(
        target="processes:KeepsItsHooks",
        test="test_a_trained_module_works_by_itself_and_can_be_trained_again",
        case=PAIR,
        words="without the strategy, raises .* remove them in teardown",
    ),
    Fault(
        target="processes:LeavesItsDtype",
        test="test_teardown_leaves_nothing_open",
        words="default dtype is torch.float64",
    ),
    Fault(
        target="processes:KeepsTheWeightsOfTheEvaluation",
        test="test_a_validation_in_between_leaves_the_training_as_it_was",
        case=PAIR,
        words="other losses, first in batch 2",
    ),
    Fault(
        target="processes:TidiesUpOnlyAfterSuccess",
        test="test_a_fit_after_one_that_broke_is_as_good",
        case=PAIR,
        words="after a fit in which every rank raised, the next one fails .*the engine is busy",
    ),
]


SLOW = ("processes:WaitsForTheOthersWhenItBreaks",)  # which waits until the collective's timeout
CASES = [
    pytest.param(
        fault,
        id=f"{fault.target.partition(':')[2]}-{fault.test}",
        marks=[pytest.mark.slow] if fault.target in SLOW else [],
    )
    for fault in FAULTS
]


def registered(target: str, alias: str, facts: dict[str, Any]) -> type[StrategySuite]:
    """Return a test class for a strategy that is registered in this process."""
    component = replace(_GOOD, alias=alias, target=f"tests.broken_strategies.{target}", **facts)
    get_catalog().register(component, override=True)
    return type("TestBroken", (StrategySuite,), {"alias": alias})


@pytest.fixture
def tidy_catalog() -> Iterator[None]:
    before = get_catalog()._registered
    yield
    get_catalog()._registered = before


def run_standard_test(fault: Fault, folder: Path) -> None:
    suite = registered(fault.target, f"broken_{FAULTS.index(fault)}", fault.facts)
    test = getattr(suite(), fault.test)
    takes_folder = "tmp_path" in test.__code__.co_varnames[: test.__code__.co_argcount]
    test(**fault.case, **({"tmp_path": folder} if takes_folder else {}))


@pytest.mark.parametrize("fault", CASES)
@pytest.mark.usefixtures("tidy_catalog")
def test_a_fault_is_caught_by_the_test_that_names_it(fault: Fault, tmp_path: Path) -> None:
    # A skip is not what catches it; a record that contradicts its class cannot even be registered.
    with pytest.raises((pytest.fail.Exception, pytest.skip.Exception, BrokenComponentError)) as caught:
        run_standard_test(fault, tmp_path)
    message = " ".join(str(caught.value).split())
    assert re.search(fault.words, message), str(caught.value)
