from __future__ import annotations

import torch
from torch import nn

from dstrat.training.callbacks.model_summary import summarize


def test_top_level_layers_are_listed_with_their_parameters_and_totals():
    module = nn.Module()
    module.encoder = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU())
    module.head = nn.Linear(1000, 2).requires_grad_(False).to(torch.bfloat16)
    module.scale = nn.Parameter(torch.ones(1))
    assert summarize(module).splitlines() == [
        "layer    type        parameters  trainable",
        "------------------------------------------",
        "encoder  Sequential   1,001,000  1,001,000",
        "head     Linear           2,002          0",
        "(own)    Parameter            1          1",
        "------------------------------------------",
        "total    Module       1,003,003  1,001,001",
        "4.01 MB of parameters",
    ]


def test_a_parameter_that_two_layers_share_counts_once_in_the_total():
    module = nn.Module()
    module.one = nn.Linear(2, 2, bias=False)
    module.other = nn.Linear(2, 2, bias=False)
    module.other.weight = module.one.weight
    assert summarize(module).splitlines()[-2].split() == ["total", "Module", "4", "4"]


def test_a_layer_whose_size_is_not_known_yet_counts_nothing():
    module = nn.Sequential(nn.LazyLinear(3))
    assert summarize(module).splitlines()[-1] == "0 B of parameters"


def test_a_module_without_anything_has_a_total_of_nothing():
    assert summarize(nn.Identity()).splitlines()[-2].split() == ["total", "Identity", "0", "0"]


def test_a_trainer_writes_it_when_a_fit_starts_and_only_then(quiet_trainer, line, loader, capsys):
    trainer = quiet_trainer(enable_model_summary=True)
    trainer.fit(line, loader())
    captured = capsys.readouterr()
    assert captured.err == f"{summarize(line)}\n"
    assert captured.out == ""
    trainer.test(line, loader())
    assert capsys.readouterr().err == ""


def test_it_is_written_once_for_all_ranks(quiet_trainer, line, loader, averaging, capfd):
    quiet_trainer(enable_model_summary=True, devices=2, strategy=averaging(), max_epochs=1).fit(line, loader())
    assert capfd.readouterr().err.count("total  Line") == 1


def test_sharded_parameters_count_whole(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        assert summarize(nn.Sequential(layer)).splitlines()[-2:] == [
            "total  Sequential          16         16",
            "64 B of parameters",
        ]
    finally:
        dist.destroy_process_group()
