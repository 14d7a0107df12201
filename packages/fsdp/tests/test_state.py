"""The state of a sharded module and its optimizer: whole on rank 0 or in shards, and what a run leaves behind."""

import copy
import io
import pickle

import pytest
import torch
from tests.hand_loop import BlockNet, parts, single_device_losses, start, train
from tests.ranks import each, in_ranks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.strategy_state import module_entries, read_checkpoint
from dstrat.errors import CheckpointError, MisuseError
from dstrat_fsdp import FSDPStrategy

MORE = {"steps": 3}


@pytest.fixture(scope="module")
def trained():
    """State of one device after some steps, and its losses in the next ones."""
    strategy = SingleDeviceStrategy()
    start(strategy, BlockNet(), parts())
    train(strategy, **MORE)
    state = {name: value.cpu().clone() for name, value in strategy.module_state_dict().items()}
    [optimizer] = strategy.optimizers
    copied = tree_map_only(torch.Tensor, torch.Tensor.cpu, copy.deepcopy(optimizer.state_dict()))
    return state, copied, train(strategy, **MORE)


def saved(cluster, options):
    strategy = FSDPStrategy(**options)
    start(strategy, BlockNet(), parts(cluster))
    train(strategy, **MORE)
    state, optimizer = strategy.module_state_dict(), strategy.optimizer_state(strategy.optimizers[0])
    strategy.teardown()
    written = io.BytesIO()  # tensors themselves would be shared with a process that ends
    torch.save((state, optimizer), written)
    return written.getvalue()


class Scaled(BlockNet):
    def make_layers(self):
        super().make_layers()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale


def kinds_of_steps(cluster):
    strategy = FSDPStrategy()
    start(strategy, Scaled(), parts(cluster))
    train(strategy, **MORE)
    [optimizer] = strategy.optimizers
    strategy.load_optimizer_state(optimizer, strategy.optimizer_state(optimizer))
    return {type(state["step"]) for state in optimizer.state.values()}


def test_the_count_of_steps_of_a_scalar_parameter_stays_a_plain_tensor():
    assert in_ranks(kinds_of_steps) == [{torch.Tensor}] * 2


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(found[key], value)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


WAYS = {"plain": {}, "two replicas": {"device_mesh": (2, 2)}, "offloaded": {"cpu_offload": True}}


def test_the_whole_state_is_that_of_one_device_and_on_rank_0_only(trained):
    state, optimizer, _ = trained
    cases = {name: {"options": options} for name, options in WAYS.items()}
    first, *others = in_ranks(each, 4, function=saved, cases=cases)
    for name in WAYS:
        whole, whole_optimizer = torch.load(io.BytesIO(first[name]))
        assert_close(whole, state)
        assert_close(whole_optimizer["state"], optimizer["state"])
        assert whole_optimizer["param_groups"][0]["params"] == optimizer["param_groups"][0]["params"]
        assert [torch.load(io.BytesIO(other[name])) for other in others] == [({}, {})] * 3


def resumed(cluster, state, optimizer, options):
    strategy = FSDPStrategy(**options)
    start(strategy, BlockNet(), parts(cluster))
    on_rank_0 = strategy.is_global_zero
    strategy.load_module_state_dict(state if on_rank_0 else {})
    strategy.load_optimizer_state(strategy.optimizers[0], optimizer if on_rank_0 else {})
    losses = train(strategy, **MORE)
    strategy.teardown()
    return losses


def test_a_whole_state_of_rank_0_is_dealt_out(trained):
    state, optimizer, expected = trained
    cases = {name: {"state": state, "optimizer": optimizer, "options": options} for name, options in WAYS.items()}
    for losses in in_ranks(each, 4, function=resumed, cases=cases):
        assert losses == dict.fromkeys(WAYS, pytest.approx(expected, rel=1e-6))


def misfit(cluster, state, strict=True):
    strategy = FSDPStrategy()
    start(strategy, BlockNet(), parts(cluster))
    try:
        strategy.load_module_state_dict(state, strict=strict)
    except CheckpointError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None


def test_a_state_that_does_not_fit_is_refused_on_every_rank(trained):
    state = dict(trained[0])
    del state["last.bias"]
    state["extra"] = torch.zeros(1)
    cases = {
        "strict": {"state": state},
        "not strict": {"state": state, "strict": False},
        "shape": {"state": {**trained[0], "last.bias": torch.zeros(7)}},
    }
    for found in in_ranks(each, function=misfit, cases=cases):
        assert found == {
            "strict": "the weights do not fit BlockNet: missing last.bias; unexpected extra. Make the module as it was "
            "trained, or set strict_loading = False on it to load the others",
            "not strict": None,
            "shape": "the weights do not fit BlockNet: last.bias has the shape (7,), and the module's has (3,)",
        }


def through_shards(cluster):
    first = FSDPStrategy()
    start(first, BlockNet(), parts(cluster))
    train(first, **MORE)
    module = {name: value.to_local().clone() for name, value in tensors(first.sharded_module_state())}
    state = first.sharded_optimizer_state(first.optimizers[0])
    names = sorted(state["state"])
    local = {n: {k: getattr(v, "_local_tensor", v).clone() for k, v in e.items()} for n, e in state["state"].items()}
    expected = train(first, **MORE)
    first.teardown()

    second = FSDPStrategy()
    start(second, BlockNet(), parts(cluster))
    with torch.no_grad():
        for name, value in tensors(second.sharded_module_state()):
            value.to_local().copy_(module[name])
    template = second.optimizer_template(second.optimizers[0])
    for name, entry in template["state"].items():
        for key, value in entry.items():
            getattr(value, "_local_tensor", value).copy_(local[name][key])
    second.load_sharded_optimizer_state(second.optimizers[0], template)
    losses = train(second, **MORE)
    second.teardown()
    return names, losses, expected


def tensors(state):
    return [(name, value) for name, value in state.items() if isinstance(value, DTensor)]


def test_shards_come_and_go_under_the_modules_own_names():
    for names, losses, expected in in_ranks(through_shards):
        assert names == sorted(name for name, _ in BlockNet().named_parameters())
        assert losses == expected


class TiedNet(BlockNet):
    """Has layers that share a parameter."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


def two_runs(cluster, state_dict_type, module):
    module = globals()[module]()
    losses = []
    kinds = set()
    for _ in range(2):
        strategy = FSDPStrategy(state_dict_type=state_dict_type)
        start(strategy, module, parts(cluster))
        losses += train(strategy, **MORE)
        strategy.teardown()
        kinds |= {type(parameter.data).__name__ for parameter in module.parameters()}
        assert strategy.model is strategy.module is module
        assert type(module.blocks[0]).__name__ == "Block"
    return losses, kinds, [tuple(parameter.shape) for parameter in module.parameters()]


KINDS = {"sharded": "DTensor", "full": "Tensor"}


def test_another_run_goes_on_with_what_the_first_has_left():
    expected = {}
    for module in (BlockNet, TiedNet):
        alone, losses = module(), []
        for _ in range(2):
            strategy = SingleDeviceStrategy()
            start(strategy, alone, parts())
            losses += train(strategy, **MORE)
        expected[module.__name__] = losses, [tuple(parameter.shape) for parameter in alone.parameters()]
    cases = {(name, kind): {"module": name, "state_dict_type": kind} for name in expected for kind in KINDS}
    for found in in_ranks(each, function=two_runs, cases=cases):
        for (name, state_dict_type), (losses, kinds, shapes) in found.items():
            assert losses == pytest.approx(expected[name][0], rel=1e-6)
            assert kinds == {KINDS[state_dict_type]}
            assert shapes == expected[name][1]


def between_runs(cluster, folder):
    """Use a module in every way between two runs; return errors, and values of the second run's start."""
    module = BlockNet()
    strategy = FSDPStrategy()
    start(strategy, module, parts(cluster))
    train(strategy, **MORE)
    strategy.teardown()
    uses = {
        "state dict": module.state_dict,
        "state dict of a layer": module.last.state_dict,
        "forward": lambda: module.layers(torch.zeros(1, 6)),
    }
    errors = {}
    for name, use in uses.items():
        with pytest.raises(MisuseError) as caught:
            use()
        errors[name] = str(caught.value)
    copied = pickle.loads(pickle.dumps(module))  # its hooks too
    loaded = Other().state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for last\.bias"):
        module.load_state_dict({**loaded, "last.bias": torch.zeros(7)})
    module.load_state_dict(loaded)
    module.last.load_state_dict({name: value + 1 for name, value in loaded_of("last", loaded)}, assign=True)
    copied.load_state_dict(loaded)
    strategy = FSDPStrategy(state_dict_type="full")
    start(strategy, module, parts(cluster))
    strategy.teardown()
    torch.save(module.state_dict(), folder / f"{cluster.global_rank}.pt")
    module.layers(torch.zeros(1, 6))
    return errors


def loaded_of(layer, state):
    return [(name.removeprefix(layer + "."), value) for name, value in state.items() if name.startswith(layer + ".")]


class Other(BlockNet):
    """Has other values than a BlockNet."""

    def __init__(self):
        super().__init__()
        for index, parameter in enumerate(self.parameters()):
            torch.nn.init.constant_(parameter, index)


def test_after_a_run_whole_tensors_load_and_other_uses_are_explained(tmp_path):
    expected = Other().state_dict()
    for name in ("last.weight", "last.bias"):
        expected[name] += 1
    for rank, errors in enumerate(in_ranks(between_runs, folder=tmp_path)):
        assert errors["state dict"].startswith("the state dict of first cannot be gathered: the run has ended, and")
        assert "trainer.strategy.module_state_dict() gathers it in a hook of the run" in errors["state dict"]
        assert 'state_dict_type="full" of a strategy without stages (pp)' in errors["state dict"]
        assert errors["state dict of a layer"].startswith("the state dict of Linear cannot be gathered:")
        assert errors["forward"].startswith("Linear cannot compute: the run has ended, and this process has one shard")
        assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)


def alone(cluster):
    module = BlockNet()
    losses = []
    for _ in range(2):
        strategy = FSDPStrategy()
        start(strategy, module, parts(cluster))
        losses += train(strategy, **MORE)
        strategy.teardown()
        module.layers(torch.zeros(1, 6))
    return losses, {name: type(value).__name__ for name, value in module.state_dict().items()}


def test_a_run_of_one_process_leaves_plain_tensors():
    [(losses, kinds)] = in_ranks(alone, 1)
    module = BlockNet()
    assert losses == pytest.approx([loss for _ in range(2) for loss in single_device_losses(module, **MORE)], rel=1e-6)
    assert kinds == dict.fromkeys(module.state_dict(), "Tensor")


def another_mesh(cluster):
    module = BlockNet()
    strategy = FSDPStrategy()
    start(strategy, module, parts(cluster))
    strategy.teardown()
    strategy = FSDPStrategy(sharding_strategy="NO_SHARD")
    try:
        start(strategy, module, parts(cluster))
    except MisuseError as error:
        return str(error)
    return None


def test_shards_of_another_mesh_are_refused():
    for message in in_ranks(another_mesh):
        assert message.startswith("BlockNet is sharded over mesh=[2], coordinate=[")
        assert "by an earlier run; this run uses mesh=[2, 1], coordinate=[" in message
        assert message.endswith("create a new module and load a checkpoint")


class StartsUnlikeZero(BlockNet):
    """Its optimizer keeps a product that is 1 before the first step."""

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=0.01)


def saved_before_the_first_step(cluster, target):
    strategy = FSDPStrategy()
    start(strategy, StartsUnlikeZero(), parts(cluster))
    values = {**module_entries(strategy), "optimizers": [strategy.sharded_optimizer_state(strategy.optimizers[0])]}
    PortableCheckpointIO().save_checkpoint(values, target)
    losses = train(strategy, **MORE)
    strategy.teardown()
    return losses


def loaded_before_the_first_step(cluster, target):
    strategy = FSDPStrategy()
    torch.manual_seed(1)
    start(strategy, StartsUnlikeZero(), parts(cluster))
    checkpoint = read_checkpoint(strategy, PortableCheckpointIO(), target, has_optimizers=True)
    strategy.load_sharded_optimizer_state(strategy.optimizers[0], checkpoint["optimizers"][0])
    losses = train(strategy, **MORE)
    strategy.teardown()
    return losses


@pytest.mark.parametrize("saved_by", ["one device", "ranks"])
def test_what_is_saved_before_the_first_step_is_no_step(tmp_path, saved_by):
    expected = single_device_losses(StartsUnlikeZero(), **MORE)
    if saved_by == "ranks":
        for losses in in_ranks(saved_before_the_first_step, target=tmp_path / "c"):
            assert losses == pytest.approx(expected, rel=1e-6)
    else:
        strategy = SingleDeviceStrategy()
        start(strategy, StartsUnlikeZero(), parts())
        values = {**module_entries(strategy), "optimizers": [strategy.sharded_optimizer_state(strategy.optimizers[0])]}
        PortableCheckpointIO().save_checkpoint(values, tmp_path / "c")
    for losses in in_ranks(loaded_before_the_first_step, target=tmp_path / "c"):
        assert losses == pytest.approx(expected, rel=1e-6)


def losses_after_loading(cluster, options):
    """Load full tensors into a module, of which the whole and a layer, and train."""
    strategy = SingleDeviceStrategy() if cluster is None else FSDPStrategy(**options)
    start(strategy, Scaled(), parts(cluster))
    for name in ("", "blocks.1"):
        other = Scaled().get_submodule(name)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.7)
        strategy.module.get_submodule(name).load_state_dict(other.state_dict())
        losses = train(strategy, **MORE)
    strategy.teardown()
    return losses


def test_full_tensors_can_be_loaded_into_a_sharded_module():
    expected = losses_after_loading(None, {})
    cases = {"shards": {"options": {}}, "gathered": {"options": {"sharding_strategy": "SHARD_GRAD_OP"}}}
    for found in in_ranks(each, function=losses_after_loading, cases=cases):
        assert found == dict.fromkeys(cases, pytest.approx(expected, rel=1e-6))
