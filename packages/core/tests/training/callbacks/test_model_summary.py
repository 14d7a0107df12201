from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from dstrat.errors import RequestError
from dstrat.training.callbacks.model_summary import (
    ModelSummary,
    as_text,
    format_bytes,
    record_shapes,
    show_on_terminal,
    summarize,
)


def lines_of(module, **options):
    return as_text(summarize(module, **options)).splitlines()


def test_top_level_layers_are_listed_with_their_parameters_and_totals():
    module = nn.Module()
    module.encoder = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU())
    module.head = nn.Linear(1000, 2).requires_grad_(False).to(torch.bfloat16)
    module.scale = nn.Parameter(torch.ones(1))
    assert lines_of(module) == [
        "layer    type        parameters  trainable     size",
        "---------------------------------------------------",
        "encoder  Sequential   1,001,000  1,001,000     4 MB",
        "head     Linear           2,002          0     4 kB",
        "(own)                         1          1      4 B",
        "---------------------------------------------------",
        "total    Module       1,003,003  1,001,001  4.01 MB",
    ]


def test_layers_are_listed_as_deep_as_was_asked_for():
    module = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Tanh())), nn.ReLU())

    def names(depth):
        return [layer.name for layer in summarize(module, max_depth=depth).layers]

    assert names(0) == []
    assert names(1) == ["0", "1"]
    assert names(2) == ["0", "0.0", "0.1", "1"]
    assert names(-1) == ["0", "0.0", "0.1", "0.1.0", "1"]
    module.own = nn.Parameter(torch.ones(1))
    assert len(lines_of(module, max_depth=0)) == 3
    with pytest.raises(RequestError, match=r"ModelSummary\(max_depth=-2\) must be 0 or more, or -1 for all levels"):
        ModelSummary(max_depth=-2)


def test_buffers_count_as_memory_and_not_as_parameters():
    total = summarize(nn.Sequential(nn.BatchNorm1d(4))).total
    assert (total.parameters, total.num_bytes) == (8, 8 * 4 + 8 * 4 + 8)


def test_a_parameter_that_two_layers_share_counts_once_in_the_total():
    module = nn.Module()
    module.one = nn.Linear(2, 2, bias=False)
    module.other = nn.Linear(2, 2, bias=False)
    module.other.weight = module.one.weight
    assert [line.split() for line in lines_of(module)[-2:]] == [
        ["total", "Module", "4", "4", "16", "B"],
        ["layers", "share", "4", "parameters,", "which", "count", "once", "in", "the", "total"],
    ]


def test_a_layer_whose_size_is_not_known_yet_counts_nothing_and_is_told_of():
    *_, total, remark = lines_of(nn.Sequential(nn.LazyLinear(3), nn.Linear(1, 1)))
    assert total.split() == ["total", "Sequential", "2", "2", "8", "B"]
    assert remark == "2 parameters of lazy layers have no size yet, and are not counted"


def test_parameters_without_memory_are_told_of():
    *_, total, remark = lines_of(nn.Linear(2, 2, device="meta"))
    assert total.split()[-2:] == ["24", "B"]
    assert remark.startswith("parameters on the meta device take no memory yet")


def test_a_module_without_anything_has_a_total_of_nothing():
    assert lines_of(nn.Identity())[-1].split() == ["total", "Identity", "0", "0", "0", "B"]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (4.012e6, "4.01 MB"), (7e13, "70 TB")]
)
def test_sizes_have_three_digits_and_a_unit(size, text):
    assert format_bytes(size) == text


class Branches(nn.Module):
    """Draws random numbers, depends on its mode, calls a layer twice, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Identity().eval()
        self.unused = nn.Linear(1, 1)
        self.was_training = None

    def forward(self, x, scale=None):
        self.was_training = self.training
        random.random()
        x = self.norm(x + torch.rand(1))
        return {"logits": self.head(self.head.weight.new_zeros(9, 4)[:, :4]), "pair": (self.head(x), None, "text")}


def test_an_example_gives_the_shapes_of_each_layer_and_leaves_everything_as_it_was():
    module = Branches()
    before = (random.getstate(), torch.get_rng_state(), {k: v.clone() for k, v in module.state_dict().items()})
    shapes = record_shapes(module, {"x": torch.ones(3, 4), "scale": None}, module.forward)
    assert module.was_training is False
    assert [part.training for part in module.modules()] == [True, True, True, False, True]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(value, before[2][name]) for name, value in module.state_dict().items())
    assert not any(part._forward_hooks for part in module.modules())
    assert {name: (shape.input, shape.output) for name, shape in shapes.items()} == {
        "norm": ("[3, 4]", "[3, 4]"),
        "head": ("[9, 4]", "[9, 2]"),
        "": ("x=[3, 4], scale=None", "{logits: [9, 2], pair: ([3, 2], None ..."),
    }


@pytest.fixture
def shown(quiet_trainer, line_class, loader, capsys):
    """Fits a module that may have an example, and returns what was written."""

    def shown_(example=None, change=None, **options):
        class Net(line_class):
            def forward(self, x):
                assert not torch.is_grad_enabled()
                return self.layer(x)

        module = Net()
        if example is not None:
            module.example_input_array = example
        quiet_trainer(enable_model_summary=True, max_epochs=1, **options).fit(module, loader())
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines()

    return shown_


def test_a_trainer_writes_it_when_a_fit_starts_and_only_then(quiet_trainer, line, loader, capsys, shown):
    assert shown() == [
        "layer  type    parameters  trainable  size",
        "------------------------------------------",
        "layer  Linear           9          9  36 B",
        "------------------------------------------",
        "total  Net              9          9  36 B",
    ]
    quiet_trainer(enable_model_summary=True).test(line, loader(), verbose=False)
    assert capsys.readouterr().err == ""


def test_a_module_with_an_example_has_its_shapes_in_the_table(shown):
    lines = shown(torch.zeros(5, 8), precision="bf16-mixed")
    assert lines[0].split() == ["layer", "type", "parameters", "trainable", "size", "input", "output", "FLOPs"]
    assert lines[2].endswith("36 B  [5, 8]  [5, 1]     80")  # 5 x 8 products and as many sums


def test_operations_of_a_layer_are_those_of_its_first_call():
    module = Branches()
    shapes = record_shapes(module, {"x": torch.ones(3, 4)}, module.forward)
    flops = {name: shape.flops for name, shape in shapes.items()}
    assert flops == {"norm": 0, "head": 2 * 9 * 4 * 2, "": 2 * (9 + 3) * 4 * 2}


def test_modes_are_shown_where_a_layer_is_in_evaluation_mode():
    module = nn.Sequential(nn.Linear(1, 1), nn.Dropout().eval())
    heads, _, *rows = [line.split() for line in lines_of(module)]
    assert [row[2] for row in (heads, *rows[:2])] == ["mode", "train", "eval"]


def test_an_example_that_does_not_fit_is_a_remark_and_training_goes_on(shown):
    assert shown(torch.zeros(5, 7))[-1].startswith("no shapes: forward failed on example_input_array with RuntimeError")


def test_it_is_written_once_for_all_ranks(quiet_trainer, line, loader, averaging, capfd):
    quiet_trainer(enable_model_summary=True, devices=2, strategy=averaging(), max_epochs=1).fit(line, loader())
    assert capfd.readouterr().err.count("total  Line") == 1


def test_on_a_terminal_it_is_a_table_of_lines(terminal, quiet_trainer, line, loader):
    line.example_input_array = torch.zeros(5, 8)
    line.forward = line.layer.__call__
    with terminal() as screen:
        quiet_trainer(enable_model_summary=True, max_epochs=1).fit(line, loader())
    rows = [row.split() for row in screen.lines if row.strip()]
    (rule,) = rows.pop(1)
    assert set(rule) == {"─"}
    assert rows == [
        ["layer", "type", "parameters", "trainable", "size", "input", "output", "FLOPs"],
        ["layer", "Linear", "9", "9", "36", "B", "[5,", "8]", "[5,", "1]", "80"],
        [rule],
        ["total", "Line", "9", "9", "36", "B", "[5,", "8]", "[5,", "1]", "80"],
    ]


def test_totals_alone_have_one_rule_on_a_terminal(terminal, line):
    with terminal() as screen:
        show_on_terminal(summarize(line, max_depth=0))
    assert [row.split()[0].strip("─") for row in screen.lines if row.strip()] == ["layer", "", "total"]


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
        assert lines_of(nn.Sequential(layer))[-1].split() == ["total", "Sequential", "16", "16", "64", "B"]
    finally:
        dist.destroy_process_group()
