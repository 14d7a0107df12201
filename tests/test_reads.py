"""Families read nothing from the device in a step, also those that the simulated GPU cannot run.

Their libraries take the CPU or their own hardware, so they train on the CPU here.  What would wait for a GPU is found
by its caller: ``item()``, ``bool()`` and ``tolist()`` of a tensor.  Lines of the libraries do not count; those of the
core are watched on simulated GPUs, as it reads values of the CPU at once.
"""

import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.ranks import in_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

FIRST, LAST = 2, 5  # batches that are watched; those before agree on orders, and allocate
# In each backward pass of stage 3 the ranks compare what they have gathered, where DeepSpeed itself waits for its
# stream: independent_gradient_partition_epilogue of its stage3.py.
INTERNALS = ("_compile.py", "_python_dispatch.py", "_tensor.py", "eval_frame.py")  # between a read and the mode
BY_DESIGN = ("zero3.py", "compare")


class Reads(TorchDispatchMode):
    """Collects the stacks of reads by a line of a family."""

    def __init__(self):
        super().__init__()
        self.stacks = []
        self._tolist = torch.Tensor.tolist

    def __enter__(self):
        def tolist(tensor):
            self._note(sys._getframe(1))
            return self._tolist(tensor)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self._tolist
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            self._note(sys._getframe(1))
        return operation(*args, **(kwargs or {}))

    def _note(self, frame):
        while Path(frame.f_code.co_filename).name in INTERNALS:
            frame = frame.f_back
        if any(part.startswith("dstrat_") for part in Path(frame.f_code.co_filename).parts):
            self.stacks.append("".join(traceback.format_stack(frame)))


class Watch(Callback):
    def __init__(self):
        self.reads = Reads()

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == FIRST:
            self.reads.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == LAST:
            self.reads.__exit__(None, None, None)


class Net(TrainModule):
    reads = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(cluster, strategy, **options):
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3]), batch_size=4)
    watch = Watch()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    ranks = {"plugins": [cluster], "devices": cluster.world_size}
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", callbacks=[watch], log_every_n_steps=1000, max_epochs=1, **quiet, **ranks
    )
    trainer.fit(Net(), loader)
    votes = "training/loops/stopping.py"  # every half second
    return [stack for stack in watch.reads.stacks if votes not in stack and not is_by_design(stack)]


def is_by_design(stack):
    file, function = BY_DESIGN
    return any(file in line and line.endswith(f"in {function}") for line in stack.splitlines())


@pytest.mark.parametrize(
    ("strategy", "library"),
    [
        ("deepspeed_stage_1", "deepspeed"),
        ("deepspeed_stage_2", "deepspeed"),
        ("deepspeed_stage_3", "deepspeed"),
        ("ddp_sharded", "fairscale"),
    ],
)
def test_a_step_of_a_library_reads_nothing_through_us(strategy, library):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for stacks in in_ranks(fit, strategy=strategy):
        assert stacks == [], stacks[0]


def test_a_read_of_ours_is_found_with_its_stack():
    def average(values):
        return values.mean().item() + sum(values.tolist())

    average.__code__ = average.__code__.replace(co_filename="/site-packages/dstrat_of_somebody/strategy.py")
    with Reads() as reads:
        average(torch.ones(3))
        bool(torch.ones(()))  # of this file, which is nobody's
    assert len(reads.stacks) == 2
    assert all("dstrat_of_somebody/strategy.py" in stack for stack in reads.stacks)
