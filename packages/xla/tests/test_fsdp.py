"""torch_xla's FullyShardedDataParallel: in one process, which is what XLA's CPU backend has collectives for."""

import pytest
import torch
from packages.xla.tests.rank_fits import Block, CountsSteps, Net, SavesAt, begin, fit, loader
from tests.ranks import in_ranks

from dstrat import Trainer
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


def losses(cluster, names, way):
    """Fit with several options in one process."""
    begin()
    return {name: fit(XLAFSDPStrategy(start_method="fork", **OPTIONS[name]), **WAYS[way]) for name in names}


@pytest.mark.parametrize(
    ("names", "way"), [(("whole", "by blocks"), "accumulation and clipping"), (tuple(OPTIONS), "plain")]
)
def test_losses_are_those_of_one_device(names, way):
    (fits,) = in_ranks(losses, 1, names=names, way=way)
    expected = fit("single_device", accelerator="cpu", **WAYS[way])["losses"]
    for name, fitted in fits.items():
        assert len(fitted["losses"]) >= 20
        assert fitted["losses"] == pytest.approx(expected, rel=1e-5), name
        assert fitted["devices"] == ["cpu"]
        assert fitted["weights"].keys() == dict(Net().named_parameters()).keys()


RESUMED = {"sharded": {}, "full": {"state_dict_type": "full"}, "by rows": {"shard_param_on_dim_0": True}}


def stopped_and_resumed(cluster, folder):
    begin()
    run = {"data": loader(6, shuffle=True)}
    found = {}
    for name, options in RESUMED.items():

        def strategy(options=options):
            return XLAFSDPStrategy(auto_wrap_policy={Block}, start_method="fork", **options)

        path = f"{folder}/{name}"
        whole = fit(strategy(), Net(dropout=0.2, adam=True), callbacks=[SavesAt(3, path)], **run)
        found[name] = whole, fit(strategy(), Net(dropout=0.2, adam=True), resume=path, **run)
    return found


def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path):
    (found,) = in_ranks(stopped_and_resumed, 1, folder=str(tmp_path))
    for name, (whole, resumed) in found.items():
        assert resumed["losses"] == whole["losses"][3:], name
        assert resumed["weights"] == whole["weights"], name


def moved(cluster, folder):
    begin()
    short = {"data": loader(6)}
    found = {}
    for format_name, plugins in (("portable", None), ("torch", "torch")):
        for name, other in (("xla_fsdp", "single_xla"), ("single_xla", "xla_fsdp")):
            path = f"{folder}/{name} {format_name}"
            fit(name, Net(adam=True), callbacks=[SavesAt(3, path)], plugins=plugins, **short)
            found[name, format_name] = fit(other, Net(adam=True), resume=path, plugins=plugins, **short)["losses"]
    return found


def test_checkpoints_move_to_and_from_one_device_with_optimizer_state(tmp_path):
    (found,) = in_ranks(moved, 1, folder=str(tmp_path))
    expected = fit("single_device", Net(adam=True), accelerator="cpu", data=loader(6))["losses"][3:]
    assert len(found) == 4
    for how, losses_after in found.items():
        assert losses_after == pytest.approx(expected, rel=1e-5), how


def counts_of_steps(cluster):
    begin()
    steps = CountsSteps()
    fit(XLAFSDPStrategy(auto_wrap_policy={Block}, start_method="fork"), data=loader(108), callbacks=[steps])
    return steps.more


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
def test_processes_of_a_tpu_train_shards():
    from dstrat_xla import runtime

    data = torch.utils.data.DataLoader(loader().dataset, batch_size=8 // runtime.num_tpus())
    found = fit(XLAFSDPStrategy(start_method="fork"), accelerator="tpu", devices="auto", data=data)
    assert found["weights"].keys() == dict(Net().named_parameters()).keys()
