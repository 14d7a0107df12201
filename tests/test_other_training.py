"""A checkpoint of another training is refused by all ranks of every strategy, one with frozen parts left out is not."""

from importlib.util import find_spec

import torch
from tests.ranks import each, in_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Trainer, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError

FORMATS = {"folder": PortableCheckpointIO, "file": TorchCheckpointIO}
CASES = [("ddp", "folder"), ("ddp", "file"), ("fsdp", "folder"), ("fsdp", "file")]
if find_spec("deepspeed"):
    CASES += [("deepspeed_stage_2", "folder"), ("deepspeed_stage_3", "folder"), ("deepspeed_stage_3", "file")]
if find_spec("fairscale"):
    CASES += [("ddp_sharded", "folder"), ("ddp_sharded", "file")]


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([value for value in self.parameters() if value.requires_grad], lr=0.1)


class InGroups(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW([{"params": part.parameters()} for part in (self.first, self.second)], lr=0.1)


class OfAnotherKind(Net):
    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Pretrained(Net):
    """Leaves what is frozen out of its checkpoints."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.count = 0
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.more = nn.Linear(4, 4, bias=False).requires_grad_(False)

    def get_extra_state(self):
        return torch.tensor(self.count)

    def set_extra_state(self, state):
        self.count = int(state)

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step([self.frozen(batch[0])], batch_idx)

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.startswith("frozen")]:
            del checkpoint["state_dict"][name]


class Unlike(Pretrained):
    """Lacks what the other one has beside."""

    strict_loading = True

    def __init__(self):
        super().__init__()
        del self.more


def trainer(cluster, strategy, kind, folder):
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=cluster.world_size,
        plugins=[cluster, FORMATS[kind]()],
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )


def loader():
    return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)


def saved(cluster, strategy, kind, folder, module):
    path = folder / f"{strategy}-{kind}-{type(module).__name__}.ckpt"
    module.on_train_end = lambda: module.trainer.save_checkpoint(path)
    trainer(cluster, strategy, kind, folder).fit(module, loader())
    return path


def refusal(cluster, strategy, kind, folder, module, path):
    try:
        trainer(cluster, strategy, kind, folder).fit(module, loader(), ckpt_path=path)
    except CheckpointError as error:
        where, _, reason = str(error).partition(" cannot be loaded: ")
        return reason if where == f"checkpoint {str(path)!r}" else str(error)
    return None


def attempts(cluster, strategy, kind, folder):
    where = (cluster, strategy, kind, folder)
    path = saved(*where, Net())
    found = {type(module).__name__: refusal(*where, module, path) for module in (InGroups(), OfAnotherKind())}
    path = saved(*where, Pretrained())
    goes_on = Pretrained()
    found |= {type(module).__name__: refusal(*where, module, path) for module in (Unlike(), goes_on)}
    return {**found, "count": goes_on.count}


def test_all_ranks_refuse_what_does_not_fit_and_go_on_without_what_was_left_out(tmp_path):
    cases = {(strategy, kind): {"strategy": strategy, "kind": kind, "folder": tmp_path} for strategy, kind in CASES}
    one, other = in_ranks(each, function=attempts, cases=cases)
    assert one == other
    for case, found in one.items():
        how, kind = ("ShardedOptimizer",) * 2 if case[0] == "ddp_sharded" else ("AdamW", "Adagrad")
        assert found["InGroups"].startswith(
            f"the optimizer's state in the checkpoint is of 1 group of 4 parameters, and {how} has 2 groups of 2 and 2 "
            "parameters here. Make the optimizers as they were trained; or load the weights alone"
        ), case
        assert f"{kind} needs" in found["OfAnotherKind"] or "has no tensor optimizers/0/" in found["OfAnotherKind"], (
            case
        )
        assert found["Unlike"].startswith("the weights do not fit Unlike: missing frozen."), case
        assert "unexpected more.weight. Make the module as it was trained" in found["Unlike"], case
        assert found["Pretrained"] is None, case
        assert found["count"] == 2, case
