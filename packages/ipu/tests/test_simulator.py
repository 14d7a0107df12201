"""Rules of the simulated poptorch, each with the vendor's source that it was taken from.

Paths are in the repository graphcore/poptorch, unless another one is named.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss


class Model(nn.Module):
    """Returns its output and its loss."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1))

    def forward(self, inputs, targets):
        outputs = self.net(inputs)
        return outputs, mse_loss(outputs, targets)


def batch(size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)


def options(poptorch, replicas=1, iterations=1, accumulation=1, mode="All"):
    made = poptorch.Options().replicationFactor(replicas).deviceIterations(iterations)
    made.Training.gradientAccumulation(accumulation)
    return made.outputMode(getattr(poptorch.OutputMode, mode))


def training(poptorch, model=None, opts=None, optimizer=None, lr=0.1):
    model = model or Model()
    optimizer = optimizer or poptorch.optim.SGD(model.parameters(), lr=lr)
    return model, poptorch.trainingModel(model, opts, optimizer)


# Compilation


def test_each_model_is_compiled_once(simulator):
    """python/_poplar_executor.py: ``__call__`` compiles where ``isCompiled()`` is False."""
    _, executor = training(simulator)
    before = simulator.counts.copy()
    for _ in range(3):
        executor(*batch())
    assert simulator.counts.since(before).compilations == 1
    assert simulator.counts.since(before).calls == 3


def test_another_shape_raises(simulator):
    """docs/user_guide/overview.rst: graphs are static; popart checks the number of elements of each input."""
    _, executor = training(simulator)
    executor(*batch(8))
    with pytest.raises(simulator.Error, match="do not match"):
        executor(*batch(4))


def test_python_runs_while_tracing_only(simulator):
    """python/_poplar_executor.py: ``_compileWithDispatch`` calls the model once."""
    calls = []

    class Counting(Model):
        def forward(self, inputs, targets):
            calls.append(1)
            return super().forward(inputs, targets)

    _, executor = training(simulator, Counting())
    for _ in range(3):
        executor(*batch())
    assert calls == [1]


@pytest.mark.parametrize("step", [lambda loss: loss.item(), lambda loss: 1 if loss > 0 else 0, torch.nonzero])
def test_values_of_the_device_cannot_be_read_while_tracing(simulator, step):
    """docs/user_guide/tracing.rst: neither item() nor branches on values."""

    class Reading(Model):
        def forward(self, inputs, targets):
            outputs, loss = super().forward(inputs, targets)
            step(loss)
            return outputs, loss

    with pytest.raises(simulator.Error, match="known on the device only"):
        training(simulator, Reading())[1](*batch())


def test_constants_of_the_host_return_once_with_a_warning(simulator):
    """python/_poplar_executor.py warns; ``popartBatchDimForAnchor`` of popart_compiler/source/Compiler.cpp is 1."""
    kept = torch.arange(3)

    class Constant(Model):
        def forward(self, inputs, targets):
            return (*super().forward(inputs, targets), kept + 1, torch.ones(1))

    _, executor = training(simulator, Constant(), options(simulator, replicas=2))
    with pytest.warns(UserWarning, match="Output expected to be on the IPU but is on cpu"):
        _, losses, constant, made = executor(*batch())
    assert losses.shape == made.shape == (2,)
    assert constant.tolist() == [1, 2, 3]


def test_inputs_are_tensors(simulator):
    """python/_args_parser.py, and the TypeError of python/_poplar_executor.py."""
    with pytest.raises(TypeError, match="must be Tensors"):
        training(simulator)[1](batch()[0], 3)


# Options


def test_options_are_frozen_by_a_model_and_by_a_loader(simulator):
    """python/_options_impl.py: ``checkIsFrozen``; tests/options_test.py."""
    first, second = simulator.Options(), simulator.Options()
    training(simulator, opts=first)
    simulator.DataLoader(second, torch.utils.data.TensorDataset(torch.zeros(4)))
    for frozen in (first, second):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            frozen.deviceIterations(2)
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            frozen.Training.gradientAccumulation(2)
    first.clone().deviceIterations(2)  # a copy is not
    copy.deepcopy(first).Training.gradientAccumulation(2)


def test_an_unknown_option_raises(simulator):
    """python/_options_impl.py: ``__getattr__`` and ``set``."""
    with pytest.raises(AttributeError, match="Invalid attribute iterations"):
        _ = simulator.Options().iterations
    with pytest.raises(AssertionError, match="Invalid option"):
        simulator.Options().set(iterations=3)


def test_inference_refuses_accumulation(simulator):
    """python/_poplar_executor.py: the check in ``__init__``."""
    with pytest.raises(simulator.Error, match="gradientAccumulation to 1"):
        simulator.inferenceModel(Model(), options(simulator, accumulation=2))


# How much a call consumes, and what it returns


@pytest.mark.parametrize(
    ("mode", "expected"), [("All", 8), ("Final", 2), ("Sum", 2), ("Default", 2)], ids=["all", "final", "sum", "default"]
)
def test_output_modes_decide_what_returns(simulator, mode, expected):
    """poptorch/source/PoplarExecutable.cpp and popart_compiler: ``popartBatchDimForAnchor``; python/options.py."""
    _, executor = training(simulator, opts=options(simulator, replicas=2, iterations=2, accumulation=2, mode=mode))
    outputs, loss = executor(*batch(16))
    assert loss.shape == (expected,)
    assert outputs.shape == (2 * expected, 1)


def test_a_single_loss_has_no_dimension(simulator):
    """tests/attach_detach_test.py: ``len(loss.size()) == 0``."""
    assert training(simulator)[1](*batch())[1].dim() == 0


def test_a_batch_that_cannot_be_divided_raises(simulator):
    """python/_poplar_executor.py: ``narrowTensor``."""
    with pytest.raises(AssertionError, match="must be a multiple of"):
        training(simulator, opts=options(simulator, replicas=4))[1](*batch(6))


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_replicas_and_accumulation_make_one_step(simulator, replicas, accumulation):
    """python/options.py: ``accumulationAndReplicationReductionType`` is the mean by default."""
    model = Model()
    reference = copy.deepcopy(model)
    _, executor = training(simulator, model, options(simulator, replicas=replicas, accumulation=accumulation))
    executor(*batch(16))
    reference(*batch(16))[1].backward()
    for parameter in reference.parameters():
        parameter.data -= 0.1 * parameter.grad
    executor.copyWeightsToHostIfNeeded()
    for mine, theirs in zip(executor._host_tensors().values(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def test_device_iterations_are_as_many_steps(simulator):
    """python/options.py: ``deviceIterations``."""
    model = Model()
    one_by_one = copy.deepcopy(model)
    _, at_once = training(simulator, model, options(simulator, iterations=4))
    _, single = training(simulator, one_by_one)
    inputs, targets = batch(16)
    losses = at_once(inputs, targets)[1]
    for index, part in enumerate(zip(inputs.chunk(4), targets.chunk(4), strict=True)):
        assert torch.equal(single(*part)[1], losses[index])


def test_a_loader_gives_what_a_call_consumes(simulator):
    """python/__init__.py: class DataLoader."""
    dataset = torch.utils.data.TensorDataset(*batch(50))
    loader = simulator.DataLoader(options(simulator, 2, 3, 2), dataset, batch_size=2)
    assert loader.combinedBatchSize == 24
    assert [len(one[0]) for one in loader] == [24, 24]
    with pytest.raises(AssertionError, match="Switch to drop_last=True"):
        simulator.DataLoader(options(simulator, 2), dataset, batch_size=2, drop_last=False)


# The loss


def test_a_training_model_needs_a_loss(simulator):
    """tests/custom_loss_test.py: "Couldn't find a loss in graph"."""

    class Without(Model):
        def forward(self, inputs, targets):
            return ((self.net(inputs) - targets) ** 2).mean()

    with pytest.raises(simulator.Error, match="Couldn't find a loss in graph"):
        training(simulator, Without())[1](*batch())


def test_several_losses_need_a_final_one(simulator):
    """poptorch/source/popart_canonicalization: "Multiple independent losses found"."""

    class Two(Model):
        def __init__(self, *, marks):
            super().__init__()
            self.marks = marks

        def forward(self, inputs, targets):
            outputs = self.net(inputs)
            loss = mse_loss(outputs, targets) + nn.functional.l1_loss(outputs, targets)
            return simulator.identity_loss(loss, reduction="none") if self.marks else loss

    training(simulator, Two(marks=True))[1](*batch())
    with pytest.raises(simulator.Error, match="Multiple independent losses"):
        training(simulator, Two(marks=False))[1](*batch())


def test_the_loss_is_returned(simulator):
    """docs/user_guide/pytorch_to_poptorch.rst: the forward method returns the loss."""

    class Keeping(Model):
        def forward(self, inputs, targets):
            return super().forward(inputs, targets)[0]

    with pytest.raises(simulator.Error, match="must return it"):
        training(simulator, Keeping())[1](*batch())


# Optimizers


def test_the_optimizer_steps_inside_the_call(simulator):
    """python/_poplar_executor.py; neither backward() nor step() of the host does anything."""
    _, executor = training(simulator)
    losses = [executor(*batch())[1] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    with pytest.raises(RuntimeError, match="steps inside"):
        executor._optimizer.step()


def test_a_learning_rate_counts_from_set_optimizer_on(simulator):
    """tests/optimizers_test.py: a changed ``lr`` has no effect until ``setOptimizer``."""
    model = Model()
    optimizer = simulator.optim.SGD(model.parameters(), lr=0.1)
    _, executor = training(simulator, model, optimizer=optimizer)
    executor(*batch())
    optimizer.param_groups[0]["lr"] = 0.0
    first = executor(*batch())[1]
    assert executor(*batch())[1] < first
    executor.setOptimizer(optimizer)
    before = executor(*batch())[1]
    assert executor(*batch())[1] == before


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_optimizers_do_what_torch_does(simulator, name):
    """tests/optimizers_test.py: ``test_optimizer_results``."""
    model = Model()
    reference = copy.deepcopy(model)
    more = {"momentum": 0.9} if name == "SGD" else {}
    own = getattr(torch.optim, name)(reference.parameters(), lr=0.01, **more)
    optimizer = getattr(simulator.optim, name)(model.parameters(), lr=0.01, **more)
    _, executor = training(simulator, model, optimizer=optimizer)
    for step in range(5):
        loss = executor(*batch(seed=step))[1]
        own.zero_grad()
        expected = reference(*batch(seed=step))[1]
        expected.backward()
        own.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)


def test_what_is_unsupported_raises(simulator):
    """python/_optimizer_attributes.py: ``convertOptimizerToDict``."""
    parameters = list(Model().parameters())
    for optimizer, error in (
        (simulator.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True), ValueError),
        (simulator.optim.Adam(parameters, lr=0.1, amsgrad=True), ValueError),
        (torch.optim.Adagrad(parameters), AssertionError),
    ):
        with pytest.raises(error):
            simulator.trainingModel(Model(), optimizer=optimizer)


def test_optimizer_state_is_read_and_written_by_popart_names(simulator):
    """tests/optimizers_test.py: ``test_read_ipu_state``, ``test_write_ipu_state``."""
    model = Model()
    optimizer = simulator.optim.AdamW(model.parameters(), lr=0.01)
    _, executor = training(simulator, model, optimizer=optimizer)
    assert optimizer.state_dict()["ipu_state"] is None
    executor.compile(*batch())
    empty = optimizer.state_dict()["ipu_state"]
    assert set(empty) >= {"Accl1___net.0.weight", "Accl2___net.0.weight", "Step___net.0.weight"}
    assert not empty["Accl1___net.0.weight"].any()
    executor(*batch())
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["ipu_state"]["Accl1___net.0.weight"].any()
    optimizer.load_state_dict({**saved, "ipu_state": empty})
    executor.setOptimizer(optimizer)
    executor(*batch())
    assert float(optimizer.state_dict()["ipu_state"]["Step___net.0.weight"]) == 1
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        optimizer.load_state_dict(torch.optim.AdamW(Model().parameters()).state_dict())


def test_the_state_of_a_torch_optimizer_stays_on_the_device(simulator):
    """tests/optimizers_test.py: ``test_read_ipu_state_on_detach``."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _, executor = training(simulator, model, optimizer=optimizer)
    executor(*batch())
    assert optimizer.state_dict()["state"] == {}


def test_gradients_are_clipped_inside(simulator):
    """tests/optimizers_test.py: ``test_gradient_clipping`` with ``max_grad_norm``."""
    model = Model()
    reference = copy.deepcopy(model)
    optimizer = simulator.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=0.01)
    _, executor = training(simulator, model, optimizer=optimizer)
    executor(*batch())
    reference(*batch())[1].backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    expected = reference.net[0].weight - 0.1 * reference.net[0].weight.grad
    torch.testing.assert_close(executor._executable.weight("net.0.weight"), expected.detach())


# Weights on the device


def test_weights_stay_on_the_device_until_they_are_copied(simulator):
    """python/_poplar_executor.py: ``copyWeightsToHost`` and ``copyWeightsToHostIfNeeded``."""
    model, executor = training(simulator)
    with torch._C.DisableTorchFunctionSubclass():
        host = object.__getattribute__(model.net[0], "_parameters")["weight"].detach()
    before = host.clone()
    executor(*batch())
    assert torch.equal(host, before)
    assert executor.copyWeightsToHostIfNeeded()
    assert not torch.equal(host, before)
    assert not executor.copyWeightsToHostIfNeeded()


def test_looking_at_a_parameter_copies_the_weights(simulator):
    """python/_poplar_executor.py: class PoptorchParameter."""
    model, executor = training(simulator)
    executor(*batch())
    before = simulator.counts.copy()
    model.net[0].weight.sum()
    assert simulator.counts.since(before).weights_to_host == 1


def test_weights_of_the_host_count_when_they_are_copied(simulator):
    """python/_poplar_executor.py: ``copyWeightsToDevice`` runs when the model is compiled or attached."""
    model, executor = training(simulator, lr=0.0)
    first = executor(*batch())[1]
    with torch.no_grad():
        model.net[2 - 1].weight.zero_()
    assert executor(*batch())[1] == first
    executor.copyWeightsToDevice()
    assert executor(*batch())[1] != first


def test_inference_takes_the_trained_weights(simulator):
    """python/_poplar_executor.py: ``_host_weights_version`` in ``__call__``."""
    model, executor = training(simulator)
    inference = simulator.inferenceModel(model)
    before = inference(*batch())[1]
    executor(*batch())
    assert inference(*batch())[1] < before


def test_a_model_is_wrapped_until_it_is_destroyed(simulator):
    """python/__init__.py: trainingModel; python/_poplar_executor.py: ``destroy`` and class PoptorchModel."""
    model, executor = training(simulator)
    assert type(model).__name__ == "PoptorchModel"
    with pytest.raises(RuntimeError, match="already been wrapped"):
        simulator.trainingModel(model)
    with pytest.raises(Exception, match="poptorch"):
        pickle.dumps(model.net[0].weight)
    executor(*batch())
    executor.destroy()
    assert type(model) is Model
    assert type(model.net[0].weight) is nn.Parameter


def test_destroying_before_the_first_run_leaves_it_wrapped(simulator):
    """python/_poplar_executor.py: ``destroy`` returns at once where nothing is compiled."""
    model, executor = training(simulator)
    executor.destroy()
    assert type(model) is not Model


def test_half_precision_is_the_models(simulator):
    """docs/user_guide/overview.rst: ``model.half()`` and half inputs; accumulators are float32 by default."""
    model = Model().half()
    optimizer = simulator.optim.AdamW(model.parameters(), lr=0.01)
    _, executor = training(simulator, model, optimizer=optimizer)
    outputs, loss = executor(*(one.half() for one in batch()))
    assert outputs.dtype == loss.dtype == executor._executable.weight("net.0.weight").dtype == torch.float16
    assert optimizer.state_dict()["ipu_state"]["Accl1___net.0.weight"].dtype == torch.float32


def test_random_numbers_are_the_devices(simulator):
    """python/_poplar_executor.py: the property ``rng_state``; python/options.py: ``randomSeed``."""
    model = Model(nn.Dropout())
    _, executor = training(simulator, model, options(simulator).randomSeed(3), lr=0.0)
    before = torch.get_rng_state()
    executor.compile(*batch())
    state = executor.rng_state
    first = executor(*batch())[1]
    assert torch.equal(torch.get_rng_state(), before)
    assert executor(*batch())[1] != first
    executor.rng_state = state
    assert executor(*batch())[1] == first


# Devices


def test_two_models_cannot_hold_the_same_devices(simulator):
    """tests/attach_detach_test.py: "Failed to acquire", with POPTORCH_WAIT_FOR_IPU=0."""
    model, executor = training(simulator, opts=options(simulator, replicas=8))
    inference = simulator.inferenceModel(model, options(simulator, replicas=8))
    executor(*batch(8))
    with pytest.raises(simulator.Error, match="Failed to acquire"):
        inference(*batch(8))
    executor.detachFromDevice()
    with pytest.raises(simulator.Error, match="Device is not attached"):
        executor.detachFromDevice()
    inference(*batch(8))
    inference.detachFromDevice()
    executor.attachToDevice()
    with pytest.raises(simulator.Error, match="already attached"):
        executor.attachToDevice()
    executor(*batch(8))
    executor.destroy()
    assert not executor.isCompiled()


def test_detaching_keeps_weights_and_optimizer_state(simulator):
    """python/_poplar_executor.py: ``detachFromDevice``, ``_on_device_attach``."""
    losses = []
    for detaches in (False, True):
        torch.manual_seed(0)
        model = Model()
        optimizer = simulator.optim.Adam(model.parameters(), lr=0.05)
        _, executor = training(simulator, model, optimizer=optimizer)
        losses.append([])
        for _ in range(4):
            losses[-1].append(float(executor(*batch())[1]))
            if detaches:
                executor.detachFromDevice()
    assert losses[0] == losses[1]


def test_more_replicas_than_devices_raise(simulator):
    """popart_compiler/source/CompilerImpl.cpp: "Failed to acquire"."""
    with pytest.raises(simulator.Error, match="only 8 in the system"):
        training(simulator, opts=options(simulator, replicas=16))[1](*batch(16))


def test_the_number_of_devices_is_a_power_of_two(simulator):
    """popart_compiler/source/CompilerImpl.cpp: autoRoundNumIPUs."""
    with pytest.raises(simulator.Error, match="autoRoundNumIPUs"):
        training(simulator, opts=options(simulator, replicas=3))[1](*batch(6))
    training(simulator, opts=options(simulator, replicas=3).autoRoundNumIPUs(True))[1](*batch(6))


@pytest.mark.parametrize("by", ["Block", "BeginBlock"])
def test_a_pipeline_needs_as_many_batches_as_stages(simulator, by):
    """python/ops.py: Block, BeginBlock; tests/optimizers_test.py: two blocks with gradientAccumulation(3)."""

    class Pipeline(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
            if by == "BeginBlock":
                self.first = simulator.BeginBlock(self.first, ipu_id=0)
                self.second = simulator.BeginBlock(self.second, ipu_id=1)

        def forward(self, inputs, targets):
            if by == "BeginBlock":
                return mse_loss(self.second(self.first(inputs)), targets)
            with simulator.Block(ipu_id=0):
                hidden = self.first(inputs)
            with simulator.Block(ipu_id=1):
                return mse_loss(self.second(hidden), targets)

    with pytest.raises(simulator.Error, match=r"gradientAccumulation\(2\) must be at least the number of pipeline"):
        training(simulator, Pipeline(), options(simulator, accumulation=2))[1](*batch(8))
    _, executor = training(simulator, Pipeline(), options(simulator, replicas=2, accumulation=4))
    executor(*batch(8))
    assert executor._executable.num_ipus == 4


def test_wrong_options_of_another_kind_raise(simulator):
    """python/_poplar_executor.py: the check of the type of options."""
    with pytest.raises(simulator.Error, match=r"Expected poptorch\.Options"):
        simulator.trainingModel(Model(), {"deviceIterations": 1})
