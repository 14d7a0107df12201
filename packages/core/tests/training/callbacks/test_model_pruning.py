from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dstrat import Callback, ModelCheckpoint, ModelPruning, TrainModule
from dstrat.errors import CheckpointError, ConflictError, RequestError


class Net(TrainModule):
    """Two layers, in which 9 of 81 elements are biases."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0]) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Record(Callback):
    """Keeps how many elements are pruned after each epoch, and what the first step of each begins with."""

    def __init__(self):
        self.pruned, self.firsts = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == 0:
            layer = module.layers[0]
            self.firsts.append(getattr(layer, "weight_orig", layer.weight).detach().clone())

    def on_train_epoch_start(self, trainer, module):
        masks = [value for name, value in module.named_buffers() if name.endswith("_mask")]
        self.pruned.append(sum(int((mask == 0).sum()) for mask in masks))


class StoppedError(Exception):
    pass


class Stop(Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.epoch:
            raise StoppedError


def zeros(module):
    return sum(int((parameter == 0).sum()) for parameter in module.parameters())


def names(module):
    return {name for name, _ in module.named_parameters()}


@pytest.fixture
def train(fit):
    def train_(*callbacks, module=None, **options):
        module = module or Net()
        fit(list(callbacks), module=module, **({"validates": False, "max_epochs": 3} | options))
        return module

    return train_


def test_each_epoch_prunes_a_share_of_what_is_left(train):
    record = Record()
    train(ModelPruning("l1_unstructured", amount=0.5), record)
    assert record.pruned == [0, 40, 60]


def test_the_module_ends_with_plain_parameters_and_zeros(train):
    module = train(ModelPruning("l1_unstructured", amount=0.5))
    assert names(module) == names(Net())
    assert zeros(module) == 70


def test_masks_stay_where_they_are_not_to_be_made_permanent(train):
    module = train(ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False))
    assert "layers.0.weight_orig" in names(module)
    assert zeros(module) == 0


def test_a_winning_ticket_begins_with_the_values_of_the_start_each_time(train):
    record = Record()
    train(ModelPruning("l1_unstructured", amount=0.2), record)
    assert all(torch.equal(values, record.firsts[0]) for values in record.firsts)


def test_a_subclass_may_add_to_the_reset_of_parameters(train):
    calls = []

    class Counting(ModelPruning):
        def apply_lottery_ticket_hypothesis(self):
            super().apply_lottery_ticket_hypothesis()
            calls.append("reset")

    train(Counting("l1_unstructured", use_lottery_ticket_hypothesis=lambda epoch: epoch == 1), max_epochs=3)
    assert calls == ["reset"]


def test_without_the_lottery_ticket_training_goes_on_from_where_it_is(train):
    record = Record()
    train(ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False), record)
    assert not torch.equal(record.firsts[1], record.firsts[0])


def test_parameters_can_be_drawn_anew(train):
    record = Record()
    train(ModelPruning("l1_unstructured", amount=0.2, resample_parameters=True), record)
    assert not torch.equal(record.firsts[1], record.firsts[0])
    assert not torch.equal(record.firsts[2], record.firsts[1])


def test_amount_and_choice_may_depend_on_the_epoch(train):
    record = Record()
    callback = ModelPruning("l1_unstructured", amount=lambda epoch: 3 + epoch, apply_pruning=lambda epoch: epoch != 1)
    train(callback, record, max_epochs=4)
    assert record.pruned == [0, 3, 3, 8]


def test_parameters_to_prune_limit_it(train):
    module = Net()
    callback = ModelPruning("random_unstructured", [(module.layers[0], "weight")], amount=0.25)
    train(callback, module=module, max_epochs=1)
    assert int((module.layers[0].weight == 0).sum()) == zeros(module) == 16


def test_a_subclass_may_leave_parameters_out(train):
    class OnlyWeights(ModelPruning):
        def filter_parameters_to_prune(self, parameters_to_prune=()):
            return [(layer, name) for layer, name in parameters_to_prune if name == "weight"]

    module = train(OnlyWeights("l1_unstructured", amount=0.999), max_epochs=1)
    assert zeros(module) == 72
    assert all(bool((module.layers[i].bias != 0).all()) for i in (0, 2))


def test_structured_methods_prune_whole_rows(train):
    module = Net()
    callback = ModelPruning(
        "ln_structured",
        [(module.layers[0], "weight")],
        amount=2,
        use_global_unstructured=False,
        pruning_dim=0,
        pruning_norm=1,
    )
    train(callback, module=module, max_epochs=1)
    assert sorted((module.layers[0].weight == 0).sum(1).tolist()) == [0] * 6 + [8] * 2


def test_a_method_of_ones_own_prunes(train):
    class Even(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def __init__(self, amount):
            self.amount = amount

        def compute_mask(self, t, default_mask):
            mask = default_mask.clone()
            mask.view(-1)[::2] = 0
            return mask

    assert zeros(train(ModelPruning(Even), max_epochs=1)) == 41


class Small(prune.BasePruningMethod):
    """Prunes all elements below a limit, whatever their number."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() > 1e9)


class Share(Small):
    """Takes all its arguments as keywords."""

    def __init__(self, **options):
        self.share = options.pop("amount")
        assert not options

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[: int(t.numel() * self.share)] = 0
        return mask


class OwnApply(Small):
    """Has a function without amount, though the constructor takes one."""

    def __init__(self, amount=0.0):
        assert amount == 0

    @classmethod
    def apply(cls, module, name):
        return super().apply(module, name)


@pytest.mark.parametrize("is_global", [True, False])
def test_a_method_without_an_amount_prunes_what_it_decides(train, is_global):
    assert zeros(train(ModelPruning(Small, use_global_unstructured=is_global), max_epochs=1)) == 81


@pytest.mark.parametrize("is_global", [True, False])
def test_a_method_that_takes_keywords_gets_the_amount(train, is_global):
    callback = ModelPruning(Share, amount=1.0, use_global_unstructured=is_global)
    assert zeros(train(callback, max_epochs=1)) == 81


def test_an_apply_without_an_amount_gets_none(train):
    assert zeros(train(ModelPruning(OwnApply, use_global_unstructured=False), max_epochs=1)) == 81


def test_pruning_may_follow_each_validation(fit):
    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            pass

    record, module = Record(), Validated()
    fit([ModelPruning("l1_unstructured", prune_on_train_epoch_end=False), record], module=module, max_epochs=2)
    assert record.pruned == [0, 40]


@pytest.mark.parametrize("permanent", [True, False])
@pytest.mark.parametrize("plugins", ["portable", "torch"])
@pytest.mark.parametrize("ticket", [True, False])
def test_a_resumed_run_prunes_as_one_that_never_stopped(train, tmp_path, permanent, plugins, ticket):
    def pruning():
        return ModelPruning(
            "l1_unstructured",
            amount=0.3,
            use_lottery_ticket_hypothesis=lambda epoch: ticket and epoch % 2 == 1,
            make_pruning_permanent=permanent,
        )

    options = {"plugins": plugins, "max_epochs": 4}
    whole = train(pruning(), **options)
    saving = ModelCheckpoint(tmp_path, save_top_k=-1)
    with pytest.raises(StoppedError):
        train(pruning(), Stop(3), saving, **options)
    resumed = train(pruning(), ckpt_path=saving.best_model_path, **options)
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.state_dict().items())


def test_a_longer_training_goes_on_with_the_masks_of_the_end(train, tmp_path):
    saving, record = ModelCheckpoint(tmp_path, save_last=True), Record()
    train(ModelPruning("l1_unstructured", amount=0.5), saving, max_epochs=2)
    again = ModelPruning("l1_unstructured", amount=0.5)
    train(again, record, max_epochs=3, ckpt_path=saving.last_model_path)
    assert record.pruned == [60]


def test_checkpoints_load_into_a_module_that_is_not_pruned(train, tmp_path):
    saving = ModelCheckpoint(tmp_path)
    train(ModelPruning("l1_unstructured", amount=0.5), saving, max_epochs=1)
    assert zeros(Net.load_from_checkpoint(saving.best_model_path)) == 40


def test_a_checkpoint_of_other_parameters_is_refused(train, tmp_path):
    saving = ModelCheckpoint(tmp_path)
    train(ModelPruning("l1_unstructured"), saving, max_epochs=1)
    with pytest.raises(CheckpointError, match=r"a pruned 'layers.0.bias', which this ModelPruning does not prune"):
        train(ModelPruning("l1_unstructured", parameter_names=["weight"]), ckpt_path=saving.best_model_path)


def test_how_much_is_pruned_is_logged(train, caplog):
    with caplog.at_level(logging.INFO):
        train(ModelPruning("l1_unstructured", verbose=2), max_epochs=2)
    assert "l1_unstructured has pruned 60 of 81 parameters (74.07 %), 40 (49.38 %) before" in caplog.text
    assert "layers.2.bias: " in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruning_fn": "l2"}, "pruning_fn='l2' is not known: choose from l1_unstructured"),
        ({"pruning_fn": 3}, "must be one of l1_unstructured"),
        ({"pruning_fn": "ln_structured"}, "needs pruning_dim"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0}, "needs pruning_norm"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "pass use_global_unstructured=False"),
        ({"parameter_names": ["gamma"]}, "not 'gamma'"),
        ({"amount": "half"}, "amount='half' must be a float"),
        ({"verbose": 3}, "verbose=3 must be 0, 1 or 2"),
    ],
)
def test_arguments_that_are_not_possible_say_what_is(arguments, message):
    with pytest.raises(RequestError, match=message):
        ModelPruning(**{"pruning_fn": "l1_unstructured"} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruning_fn": Small, "amount": 0.3}, "amount=0.3 would be ignored: Small, the pruning_fn, takes no 'amount'"),
        ({"pruning_fn": Small, "amount": 0.3, "use_global_unstructured": False}, "amount=0.3 would be ignored"),
        ({"pruning_fn": OwnApply, "amount": 0.3, "use_global_unstructured": False}, "amount=0.3 would be ignored"),
        ({"pruning_dim": 0}, "pruning_dim=0 would be ignored by pruning_fn='l1_unstructured'"),
        ({"pruning_fn": Share, "pruning_norm": 1}, "pruning_norm=1 would be ignored by .*Share"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0, "pruning_norm": 1}, "it is for 'ln_structured': leave"),
        ({"parameters_to_prune": [(nn.Linear(1, 1), "weight")], "parameter_names": ["weight"]}, "pass one of them"),
        ({"resample_parameters": True, "use_lottery_ticket_hypothesis": False}, "which use_lottery_ticket_hypothesis="),
    ],
)
def test_an_argument_that_would_be_ignored_is_refused(arguments, message):
    with pytest.raises(ConflictError, match=message):
        ModelPruning(**{"pruning_fn": "l1_unstructured"} | arguments)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([1], "must be pairs of a module and a parameter's name"),
        ([(nn.Linear(1, 1), "weight")], "has a Linear that is not a layer of Net"),
    ],
)
def test_parameters_of_other_modules_are_refused(train, parameters, message):
    with pytest.raises(RequestError, match=message):
        train(ModelPruning("l1_unstructured", parameters))
