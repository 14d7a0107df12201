"""Memory on the host, and copies from and to it, of what DeepSpeed offloads."""

import pytest
from torch import nn

from dstrat.builtin.precision.true import TruePrecision
from dstrat.interfaces.memory import TrainingSize
from dstrat_deepspeed import DeepSpeedStrategy

SIZE = 4_000_000  # bytes of the parameters
SHARD = SIZE // 2
OPTIMIZER = {"offload_optimizer": True}
PARAMETERS = {**OPTIMIZER, "offload_parameters": True}


def layouts(batches=1, device_type="cuda", **options):
    """Return what a rank of two has and communicates, with so many batches of a step."""
    training = TrainingSize(
        module=nn.Linear(1000, 1000, bias=False),
        precision=TruePrecision("32-true"),
        device_type=device_type,
        world_size=2,
        ranks_per_machine=2,
        parameters=SIZE,
        trainable_parameters=SIZE,
        trainable_numel=SIZE // 4,
        largest_parameter=SIZE,
        module_buffers=1000,
        optimizer_state=2 * SIZE,
        optimizer_temporaries=0,
        timeline=((0, 0),),
        accumulate_grad_batches=batches,
    )
    strategy = DeepSpeedStrategy(**options)
    return strategy.memory_layout(training), strategy.communication_layout(training)


@pytest.mark.parametrize(
    ("stage", "options", "buffers"),
    [(1, OPTIMIZER, SIZE), (2, OPTIMIZER, SIZE), (3, OPTIMIZER, 0), (3, PARAMETERS, SHARD)],
)
def test_the_host_has_copies_gradients_state_and_buffers(stage, options, buffers):
    memory, _ = layouts(stage=stage, **options)
    # Copies in float32, their gradients, two tensors of state, and a shard that is copied to or from the device.
    assert memory.host == 5 * SHARD + buffers
    accumulating, _ = layouts(stage=stage, batches=4, **options)
    assert accumulating.host - memory.host == (SHARD if stage < 3 else 0)
    assert (memory.gradients, memory.optimizer_state) == (0, 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_earlier_batches_are_beside_activations(stage):
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "overlap_comm": False}}
    one, _ = layouts(config=config)
    two, _ = layouts(batches=2, config=config)
    if stage == 2:  # which keeps those of each batch that have been reduced
        assert two.step_buffers - one.step_buffers == two.optimizer_temporaries - one.optimizer_temporaries == SHARD
    else:  # which reduce after the last batch
        assert (one.gradients, one.accumulated, two.accumulated) == (SIZE, 0, SIZE)


def test_stage_1_reduces_in_the_last_backward_pass_where_that_overlaps():
    one, _ = layouts(stage=1)
    two, _ = layouts(stage=1, batches=2)
    assert (one.gradients, one.accumulated, two.accumulated) == (SHARD, 0, SIZE)


def test_buffers_of_the_module_are_on_the_device():
    memory, _ = layouts(stage=3, **PARAMETERS)
    assert memory.parameters == 1000


@pytest.mark.parametrize(("stage", "copies"), [(1, (0, 0, 0)), (2, (0, 1, 5)), (3, (0, 2, 6))])
def test_gradients_of_further_batches_go_to_the_host_and_back(stage, copies):
    for batches, shards in zip((1, 2, 4), copies, strict=True):
        assert layouts(stage=stage, batches=batches, **OPTIMIZER)[1].copied_from_host == shards * SHARD


@pytest.mark.parametrize("live", [0, 10**9])
def test_offloaded_shards_are_copied_for_each_gather(live):
    on_cpu = {key: {"device": "cpu"} for key in ("offload_optimizer", "offload_param")}
    config = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": live, **on_cpu}}
    (_, one), (_, four) = (layouts(batches=batches, config=config) for batches in (1, 4))
    gathers = 1 if live else 2  # in both passes, where parameters do not stay
    assert one.copied_from_host == (gathers - 1) * SHARD
    assert four.copied_from_host == (4 * gathers - 1 + 6) * SHARD


def test_nothing_is_copied_where_the_cpu_computes():
    memory, communication = layouts(stage=3, batches=4, device_type="cpu", **PARAMETERS)
    assert (memory.host, communication.copied_from_host) == (0, 0)


def test_files_are_no_memory_of_the_host_and_their_time_is_not_known():
    files = {"offload_optimizer_device": "nvme", "offload_params_device": "nvme", "nvme_path": "/tmp"}
    memory, communication = layouts(stage=3, **PARAMETERS, **files)
    assert communication is None
    on_cpu, _ = layouts(stage=3, **PARAMETERS)
    assert (memory.host, memory.parameters) == (SHARD, on_cpu.parameters)
