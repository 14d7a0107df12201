"""A step is that of the mean over all tokens of its batches and ranks, with every strategy, as on one device."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import OwnLoop, Pipeline, TrainModule, build
from dstrat.plugins.io import PortableCheckpointIO

STRATEGIES = {"replicas": ["ddp", "bagua"], "shards": ["fsdp", "model_parallel"]}
if find_spec("deepspeed"):
    OFFLOADED = [f"deepspeed_stage_{stage}_offload" for stage in (2, 3)]
    STRATEGIES["deepspeed"] = [f"deepspeed_stage_{stage}" for stage in range(4)] + OFFLOADED
if find_spec("fairscale"):
    STRATEGIES["shards"] += ["ddp_sharded"]

TOKENS = [5, 1, 0, 7, 2, 2, 6, 1, 0, 4, 0, 8, 3, 7, 1, 1, 8, 0, 2, 5]
"""Numbers of tokens of the samples; two ranks with batches of two have ten batches, of which one has no token."""


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(len(TOKENS), 8, 6, generator=generator)
    mask = torch.arange(8) < torch.tensor(TOKENS)[:, None]
    return inputs, mask


def mean_over_tokens(net, inputs, mask):
    """Return the mean loss of the tokens, nan without any, and their number."""
    loss = nn.functional.cross_entropy(net(inputs).flatten(0, 1), labels(inputs, mask).flatten())
    return loss, mask.sum()


def labels(inputs, mask):
    return inputs.argmax(2).masked_fill(~mask, -100)


class Tokens(TrainModule):
    """Losses are means over the tokens of a batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def training_step(self, batch, batch_idx):
        loss, count = mean_over_tokens(self.net, *batch)
        self.log("train_loss", loss, on_epoch=True)
        self.log("samples", float(len(batch[0])), on_epoch=True, on_step=False, batch_size=1)
        return {"loss": loss, "weight": count if self.current_epoch else float(count)}

    def validation_step(self, batch, batch_idx):
        loss, count = mean_over_tokens(self.net, *batch)
        self.log("val_loss", loss, batch_size=count)

    def on_train_end(self):
        self.weights = self.trainer.strategy.module_state_dict()  # on rank 0
        self.logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def on_one_device(*, size, epochs, clip_val=None, samples_used=20):
    """Return the weights, the last epoch's mean loss and the loss after it, of steps of so many samples."""
    module = Tokens()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    data = [tensor[:samples_used] for tensor in samples()]
    for _ in range(epochs):
        total = 0.0
        for inputs, mask in zip(*(tensor.split(size) for tensor in data), strict=True):
            optimizer.zero_grad()
            loss, count = mean_over_tokens(module.net, inputs, mask)
            total += float(loss.detach() * count)
            loss.backward()
            if clip_val is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip_val)
            optimizer.step()
    with torch.no_grad():
        loss, _ = mean_over_tokens(module.net, *data)
    return module.state_dict(), total / sum(TOKENS), float(loss)


SETTINGS = ((1, None), (3, None), (3, 0.05))
"""Accumulated batches, and the norm to which gradients are clipped."""
ON_ONE_DEVICE = {
    (accumulate, clip_val): on_one_device(size=4 * accumulate, epochs=2, clip_val=clip_val)
    for accumulate, clip_val in SETTINGS
}


def make(strategy):
    """Return a strategy to pass to the Trainer; offloaded optimizers of DeepSpeed are its own, unless forced."""
    if strategy == "model_parallel":
        from dstrat_fsdp import ModelParallelStrategy

        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if not strategy.endswith("offload"):
        return strategy
    from dstrat_deepspeed import DeepSpeedStrategy

    config = {"zero_force_ds_cpu_optimizer": False}
    return DeepSpeedStrategy(stage=int(strategy.split("_")[2]), offload_optimizer=True, config=config)


def fits(cluster, strategy):
    """Return what two epochs leave behind on rank 0, with and without accumulation and clipping."""
    results = {}
    for accumulate, clip_val in SETTINGS:
        module = Tokens()
        trainer = quiet_trainer(
            make(strategy), cluster, max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=clip_val
        )
        data = DataLoader(TensorDataset(*samples()), batch_size=2)
        trainer.fit(module, data, DataLoader(TensorDataset(*samples()), batch_size=3))
        results[accumulate, clip_val] = module.weights, module.logged
    return results


@pytest.mark.parametrize("kind", STRATEGIES)
def test_tokens_count_alike_in_batches_and_ranks_of_uneven_numbers(kind):
    found, _ = in_ranks(each, function=fits, cases={name: {"strategy": name} for name in STRATEGIES[kind]})
    for (accumulate, clip_val), (weights, train_loss, val_loss) in ON_ONE_DEVICE.items():
        for strategy, results in found.items():
            case = (strategy, accumulate, clip_val)
            trained, logged = results[accumulate, clip_val]
            torch.testing.assert_close(
                trained, weights, rtol=1e-6, atol=1e-6, msg=lambda text, case=case: f"{case} {text}"
            )
            assert logged["train_loss_epoch"] == pytest.approx(train_loss, rel=1e-6), case
            assert logged["val_loss"] == pytest.approx(val_loss, rel=1e-6), case
            assert logged["samples"] == 2


# A mesh: replicas, shards, split layers and stages of a pipeline


class OnMesh(Tokens):
    """Splits its layers over ``tp``, and may be a pipeline."""

    def configure_model(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.device_mesh is not None and "tp" in self.device_mesh.mesh_dim_names:
            parallelize_module(self.net, self.device_mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def configure_pipeline(self):
        return Pipeline(
            model=self.net,
            loss=lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1), labels(*batch).flatten()),
            weight=lambda batch: batch[1].sum(),
        )

    def on_train_end(self):
        self.trainer.save_checkpoint(self.folder / "end", weights_only=True)


def on_mesh(cluster, folder, accumulate, clip_val, **layout):
    from dstrat_mesh import MeshStrategy

    # torch's, about in-place operations on the output of a stage, which nobody changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    module = OnMesh()
    module.folder = folder
    replicas = cluster.world_size // (layout.get("tp", 1) * layout.get("pp", 1))
    trainer = quiet_trainer(
        MeshStrategy(**layout), cluster, max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=clip_val
    )
    trainer.fit(module, DataLoader(TensorDataset(*samples()), batch_size=4 // replicas))


LAYOUTS = {
    2: [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"pp": 2}],
    4: [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2}],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.variant)])
def test_tokens_count_alike_in_each_layout_of_a_mesh(ranks, tmp_path):
    cases = {
        (str(layout), *settings): {
            **layout,
            "folder": tmp_path / f"{index}-{settings}",
            "accumulate": settings[0],
            "clip_val": settings[1],
        }
        for index, layout in enumerate(LAYOUTS[ranks])
        for settings in SETTINGS
    }
    in_ranks(each, ranks, function=on_mesh, cases=cases)
    for case, arguments in cases.items():
        trained = PortableCheckpointIO().load_checkpoint(arguments["folder"] / "end")["state_dict"]
        right = ON_ONE_DEVICE[case[1:]][0]
        torch.testing.assert_close(
            dict(trained), right, rtol=1e-6, atol=1e-6, msg=lambda text, case=case: f"{case} {text}"
        )


# A loop of one's own


def loops(cluster, strategy):
    """Return the weights after an epoch of groups of two batches, on rank 0, with a step of each kind of weight."""
    return OwnLoop(build(strategy=make(strategy), accelerator="cpu", devices=2, plugins=[cluster])).launch(own_loop)


def own_loop(loop):
    module = Tokens()
    loop.setup(module, lambda module: module.configure_optimizers(), accumulate_grad_batches=2, gradient_clip_val=0.05)
    for inputs, mask in loop.training_loader(DataLoader(TensorDataset(*samples()), batch_size=2)):
        loss, count = loop.compute(mean_over_tokens, module.net, inputs, mask)
        loop.backward(loss, weight=int(count) if loop.steps_done else count)
        loop.step()
    return loop.strategy.module_state_dict()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_loop_of_ones_own_passes_the_number_of_tokens_to_backward(kind):
    found, _ = in_ranks(each, function=loops, cases={name: {"strategy": name} for name in STRATEGIES[kind]})
    weights, *_ = on_one_device(size=8, epochs=1, clip_val=0.05, samples_used=16)
    for strategy, trained in found.items():
        torch.testing.assert_close(trained, weights, rtol=1e-6, atol=1e-6, msg=lambda text, of=strategy: f"{of} {text}")


# Manual optimization


class ByHand(Tokens):
    """Computes what :class:`Tokens` does, by itself."""

    def __init__(self, accumulate, clip_val):
        super().__init__()
        self.automatic_optimization = False
        self.accumulate, self.clip_val = accumulate, clip_val

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        is_last = (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch
        with self.no_backward_sync(enabled=not is_last):
            loss, count = mean_over_tokens(self.net, *batch)
            self.manual_backward(loss, weight=count if self.current_epoch else int(count))
        if is_last:
            self.clip_gradients(optimizer, self.clip_val)
            optimizer.step()
            optimizer.zero_grad()


def by_hand(cluster, strategy):
    """Return the weights after two epochs on rank 0, with and without accumulation and clipping."""
    results = {}
    for accumulate, clip_val in SETTINGS:
        module = ByHand(accumulate, clip_val)
        data = DataLoader(TensorDataset(*samples()), batch_size=2)
        quiet_trainer(make(strategy), cluster, max_epochs=2).fit(module, data)
        results[accumulate, clip_val] = module.weights
    return results


BY_HAND = {kind: [name for name in names if name != "ddp_sharded"] for kind, names in STRATEGIES.items()}


@pytest.mark.parametrize("kind", BY_HAND)
def test_manual_backward_takes_the_number_of_tokens(kind):
    found, _ = in_ranks(each, function=by_hand, cases={name: {"strategy": name} for name in BY_HAND[kind]})
    for (accumulate, clip_val), (weights, *_) in ON_ONE_DEVICE.items():
        for strategy, results in found.items():
            case = (strategy, accumulate, clip_val)
            torch.testing.assert_close(
                results[accumulate, clip_val],
                weights,
                rtol=1e-6,
                atol=1e-6,
                msg=lambda text, case=case: f"{case} {text}",
            )
