"""torch_xla's FullyShardedDataParallel: in one process, which is what XLA's CPU backend has collectives for."""

import pytest
import torch
from packages.xla.tests.rank_fits import Block, Net, SavesAt, begin, counts, fit, loader
from tests.ranks import in_ranks

from dstrat import Callback, Trainer
from dstrat.errors import ConflictError, RequestError
from dstrat_xla import XLAFSDPStrategy

WAYS = {
    "plain": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}
OPTIONS = {
    "whole": {},
    "by blocks": {"auto_wrap_policy": {Block}},
    "activations computed again": {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}},
    "sharded by rows": {"shard_param_on_dim_0": True},
}


@pytest.fixture(scope="module")
def expected():
    return {way: fit("single_device", accelerator="cpu", **options)["losses"] for way, options in WAYS.items()}


def losses(cluster, name):
    begin()
    return {way: fit(XLAFSDPStrategy(start_method="fork", **OPTIONS[name]), **options) for way, options in WAYS.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_are_those_of_one_device(expected, name):
    (fitted,) = in_ranks(losses, 1, name=name)
    for way, found in fitted.items():
        assert found["losses"] == pytest.approx(expected[way], rel=1e-5), way
        assert found["devices"] == ["cpu"]
        assert found["weights"].keys() == dict(Net().named_parameters()).keys()


def stopped_and_resumed(cluster, folder, options):
    begin()
    path = f"{folder}/checkpoint"
    run = {"data": loader(8, shuffle=True)}

    def strategy():
        return XLAFSDPStrategy(auto_wrap_policy={Block}, start_method="fork", **options)

    whole = fit(strategy(), Net(dropout=0.2), callbacks=[SavesAt(3, path)], **run)
    resumed = fit(strategy(), Net(dropout=0.2), resume=path, **run)
    return whole, resumed


@pytest.mark.parametrize("options", [{}, {"state_dict_type": "full"}, {"shard_param_on_dim_0": True}])
def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path, options):
    ((whole, resumed),) = in_ranks(stopped_and_resumed, 1, folder=str(tmp_path), options=options)
    assert resumed["losses"] == whole["losses"][3:]
    assert resumed["weights"] == whole["weights"]


def moved(cluster, folder):
    begin()
    short = {"data": loader(8)}
    found = {}
    for format_name, plugins in (("portable", None), ("torch", "torch")):
        for name, other in (("xla_fsdp", "single_xla"), ("single_xla", "xla_fsdp")):
            path = f"{folder}/{name} {format_name}"
            fit(name, callbacks=[SavesAt(3, path)], plugins=plugins, **short)
            found[name, format_name] = fit(other, resume=path, plugins=plugins, **short)["losses"]
    return found


def test_checkpoints_move_to_and_from_one_device_with_optimizer_state(tmp_path):
    (found,) = in_ranks(moved, 1, folder=str(tmp_path))
    expected = fit("single_device", accelerator="cpu", data=loader(8))["losses"][3:]
    assert len(found) == 4
    for how, losses_after in found.items():
        assert losses_after == pytest.approx(expected, rel=1e-5), how


class Counts(Callback):
    def __init__(self):
        self.warm, self.end = None, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 7:
            self.warm = counts()

    def on_train_end(self, trainer, module):
        self.end = counts()


def counts_of_steps(cluster):
    begin()
    steps = Counts()
    fit(XLAFSDPStrategy(auto_wrap_policy={Block}, start_method="fork"), data=loader(108), callbacks=[steps])
    return {what: steps.end[what] - steps.warm[what] for what in steps.end}


def test_each_step_is_one_graph_that_was_compiled_before():
    (more,) = in_ranks(counts_of_steps, 1)
    assert more == {"compiled": 0, "run": 100, "read": 0}


# Invalid use


@pytest.mark.without_torch_xla
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_dict_type": "whole"}, "state_dict_type 'whole' is not possible: choose 'sharded' or 'full'"),
        ({"auto_wrap_policy": {"Block"}}, r"auto_wrap_policy {'Block'} is no set of classes of layers"),
        ({"activation_checkpointing_policy": [3]}, r"activation_checkpointing_policy \[3\] is no set of classes"),
    ],
)
def test_options_of_other_kinds_are_errors(options, message):
    with pytest.raises(RequestError, match=message):
        XLAFSDPStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reshard_after_foward": True}, "has no argument 'reshard_after_foward', and torch_xla's .* takes"),
        ({"flatten_parameters": True}, "flatten_parameters=True is not possible"),
    ],
)
def test_arguments_that_torch_xla_does_not_take_are_errors_before_a_run(options, message):
    with pytest.raises(RequestError, match=message):
        Trainer(strategy=XLAFSDPStrategy(**options), accelerator="xla", devices=1)


def test_several_processes_on_the_cpu_backend_are_refused():
    with pytest.raises(ConflictError, match="needs collectives for 2 processes, which XLA's CPU backend"):
        Trainer(strategy="xla_fsdp", accelerator="xla", devices=2)


@pytest.mark.tpu
def test_processes_of_a_tpu_train_shards(expected):
    from dstrat_xla import runtime

    data = torch.utils.data.DataLoader(loader().dataset, batch_size=8 // runtime.num_tpus())
    found = fit(XLAFSDPStrategy(start_method="fork"), accelerator="tpu", devices="auto", data=data)
    assert found["weights"].keys() == dict(Net().named_parameters()).keys()
