"""Pipelines in a Trainer: predictions, mixed precision, and logged norms of gradients.

Losses, resume and moves of each layout are in test_layout_conformance.py.
"""

import logging

import pytest
import torch
from packages.mesh.tests.pipeline_fits import Net, data, fit, predictions
from tests.ranks import each, in_ranks
from tests.trainer_runs import Saves, quiet_trainer
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from dstrat import GradientAccumulationScheduler, Pipeline, grad_norm
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat_mesh import MeshStrategy


def trained(cluster, path=None, ckpt=None, max_steps=6, accumulate=1, precision="32-true", **options):
    shares = cluster.world_size // options.get("pp", 1)
    arguments = {"plugins": [cluster], "gradient_clip_val": 0.5, "precision": precision}
    module, _ = fit(
        MeshStrategy(**options), cluster.world_size, 8 // shares, path, ckpt, max_steps, accumulate, **arguments
    )
    return module.losses, module.validated


def one_device(path=None, ckpt=None, max_steps=6, accumulate=1, **options):
    module, _ = fit("single_device", 1, 8, path, ckpt, max_steps, accumulate, gradient_clip_val=0.5, **options)
    return module.losses, module.validated


def predicted(cluster):
    return predictions(MeshStrategy(pp=2), cluster.world_size, 4, plugins=[cluster])


def test_predictions_are_those_of_one_device():
    expected = predictions("single_device", 1, 4)
    for found in in_ranks(predicted):
        torch.testing.assert_close(found, expected)


def test_mixed_precision_trains_in_stages():
    losses, validated = one_device(precision="bf16-mixed")
    for found in in_ranks(trained, 2, pp=2, precision="bf16-mixed"):
        assert found[0] == pytest.approx(losses, rel=0.02)  # parameters are gathered in bfloat16, of 8 bits
        assert found[1][-1] == pytest.approx(validated[-1], rel=0.02)
        assert found[0] != pytest.approx(losses_in_float32(), rel=1e-5)


def trained_again(cluster, layouts):
    """Fit and test one module with each layout; return losses and tests, or with what the module is refused."""
    module, tested = Net(), []
    module.test_step = lambda batch, _: module.log("test_loss", nn.functional.mse_loss(module.net(batch[0]), batch[1]))
    for options in layouts:
        strategy = MeshStrategy(**options) if cluster else "single_device"
        trainer = quiet_trainer(strategy, cluster, limit_val_batches=0)
        batches = DataLoader(data(16), 4 if "dp_shard" in options else 8)
        try:
            trainer.fit(module, batches)
            (results,) = trainer.test(module, batches, verbose=False)
        except MisuseError as error:
            return str(error)
        tested.append(results["test_loss"])
    return module.losses, tested


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"dp_shard": 2}),
        (2, {"pp": 2}),
        (2, {"pp": 2, "schedule": "Interleaved1F1B"}),
        pytest.param(4, {"pp": 2, "dp_shard": 2}, marks=pytest.mark.variant),
    ],
)
def test_a_module_goes_on_in_later_runs_with_its_shards(ranks, options):
    losses, tested = trained_again(None, [{}, {}])
    for found in in_ranks(trained_again, ranks, layouts=[options, options]):
        assert found == (pytest.approx(losses, rel=1e-6), pytest.approx(tested, rel=1e-6))


def test_layers_that_an_earlier_run_has_split_are_refused():
    for found in in_ranks(trained_again, 2, layouts=[{"tp": 2}]):
        assert found.startswith("the computation of Net was divided by an earlier run, to whose groups of processes")


def test_stages_that_an_earlier_run_has_divided_otherwise_are_refused():
    layouts = [{"pp": 2}, {"pp": 2, "schedule": "Interleaved1F1B"}]
    messages = in_ranks(trained_again, 2, layouts=layouts)
    assert any("has divided the layers of Net into other stages" in message for message in messages)
    assert all(message.endswith("create a new module and load a checkpoint") for message in messages)


class Counting(nn.Module):
    """Counts its batches in buffers, of which one has gaps, one is new and one grows, and in extra state."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("columns", torch.zeros(3, 4)[:, :2])
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.training:
            self.count += 1
            self.seen += 1
            self.columns += 1
            self.late = self.seen * torch.ones(2, device=x.device)
            self.table = torch.cat([self.table, self.seen.view(1)])
        return x * (1 + self.count / 10 + self.seen / 10 + (self.table.sum() + self.columns.sum()) / 100)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class CountingNet(Net):
    """Counts in a later stage."""

    def __init__(self):
        super().__init__()
        self.net[4] = Counting()


def counted_again(cluster, path):
    """Fit, test and fit one module, and resume the first fit with another one."""
    one, other = CountingNet(), CountingNet()
    one.path = path
    for module, ckpt_path in ((one, None), (one, None), (other, path)):
        strategy = MeshStrategy(pp=2, microbatches=1) if cluster else "single_device"
        trainer = quiet_trainer(strategy, cluster, limit_val_batches=0, max_epochs=2 if ckpt_path else 1)
        module.test_step = lambda batch, _, module=module: module.log("test_loss", module.net(batch[0]).square().mean())
        trainer.fit(module, DataLoader(data(16), 8), ckpt_path=ckpt_path)
        module.path = None
        (results,) = trainer.test(module, DataLoader(data(16), 8), verbose=False)
        module.losses.append(results["test_loss"])
        module.losses += [float(tensor.sum()) for tensor in module.net[4].buffers()]
    return one.losses, other.losses


def test_what_later_stages_count_goes_on_in_later_runs_and_resumed_ones(tmp_path):
    expected = counted_again(None, tmp_path / "one")
    for found in in_ranks(counted_again, path=tmp_path / "two"):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found[1] == pytest.approx(expected[1], rel=1e-6)


def fit_after_an_error(cluster, options):
    module = Net()
    for change in ({}, {"auto_wrap_policy": {nn.LSTM}}, {}):
        strategy = MeshStrategy(**options, **change) if cluster else "single_device"
        trainer = quiet_trainer(strategy, cluster, limit_val_batches=0)
        try:
            if cluster or not change:
                trainer.fit(module, DataLoader(data(16), 4 if "dp_shard" in options else 8))
        except RequestError as error:
            assert "matches no layer" in str(error)  # noqa: PT017 - the next fit is the subject
    return module.losses


@pytest.mark.parametrize("options", [{"pp": 2}, {"dp_shard": 2}])
def test_an_error_before_the_first_step_leaves_what_was_trained(options):
    expected = pytest.approx(fit_after_an_error(None, options={}), rel=1e-6)
    for losses in in_ranks(fit_after_an_error, options=options):
        assert losses == expected


class Steep(Net):
    """Takes steps that grow with the gradients."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def accumulated(cluster, path, options):
    """Return the losses after a checkpoint between the two batches of a step."""
    module = Steep()
    strategy = MeshStrategy(**options) if cluster else "single_device"
    trainer = quiet_trainer(strategy, cluster, limit_val_batches=0, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(data(), 8), ckpt_path=path / "3")
    return module.losses


def saved_and_accumulated(cluster, path):
    trainer = quiet_trainer(
        MeshStrategy(pp=2), cluster, limit_val_batches=0, accumulate_grad_batches=2, callbacks=[Saves(path, (3,))]
    )
    trainer.fit(Steep(), DataLoader(data(), 8))
    return accumulated(cluster, path, {"pp": 2, "schedule": "Interleaved1F1B"})


def test_gradients_of_other_stages_are_left_out_with_their_batches(tmp_path):
    found = in_ranks(saved_and_accumulated, path=tmp_path)
    assert found == [pytest.approx(accumulated(None, tmp_path, {}), rel=1e-6)] * 2


class InPlace(Net):
    """Begins stages with an operation in place."""

    def __init__(self):
        super().__init__()
        for index in (1, 3, 5):
            self.net[index] = nn.ReLU(inplace=True)


def in_place(cluster):
    module = InPlace()
    trainer = quiet_trainer(MeshStrategy(pp=2) if cluster else "single_device", cluster, limit_val_batches=0)
    trainer.fit(module, DataLoader(data(16), 8))
    return module.losses


def test_the_first_layer_of_a_stage_may_work_in_place():
    expected = pytest.approx(in_place(None), rel=1e-6)
    for losses in in_ranks(in_place):
        assert losses == expected


class Scaling(Net):
    """Computes gradients in a way of its own."""

    def backward(self, loss, *args, **kwargs):
        (3 * loss).backward(*args, **kwargs)


def refused(cluster):
    with pytest.raises(ConflictError) as error:
        quiet_trainer(MeshStrategy(pp=2), cluster).fit(Scaling(), DataLoader(data(16), 8))
    trainer = quiet_trainer(MeshStrategy(pp=2), cluster)
    trainer.validate(Scaling(), DataLoader(data(16), 8), verbose=False)  # which has no backward pass
    return str(error.value)


def test_a_backward_of_the_module_is_refused():
    for message in in_ranks(refused):
        assert message.startswith("Scaling has a backward of its own, and a pipeline runs forward and backward passes")


def losses_in_float32():
    return one_device()[0]


class Measured(Net):
    """Logs the norms of its gradients, one of which is frozen."""

    refusal = ""

    def __init__(self):
        super().__init__()
        self.net[2].bias.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, norm_type=2))
        try:
            grad_norm(self.net, norm_type=2)
        except MisuseError as error:
            self.refusal = str(error)


def logged(cluster, **options):
    module = Measured()
    trainer = quiet_trainer(MeshStrategy(**options) if cluster else "single_device", cluster, limit_val_batches=0)
    trainer.fit(module, DataLoader(data(16), 8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.refusal


def test_logged_norms_are_those_of_all_stages():
    expected, refusal = logged(None)
    assert (len(expected), refusal) == (8, "")
    for found in in_ranks(each, 4, function=logged, cases={"tp": {"pp": 2, "tp": 2}, "pp": {"pp": 4}}):
        for norms, message in found.values():
            assert norms == pytest.approx(expected, rel=1e-6)
            assert message.startswith("grad_norm got a Sequential with parameters that only other ranks have")


# Batches with fewer samples than microbatches


def fitted(cluster, size, batch_size=8, **options):
    module, strategy = Net(), MeshStrategy(microbatches=4, **options) if cluster else "single_device"
    try:
        quiet_trainer(strategy, cluster, max_epochs=2).fit(module, DataLoader(data(size), batch_size))
    except MisuseError as error:
        return str(error)
    return module.losses


@pytest.mark.parametrize(("ranks", "size"), [(2, 35), (2, 33), (4, 36)])  # 3, 1 and 2 samples in the last batch
def test_the_last_batch_may_have_fewer_samples_than_microbatches(ranks, size):
    expected = pytest.approx(fitted(None, size), rel=1e-6)
    common = {"size": size, "batch_size": 16 // ranks, "pp": 2}
    schedules = "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"
    cases = {schedule: {**common, "schedule": schedule} for schedule in schedules}
    for found in in_ranks(each, ranks, function=fitted, cases=cases):
        assert found == dict.fromkeys(cases, expected)


def test_ranks_that_gather_in_each_pass_need_as_many_microbatches():
    for found in in_ranks(fitted, 4, size=6, batch_size=3, pp=2, reshard_after_forward=True):
        assert found.startswith("a batch of 3 samples cannot be divided into 4 microbatches: give batches of 4 samples")


def accumulated_by_epochs(cluster):
    module, strategy = Net(), MeshStrategy(pp=2) if cluster else "single_device"
    callback = GradientAccumulationScheduler({0: 3, 1: 1, 2: 2})
    trainer = quiet_trainer(strategy, cluster, max_epochs=3, callbacks=[callback])
    trainer.fit(module, DataLoader(data(32), batch_size=8))
    return trainer.global_step, module.losses


def test_accumulation_may_change_with_the_epochs():
    steps, losses = accumulated_by_epochs(None)
    assert steps == 2 + 4 + 2
    for found in in_ranks(accumulated_by_epochs):
        assert found == (steps, pytest.approx(losses, rel=1e-6))


# Programs that stages would compute otherwise


class Noisy(Net):
    """What its inputs leave, its loss reads."""

    def inputs(self, batch):
        self.noise = batch[0].cos()
        return batch[0] + self.noise

    def configure_pipeline(self):
        loss = lambda output, batch: nn.functional.mse_loss(output, batch[1] + self.noise[:, :3])  # noqa: E731
        return Pipeline(model=self.net, inputs=self.inputs, loss=loss)


class Hooked(Net):
    def __init__(self):
        super().__init__()
        self.net.register_forward_hook(lambda _module, _inputs, output: 3 * torch.tanh(output))


class Doubled(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x)


class OwnForward(Net):
    def __init__(self):
        super().__init__()
        self.net = Doubled(*self.net)


class Perturbing(torch.optim.SGD):
    """Computes gradients a second time where those of all parameters lead."""

    def step(self, closure):
        closure()
        closure()
        return super().step()


class Perturbed(Net):
    def configure_optimizers(self):
        return Perturbing(self.parameters(), lr=0.1)


class ClippedByTorch(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


class ClippedByImportedFunction(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        clip_grad_norm_(self.parameters(), gradient_clip_val)


class CallsInHook(Net):
    def on_train_epoch_end(self):
        self.net(torch.ones(2, 6))


class CallsLayers(Net):
    def validation_step(self, batch, batch_idx):
        self.net[4:](self.net[:4](batch[0]))


PROGRAMS = {
    Noisy: "inputs of the pipeline has changed 'noise', and is called for all microbatches before the first loss",
    Hooked: "net has hooks on its forward or backward pass, and stages call its layers one after the other, without it",
    OwnForward: "Pipeline(model=Doubled) does not say in which order its layers are called",
    Perturbed: "Perturbing computes the loss of a batch several times in one step, between which it changes parameters",
    ClippedByTorch: "torch.nn.utils.clip_grad_norm_ takes the norm of the gradients of one rank, and the stages",
    ClippedByImportedFunction: "torch.nn.utils.clip_grad_norm_ takes the norm of the gradients of one rank, and the",
    CallsInHook: "Sequential, divided into stages, was called where a rank computes alone, as in a hook",
    CallsLayers: ", a layer of one stage, was called where a rank computes alone, as in a hook: call Sequential",
}


def error_of(cluster, module_class):
    trainer = quiet_trainer(MeshStrategy(pp=2), cluster, gradient_clip_val=0.5)
    with pytest.raises(MisuseError) as error:
        trainer.fit(module_class(), DataLoader(data(16), 8), DataLoader(data(16), 8))
    return str(error.value)


def test_what_stages_would_compute_otherwise_is_refused():
    cases = {program: {"module_class": program} for program in PROGRAMS}
    for found in in_ranks(each, function=error_of, cases=cases):
        for program, message in PROGRAMS.items():
            assert message in found[program]


def clipped_after_stages(cluster):
    """Return the losses of shards whose gradients torch clips, after a run with stages."""
    quiet_trainer(MeshStrategy(pp=2), cluster).validate(Net(), DataLoader(data(16), 8))
    module = ClippedByImportedFunction()
    options = {"max_epochs": 2, "gradient_clip_val": 0.05}
    quiet_trainer(MeshStrategy(), cluster, **options).fit(module, DataLoader(data(16), 4))
    return module.losses


def test_torch_clips_gradients_of_shards_after_a_run_with_stages():
    module = Net()
    quiet_trainer("single_device", max_epochs=2, gradient_clip_val=0.05).fit(module, DataLoader(data(16), 8))
    for losses in in_ranks(clipped_after_stages):
        assert losses == pytest.approx(module.losses, rel=1e-6)


class Normalized(Net):
    """A layer with a buffer that each of its forward passes changes."""

    def __init__(self):
        super().__init__()
        self.net[4] = nn.utils.spectral_norm(self.net[4])


def warned(cluster, **options):
    messages, logger = [], logging.getLogger("dstrat_mesh")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    try:
        quiet_trainer(MeshStrategy(pp=2, **options), cluster).fit(Normalized(), DataLoader(data(16), 8))
    finally:
        logger.removeHandler(handler)
    return messages


def test_a_buffer_that_microbatches_change_is_logged():
    cases = {"one": {"microbatches": 1}, "several": {"microbatches": 4}}
    first, second = in_ranks(each, function=warned, cases=cases)
    assert first == {"one": [], "several": []}
    assert second["one"] == []
    (message,) = second["several"]
    assert message == (
        "net.4.weight_u is changed in each forward pass, so that with 4 microbatches it changes as often in each "
        "batch, and once on one device"
    )
