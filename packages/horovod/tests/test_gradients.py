"""What becomes of gradients: accumulation, unused parameters, operations, and the time after a training."""

import pytest
import torch
from tests.hand_loop import Net, batches, one_pass, parts, share, start
from tests.ranks import in_ranks
from torch import nn

from dstrat.errors import ConflictError, MisuseError
from dstrat_horovod import HorovodStrategy
from dstrat_horovod.gradients import adasum


def local_gradient(batch):
    """Return the gradient of a batch on one device."""
    module = Net()
    module.training_step(batch, 0).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def gradients(cluster, accumulate=False, **options):
    """Return the gradients of one backward pass, of every rank, and the batch of this one."""
    strategy, module = HorovodStrategy(**options), Net()
    start(strategy, module, parts(cluster))
    batch = next(batches())
    if accumulate:
        with strategy.no_backward_sync():
            one_pass(strategy, batch, 0, 1)
    else:
        one_pass(strategy, batch, 0, 1)
    found = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    mine = share(strategy, batch)
    strategy.teardown()
    return found, mine


def test_a_sum_is_as_many_times_the_average():
    found = in_ranks(gradients, op="Sum")
    expected = local_gradient(next(batches()))
    for gradient, _ in found:
        torch.testing.assert_close(gradient, {name: 2 * value for name, value in expected.items()})


def test_gradients_that_accumulate_are_the_ranks_own():
    for gradient, batch in in_ranks(gradients, accumulate=True):
        torch.testing.assert_close(gradient, local_gradient(batch), rtol=0, atol=0)


class PartlyUsed(Net):
    """Each rank uses a layer of its own, both one layer, and neither the last one."""

    def make_layers(self):
        super().make_layers()
        self.alone = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.unused = nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.alone[self.rank](batch[0]).square().mean()


def partly_used(cluster, **options):
    strategy, module = HorovodStrategy(**options), PartlyUsed()
    module.rank = cluster.global_rank
    start(strategy, module, parts(cluster))
    try:
        one_pass(strategy, next(batches()), 0, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.teardown()
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def test_a_parameter_without_a_gradient_in_some_ranks_gets_that_of_the_others():
    first, second = in_ranks(partly_used)
    assert {name for name, gradient in first.items() if gradient is None} == {"unused.weight", "unused.bias"}
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first["alone.0.weight"].abs().sum() > 0
    assert first["alone.1.weight"].abs().sum() > 0


def test_groups_need_the_same_parameters_in_every_rank():
    for message in in_ranks(partly_used, num_groups=2):
        assert message.startswith("ConflictError: groups need gradients of the same parameters in every rank, and ")


class Frozen(Net):
    """Its first layer is frozen for some steps."""

    def make_layers(self):
        super().make_layers()
        self.layers[0].requires_grad_(False)


def unfrozen(cluster):
    strategy, module = HorovodStrategy(), Frozen()
    start(strategy, module, parts(cluster))
    for index, batch in enumerate(batches(2)):
        one_pass(strategy, batch, index, 1)
        module.layers[0].requires_grad_(True)
        module.zero_grad()
    one_pass(strategy, next(batches()), 2, 1)
    gradient = module.layers[0].weight.grad.clone()
    strategy.teardown()
    return gradient


def test_a_layer_that_is_unfrozen_is_reduced_from_then_on():
    expected = local_gradient(next(batches()))["layers.0.weight"]
    for gradient in in_ranks(unfrozen):
        torch.testing.assert_close(gradient, expected)


def after_training(cluster):
    strategy, module = HorovodStrategy(), Net()
    start(strategy, module, parts(cluster))
    one_pass(strategy, next(batches()), 0, 1)
    strategy.teardown()
    module.zero_grad()
    if cluster.global_rank == 0:  # alone: it would wait for ever, or fail without Horovod
        module.training_step(next(batches()), 0).backward()
        return module.layers[0].weight.grad
    return None


def test_after_a_training_the_module_is_as_any_other():
    gradient, _ = in_ranks(after_training)
    torch.testing.assert_close(gradient, local_gradient(next(batches()))["layers.0.weight"])


class Words(Net):
    """An embedding with sparse gradients."""

    def make_layers(self):
        super().make_layers()
        self.words = nn.Embedding(20, 3, sparse=True)

    def training_step(self, batch, batch_idx):
        words = (batch[0][:, 0].abs() * 8).long() % 20
        return super().training_step(batch, batch_idx) + (self.words(words) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def embedding(cluster, **options):
    strategy, module = HorovodStrategy(**options), Words()
    start(strategy, module, parts(cluster))
    for index, batch in enumerate(batches(3)):
        one_pass(strategy, batch, index, 1)
        strategy.optimizers[0].step()
        module.zero_grad()
    strategy.teardown()
    return module.words.weight.detach().clone()


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_averaged(as_dense):
    module = Words()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches(3)):
        module.training_step(batch, index).backward()
        optimizer.step()
        module.zero_grad()
    for weight in in_ranks(embedding, sparse_as_dense=as_dense):
        torch.testing.assert_close(weight, module.words.weight.detach())


class Halves(Net):
    def make_layers(self):
        super().make_layers()
        self.layers[2].bfloat16()


def refused(cluster, module_class, **options):
    strategy = HorovodStrategy(**options)
    try:
        start(strategy, module_class(), parts(cluster))
    except (ConflictError, MisuseError) as error:
        strategy.on_exception(error)
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.teardown()


def test_bfloat16_is_refused_with_the_parameter():
    for message in in_ranks(refused, module_class=Halves):
        assert message == (
            "ConflictError: Horovod 0.28 cannot reduce bfloat16, and the parameter 'layers.2.weight' has it: train "
            "with precision='bf16-mixed', whose gradients are float32, or with strategy='ddp'"
        )


def test_a_group_with_an_unknown_name_is_refused_with_the_nearest():
    for message in in_ranks(refused, module_class=Net, groups=[["layers.0.wieght"]]):
        assert message.startswith("MisuseError: groups name 'layers.0.wieght', which is no trainable parameter")
        assert message.endswith("did you mean 'layers.0.weight'?")


# Adasum


def plain_adasum(one, other):
    """Return the formula of the paper (arXiv:2006.02924, equation 4) for two vectors, without any care."""
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    of_one, of_other = (sum(a * a for a in vector) for vector in (one, other))
    return [(1 - dot / (2 * of_one)) * a + (1 - dot / (2 * of_other)) * b for a, b in zip(one, other, strict=True)]


def adasum_weights(cluster, steps=3, **options):
    strategy, module = HorovodStrategy(op="Adasum", **options), Net()
    start(strategy, module, parts(cluster))
    optimizer = strategy.optimizers[0]
    for index, batch in enumerate(batches(steps)):

        def closure(batch=batch, index=index):
            optimizer.zero_grad()
            return one_pass(strategy, batch, index, 1)

        strategy.optimizer_step(optimizer, closure, strategy.model)
    strategy.teardown()
    return {name: parameter.detach().tolist() for name, parameter in module.named_parameters()}


def by_hand(world_size, steps=3):
    """Return the weights after each rank's own Adam steps, combined by the formula in pairs, then the pairs."""
    modules = [Net() for _ in range(world_size)]
    optimizers = [module.configure_optimizers() for module in modules]
    for index, batch in enumerate(batches(steps)):
        before = {name: p.detach().clone() for name, p in modules[0].named_parameters()}
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            module.training_step(tuple(tensor[rank::world_size] for tensor in batch), index).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, start_value in before.items():
            rows = [(dict(m.named_parameters())[name].detach() - start_value).double().flatten() for m in modules]
            vectors = [row.tolist() for row in rows]
            while len(vectors) > 1:
                vectors = [plain_adasum(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
            combined = start_value + torch.tensor(vectors[0]).view_as(start_value).to(start_value.dtype)
            for module in modules:
                dict(module.named_parameters())[name].data.copy_(combined)
    return {name: p.detach() for name, p in modules[0].named_parameters()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_adasum_is_the_formula_of_the_paper(world_size):
    expected = by_hand(world_size)
    for weights in in_ranks(adasum_weights, world_size):
        for name, values in weights.items():
            torch.testing.assert_close(torch.tensor(values), expected[name], rtol=1e-5, atol=1e-6)


def test_adasum_of_compressed_updates_is_close():
    expected = by_hand(2)
    for weights in in_ranks(adasum_weights, compression="fp16"):
        for name, values in weights.items():
            torch.testing.assert_close(torch.tensor(values), expected[name], rtol=1e-2, atol=1e-3)


def test_adasum_adds_orthogonal_updates_and_averages_equal_ones():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum(torch.stack([one, other])).tolist() == [1.0, 3.0]
    assert adasum(torch.stack([other, other])).tolist() == [0.0, 3.0]
    assert adasum(torch.stack([one, 0 * one])).tolist() == [1.0, 0.0]
    assert adasum(torch.zeros(2, 2)).tolist() == [0.0, 0.0]


def test_adasum_needs_a_power_of_two():
    for message in in_ranks(refused, 3, module_class=Net, op="Adasum"):
        assert message.startswith("ConflictError: op='Adasum' combines ranks in pairs, and 3 is no power of 2")
