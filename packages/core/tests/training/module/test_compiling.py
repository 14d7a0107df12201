from __future__ import annotations

import copy
import pickle
import shutil

import pytest
import torch
from torch import nn

from dstrat import Callback, TrainModule
from dstrat.errors import MisuseError
from dstrat.training.module.hyperparameters import MODULE_KEYS, checkpoint_entries
from dstrat.training.module.loading import read_checkpoint

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a C compiler")


class Compiled:
    """A backend of torch.compile that runs the graph as it is, and counts how often."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*args):
            self.calls += 1
            return graph(*args)

        return run


@pytest.fixture
def backend():
    torch.compiler.reset()
    yield Compiled()
    torch.compiler.reset()


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Wrapping(Net):
    """A module whose author compiles a part of it."""

    def __init__(self, backend="eager"):
        super().__init__()
        self.net = torch.compile(self.net, backend=backend, dynamic=False)


NAMES = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


class Hooks(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def losses(trainer_of, module, loader):
    hooks = Hooks()
    trainer = trainer_of(max_epochs=1, callbacks=[hooks])
    trainer.fit(module, loader(), loader())
    assert trainer.callback_metrics["val_loss"] > 0
    return hooks.seen


def test_forward_is_compiled_once_for_training_and_once_for_evaluation(quiet_trainer, make_line, loader, backend):
    module = make_line(Net)
    module.compile(backend=backend, dynamic=False)
    compiled = losses(quiet_trainer, module, loader)
    assert backend.graphs == 2
    assert backend.calls == 6 + 6 + 2  # training, validation, sanity check
    assert compiled == pytest.approx(losses(quiet_trainer, make_line(Net), loader), rel=1e-6)


def test_layers_that_steps_call_themselves_are_compiled(quiet_trainer, line, loader, backend):
    line.compile(backend=backend, dynamic=False)
    quiet_trainer(max_steps=3).fit(line, loader())
    assert backend.calls == 3


def test_layers_in_lists_are_compiled_and_what_has_no_parameters_is_not(backend):
    module = TrainModule()
    module.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
    module.loss = nn.MSELoss()
    module.compile(backend=backend)
    compiled = [name for name, part in module.named_modules() if part._compiled_call_impl is not None]
    assert compiled == ["layers.0"]


def test_a_module_with_nothing_to_compile_is_an_error(backend):
    with pytest.raises(MisuseError, match="TrainModule has no forward and no layers yet"):
        TrainModule().compile(backend=backend)


def test_copies_and_pickles_are_compiled_again():
    module = Net()
    module.compile(backend="eager")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._compiled_call_impl is not None
        assert other.net._compiled_call_impl is not None
        assert torch.equal(other(torch.ones(1, 8)), module(torch.ones(1, 8)))


@pytest.mark.parametrize("cls", [Net, Wrapping])
def test_the_compiler_does_not_show_in_names_of_weights(cls):
    module = cls()
    module.compile(backend="eager")
    state = module.state_dict()
    assert list(state) == NAMES
    assert {name for name in state._metadata if "_orig_mod" in name} == set()
    outer = nn.Sequential(module)
    assert list(outer.state_dict()) == [f"0.{name}" for name in NAMES]


def test_a_part_of_a_wrapped_module_keeps_the_names_that_its_owner_loads():
    wrapped = torch.compile(Wrapping(), backend="eager")
    assert list(wrapped.state_dict()) == [f"_orig_mod.{name}" for name in NAMES]


@pytest.mark.parametrize(("cls", "other"), [(Net, Wrapping), (Wrapping, Net), (Wrapping, Wrapping)])
def test_weights_go_from_a_plain_module_to_a_compiled_one_and_back(cls, other):
    source, target = cls(), other()
    assert target.load_state_dict(source.state_dict()) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict({})


def test_weights_that_were_saved_with_the_compilers_names_are_loaded():
    source = Wrapping()
    state = nn.Module.state_dict(source)
    assert all("_orig_mod" in name for name in state)
    for target in (Net(), Wrapping()):
        assert target.load_state_dict(state) == ([], [])


def test_buffers_keep_the_versions_that_loading_them_asks_for():
    module = TrainModule()
    module.net = torch.compile(nn.BatchNorm1d(2), backend="eager")
    assert module.state_dict()._metadata["net"] == {"version": 2}
    assert module.load_state_dict(module.state_dict()) == ([], [])


def test_a_training_of_a_wrapped_part_goes_on_from_its_checkpoint(quiet_trainer, make_line, loader, tmp_path, backend):
    class Saving(Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "it.ckpt")

    first = make_line(Wrapping, backend=backend)
    quiet_trainer(max_epochs=1, callbacks=[Saving()]).fit(first, loader())
    assert list(read_checkpoint(tmp_path / "it.ckpt")["state_dict"]) == NAMES
    plain, wrapped = Net(), Wrapping(backend)
    for module in (plain, wrapped):
        trainer = quiet_trainer(max_epochs=2)
        trainer.fit(module, loader(), ckpt_path=tmp_path / "it.ckpt")
        assert trainer.global_step == 12
    assert all(torch.allclose(a, b) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))
    loaded = Net.load_from_checkpoint(tmp_path / "it.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), first.parameters(), strict=True))
    assert checkpoint_entries(first, MODULE_KEYS) == {}


def test_several_processes_train_a_compiled_module(quiet_trainer, make_line, loader, averaging, tmp_path):
    whole = make_line(Net)
    quiet_trainer(max_epochs=1).fit(whole, loader(batch_size=16))
    module = make_line(Net)
    module.compile(backend="eager", dynamic=False)
    quiet_trainer(strategy=averaging(start_method="forkserver"), devices=2, max_epochs=1).fit(module, loader())
    assert list(module.state_dict()) == NAMES
    assert torch.allclose(module.net[0].weight, whole.net[0].weight, atol=1e-6)


class Small(Net):
    """A module of which little is left for the C compiler, which takes seconds for each kernel."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)


QUICK = {
    "compile_threads": 1,  # others would import torch in processes of their own
    "cpp_cache_precompile_headers": False,
    "cpp.simdlen": 1,  # with the next, the compiler is not tried with instructions that this processor may have
    "cpp.vec_isa_ok": False,
}


@pytest.mark.slow
@pytest.mark.on_cpu  # as simulated devices are unknown to torch's compiler
@needs_compiler
def test_torchs_own_compiler_trains_as_without(quiet_trainer, make_line, loader):
    from torch._inductor import list_options  # here, as its import takes a second

    known = list_options()  # older versions of torch do not have all
    module = make_line(Small)
    module.compile(dynamic=False, options={name: value for name, value in QUICK.items() if name in known})
    compiled = losses(quiet_trainer, module, loader)
    assert compiled == pytest.approx(losses(quiet_trainer, make_line(Small), loader), rel=1e-4)
