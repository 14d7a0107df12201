"""Options: what is refused, and what the plan, the memory and the communication of a job say."""

import dataclasses
import re

import pytest
from tests.hand_loop import BlockNet, parts, start
from tests.ranks import each, in_ranks
from torch import nn

from dstrat import Trainer
from dstrat.builtin.accelerators.cpu import CPUAccelerator
from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.memory import TrainingSize
from dstrat_ddp import DDPStrategy
from dstrat_diloco import DiLoCoStrategy
from dstrat_diloco.groups import divide
from dstrat_diloco.outer import OuterSettings
from dstrat_fsdp import FSDPStrategy

REFUSED = [
    ({"every": 0}, RequestError, "every=0 is not a whole number from 1"),
    ({"every": 2.5}, RequestError, "every=2.5 is not a whole number from 1"),
    ({"groups": 0}, RequestError, "groups=0 is not a whole number from 1, or None"),
    ({"outer_lr": 0}, RequestError, "outer_lr=0 is not above 0: DiLoCo's is 0.7, and 1.0 averages the weights"),
    ({"outer_momentum": 1.0}, RequestError, "outer_momentum=1.0 is not from 0 to below 1"),
    ({"mixing": -0.1}, RequestError, "mixing=-0.1 is not from 0 to below 1"),
    (
        {"delta_dtype": "fp8"},
        RequestError,
        "delta_dtype='fp8' is not 'bfloat16' or 'int8', or None, which sends float32",
    ),
    ({"every": 2, "fragments": 3}, ConflictError, "fragments=3 are more than the every=2 steps"),
    ({"every": 2, "delay": 2}, ConflictError, "delay=2 is not below every=2, after which the fragment is sent again"),
    ({"inner": 3}, MisuseError, "inner=3 is neither the alias nor an instance of a strategy, such as 'fsdp'"),
    ({"inner": "diloco"}, ConflictError, "inner='diloco' cannot train a group of ranks"),
    ({"inner": "dp"}, ConflictError, "inner='dp' cannot train a group of ranks"),
    ({"inner": "horovod"}, Exception, "horovod"),
    (
        {"inner": DDPStrategy(precision_plugin=TruePrecision("32-true"))},
        MisuseError,
        "inner=DDPStrategy has components of its own, such as a precision: give them to the outer one",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_done_is_refused_at_once(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        DiLoCoStrategy(**options)


def refused(cluster, inner):
    with pytest.raises(ConflictError) as error:
        start(DiLoCoStrategy(inner=inner, groups=2), BlockNet(), parts(cluster))
    return str(error.value)


def test_an_inner_strategy_whose_ranks_share_batches_is_refused():
    cases = {inner: {"inner": inner} for inner in ("mesh(tp=2)", "model_parallel(tensor_parallel_size=2)")}
    for found in in_ranks(each, 4, function=refused, cases=cases):
        for message in found.values():
            assert "lets ranks share batches with these options, as tensor and context parallelism do" in message


def test_an_alias_has_options_of_both_strategies():
    strategy = Trainer(
        strategy="diloco(inner=\"fsdp(sharding_strategy='SHARD_GRAD_OP')\", every=7, groups=2)",
        devices=4,
        accelerator="cpu",
    ).strategy
    assert isinstance(strategy, DiLoCoStrategy)
    assert isinstance(strategy.inner, FSDPStrategy)
    assert strategy.inner._sharding_strategy == "SHARD_GRAD_OP"


@pytest.mark.parametrize(
    ("groups", "world_size", "per_machine", "expected"),
    [
        (None, 4, 4, (4, 1)),
        (None, 8, 4, (2, 4)),
        (2, 8, 8, (2, 4)),
        (2, 16, 4, (2, 8)),
        (8, 16, 4, (8, 2)),
        (1, 4, 4, (1, 4)),
    ],
)
def test_groups_are_machines_or_devices_unless_their_number_is_there(groups, world_size, per_machine, expected):
    division = divide(groups, world_size=world_size, ranks_per_machine=per_machine)
    assert (division.num_groups, division.size) == expected


@pytest.mark.parametrize(("groups", "world_size", "per_machine"), [(3, 4, 4), (4, 24, 4), (2, 12, 4)])
def test_groups_of_different_sizes_or_parts_of_machines_are_refused(groups, world_size, per_machine):
    with pytest.raises(RequestError, match=f"groups={groups}"):
        divide(groups, world_size=world_size, ranks_per_machine=per_machine)


def test_the_plan_names_the_groups():
    trainer = Trainer(strategy="diloco(groups=2)", devices=4, accelerator="cpu")
    assert re.search(r"groups +2 of 2 ranks, each by DDPStrategy +asked for", str(trainer.plan))


def test_fragments_are_sent_in_turn_and_each_once_in_a_round():
    settings = OuterSettings(every=10, lr=1.0, momentum=0.0, fragments=3, delay=0, mixing=0.0, delta_dtype=None)
    sent = {step: settings.fragments_sent(step) for step in range(1, 21) if settings.fragments_sent(step)}
    assert sent == {4: [0], 7: [1], 10: [2], 14: [0], 17: [1], 20: [2]}


# Layouts


def size(world_size=4, ranks_per_machine=2):
    module = nn.Linear(1000, 100, bias=False)
    return TrainingSize(
        module=module,
        precision=TruePrecision("32-true"),
        device_type="cpu",
        world_size=world_size,
        ranks_per_machine=ranks_per_machine,
        parameters=400_000,
        trainable_parameters=400_000,
        trainable_numel=100_000,
        largest_parameter=400_000,
        module_buffers=0,
        optimizer_state=800_000,
        optimizer_temporaries=0,
        timeline=((0, 0),),
    )


@pytest.mark.parametrize(("inner", "share"), [("ddp", 1.0), ("fsdp", 0.5)])
def test_a_rank_has_outer_weights_and_momentum_of_what_it_holds(inner, share):
    inner_alone = Trainer(strategy=inner, devices=2, accelerator="cpu").strategy.memory_layout(size(2))
    layout = DiLoCoStrategy(inner=inner).memory_layout(size())
    assert layout.parameters == inner_alone.parameters
    assert layout.buffers - inner_alone.buffers == 2 * share * 400_000
    without = DiLoCoStrategy(inner=inner, outer_momentum=0.0).memory_layout(size())
    assert without.buffers - inner_alone.buffers == share * 400_000


def test_outer_weights_of_offloaded_shards_are_on_the_host():
    training = dataclasses.replace(size(), device_type="cuda", module_buffers=1000)
    of_group = dataclasses.replace(training, world_size=2)
    inner = FSDPStrategy(cpu_offload=True)
    alone, layout = (
        one.memory_layout(sizes) for one, sizes in ((inner, of_group), (DiLoCoStrategy(inner=inner), training))
    )
    shard = 200_000
    assert alone.host == 4 * shard
    assert layout == dataclasses.replace(alone, host=alone.host + 2 * shard + 2 * shard)
    *_, outer = DiLoCoStrategy(inner=inner, every=100).communication_layout(training).collectives
    assert outer.bytes == shard // 100


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("mesh(pp=2)", "compiles training steps with these options, or runs pipelines, and a group cannot be trained"),
        ("mesh(tp=2)", "lets ranks share batches with these options, as tensor and context parallelism do"),
        ("model_parallel(tensor_parallel_size=2)", "lets ranks share batches with these options"),
    ],
)
def test_layouts_that_a_group_cannot_have_are_refused_before_anything_runs(inner, message):
    with pytest.raises(ConflictError, match=message):
        DiLoCoStrategy(inner=inner).check_training(size())
    DiLoCoStrategy(inner="mesh").check_training(size())


@pytest.mark.parametrize("inner", ["ddp", "fsdp"])
def test_what_goes_to_other_groups_is_declared_as_the_mean_of_a_round(inner):
    layout = DiLoCoStrategy(inner=inner, every=100).communication_layout(size())
    *inside, outer = layout.collectives
    assert {one.ranks for one in inside} == {2}
    assert (outer.bytes, outer.ranks, outer.stride) == (2000, 2, 2)  # of 400,000: half of a rank, in 100 steps
    assert outer.messages == 0.01
    assert outer.crosses_machines(2)
    assert not any(one.crosses_machines(2) for one in inside)
    assert "100" in layout.assumption
    compressed = DiLoCoStrategy(inner=inner, every=100, delta_dtype="bfloat16").communication_layout(size())
    assert compressed.collectives[-1].bytes == 1000


class WithStreams(CPUAccelerator):
    has_streams = True


def test_groups_copy_batches_ahead_as_the_inner_strategy_does():
    strategy = DiLoCoStrategy(accelerator=WithStreams())
    strategy.set_components(strategy.components)
    assert strategy.copies_ahead
    assert not strategy.prefetches
