"""``dstrat choose``: what fits, in the order of predicted times, with reasons and a line to paste."""

import contextlib
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from dstrat import Pipeline, TrainModule
from dstrat.builtin.precision.true import TruePrecision
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.cli.choose.candidates import Candidates, Workload, in_order, undominated
from dstrat.cli.choose.command import reasons
from dstrat.cli.choose.cost import StepTime, collective_seconds, step_time
from dstrat.cli.choose.sizes import TrainingSizes
from dstrat.cli.components import loaded_catalog
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training, read_training
from dstrat.cli.main import commands
from dstrat.cli.measure.machine import Link, Machine
from dstrat.errors import DstratError, RequestError
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.memory import MemoryLayout, Work
from dstrat.parallel.strategy import ParallelStrategy
from dstrat.plugins.catalog import refresh_catalog
from dstrat.plugins.registry import StrategyRegistry

MODULE = __name__
WIDTH, BATCH = 256, 8
WEIGHTS = 4 * 4 * WIDTH * WIDTH  # bytes


def machine(**changes):
    """A machine of two devices, whose numbers are easy to reckon with."""
    values = {
        "name": "mine",
        "device": "made up",
        "device_type": "cpu",
        "devices": 2,
        "memory": 2**30,
        "flops": {"float32": 1e9, "bfloat16": 4e9},
        "memory_bandwidth": 1e9,
        "operation_latency": 0.0,
        "host_bandwidth": 1e8,
        "overlap": 0.5,
        "links": (Link(kind="any", scope="machine", ranks=2, latency=0.0, bandwidth=1e8),),
        "source": "this test",
    }
    return Machine(**{**values, **changes})


def plain():
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    return layers, torch.zeros(BATCH, WIDTH)


class Split(TrainModule):
    """Says that it splits its layers."""

    def __init__(self):
        super().__init__()
        self.net, _ = plain()
        self.example_input_array = torch.zeros(BATCH, WIDTH)

    def forward(self, x):
        return self.net(x)

    def configure_model(self):
        self.device_mesh["tp"]

    def configure_optimizers(self):
        return adamw(self)


class Whole(Split):
    """Defines nothing of what a mesh can divide."""

    configure_model = TrainModule.configure_model


class Experts(nn.Module):
    """Four small matrices, which add up."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

    def forward(self, tokens, index, weights):
        return torch.einsum("tw,ewo->to", tokens, self.weight) * weights


class Routed(Whole):
    """Has one layer of experts."""

    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, x):
        return self.experts(self.net(x), torch.zeros(len(x), 1, dtype=torch.long), x[:, :1])

    def configure_experts(self):
        return [self.experts]


class Staged(Whole):
    """Has four layers in order."""

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=lambda output, batch: output.mean())


class Head(nn.Linear):
    """A layer that saves its output."""

    def forward(self, x):
        return super().forward(x).exp()


class LargeHead(Staged):
    """Has a last layer that is larger than the others together, and saves more."""

    def __init__(self):
        super().__init__()
        self.net.append(Head(WIDTH, 32 * WIDTH, bias=False))


class AttendsAndSplits(Split):
    """Has two heads, which no more than two ranks divide."""

    def __init__(self):
        super().__init__()
        self.net, self.example_input_array = attending()


def attending():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.zeros(BATCH, 16, WIDTH)


class NeverSplits(Split):
    """Makes layers in ``configure_model``, and splits none."""

    def configure_model(self):
        pass


class SplitsElsewhere(Split):
    """Splits its layers over the mesh of another strategy."""

    def configure_model(self):
        self.device_mesh["tensor_parallel"]


class Unused(Whole):
    """Has a layer on which the loss does not depend."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Scheduled(Whole):
    """Has a schedule that needs the length of the training."""

    def configure_optimizers(self):
        optimizer = adamw(self)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


class Positioned(nn.Module):
    """Has positions, which are broadcast over the samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, positions, values):
        return self.layer(values + positions).mean()


def positioned():
    return Positioned(), {"positions": torch.zeros(1, WIDTH), "values": torch.zeros(BATCH, WIDTH)}


class ReturnsWeights(nn.Module):
    """Asks attention for its weights, as ``nn.MultiheadAttention`` does by default."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def returns_weights():
    return ReturnsWeights(), torch.zeros(BATCH, 16, WIDTH)


def odd_sequence():
    module, _ = attending()
    return module, torch.zeros(BATCH, 15, WIDTH)


def with_muon():
    module, batch = plain()
    return module, batch, lambda module: torch.optim.Muon(module.parameters())


def printing():
    print("made")
    return plain()


def broken(size):
    return plain()


def without_parameters():
    module, batch = plain()
    return module, batch, lambda module: torch.optim.AdamW([])


def mismatched():
    return nn.Linear(WIDTH, WIDTH), torch.zeros(BATCH, WIDTH + 1)


def adamw(module):
    return torch.optim.AdamW(module.parameters())


@pytest.fixture
def choose(tmp_path):
    path = tmp_path / "machine.json"

    def run(*options, factory="plain", of=None, all_precisions=False):
        path.write_text((of or machine()).to_json())
        one = () if "--precision" in options or all_precisions else ("--precision", "32-true")
        arguments = ["choose", f"{MODULE}:{factory}", "--machine", str(path), *one, *options]
        return CliRunner().invoke(commands, arguments)

    return run


def ranking(shown):
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return json.loads(shown.stdout)


@contextlib.contextmanager
def registered(alias, strategy_class):
    StrategyRegistry.register(alias, strategy_class)
    try:
        yield
    finally:
        StrategyRegistry.remove(alias)


DDP_AND_FSDP = ("--strategy", "ddp", "--strategy", "fsdp")


def test_the_fastest_layout_is_first_with_the_line_to_paste(choose):
    pytest.importorskip("dstrat_fsdp")
    slow = Link(kind="any", scope="machine", ranks=2, latency=0.0, bandwidth=1e7)
    shown = choose("--devices", "2", *DDP_AND_FSDP, of=machine(links=[slow]))
    assert shown.exit_code == 0
    assert "ddp is the fastest; fsdp takes" in shown.output
    assert "it communicates" in shown.output
    assert re.search(r"With less than [1-9]\d*\.\d MiB on each device the choice is fsdp\.", shown.output)
    assert 'Trainer(strategy="ddp", accelerator="cpu", devices=2)  # batches of 8' in shown.output.splitlines()


def test_times_are_those_of_work_and_bytes(choose):
    (one,) = ranking(choose("--devices", "2", "--strategy", "ddp", "--json"))["candidates"]
    products = 2 * BATCH * WIDTH * WIDTH * (4 + 4 + 3)  # forward, gradients of weights, and of inputs but the first
    assert one["seconds"]["compute"] == pytest.approx(products / 1e9, rel=0.1)
    sent = WEIGHTS / 1e8  # an all-reduce of two ranks sends all bytes once
    hidden = 0.5 * min(sent, 2 / 3 * one["seconds"]["compute"])
    copied = 4 * WEIGHTS / 1e9  # gradients into buckets and back
    assert one["seconds"]["communication"] == pytest.approx(sent - hidden + copied)
    assert one["seconds"]["total"] == pytest.approx(sum(one["seconds"][name] for name in PARTS))


PARTS = ("compute", "communication", "idle", "optimizer", "offload")


def test_a_layout_that_does_not_fit_is_left_out_with_its_memory(choose):
    shown = ranking(choose("--devices", "2", *DDP_AND_FSDP, "--device-memory", "5MiB", "--json"))
    assert [one["strategy"] for one in shown["candidates"]] == ["fsdp"]
    assert shown["refused"]["ddp"].startswith("it needs 0.0 GiB with batches of 1 (parameters 0.0")
    too_large = shown["too_large"]["ddp"]
    assert (too_large["batch_size"], too_large["sizes"]["parameters"]) == (1, WEIGHTS)
    assert too_large["peak"] > 0.9 * 5 * 2**20
    assert shown["reasons"] == ["fsdp is the only layout that fits."]


def test_what_does_not_fit_is_shown_with_the_batches_that_need_least(choose):
    pytest.importorskip("dstrat_fsdp")
    # One sample takes less memory than gradients that are accumulated.
    options = ("--devices", "2", "--strategy", "fsdp", "--batch", "4", "--json")
    shown = ranking(choose(*options, "--device-memory", "1MiB"))
    fits, *_ = ranking(choose(*options))["candidates"]
    assert (fits["batch_size"], fits["accumulate_grad_batches"]) == (2, 1)
    assert shown["too_large"]["fsdp"]["peak"] == fits["memory"]["peak"]
    assert shown["too_large"]["fsdp"]["batch_size"] == 2


def test_on_one_device_layers_may_compute_activations_again(choose):
    options = ("--devices", "1", "--strategy", "single_device", "--batch", "1024", "--json")
    found = {one["strategy"]: one for one in ranking(choose(*options, factory="attending"))["candidates"]}
    usual, again = found["single_device"], found["single_device(activation_checkpointing='full')"]
    assert again["memory"]["peak"] < usual["memory"]["peak"]
    assert again["seconds"]["compute"] > usual["seconds"]["compute"]


def test_nothing_that_fits_is_a_problem(choose):
    shown = choose("--devices", "2", "--strategy", "ddp", "--device-memory", "1MiB")
    assert shown.exit_code == 1
    assert "no layout fits: take more devices, a smaller --batch or a lower --precision" in shown.output


def test_a_batch_that_does_not_fit_is_accumulated(choose):
    options = ("--devices", "2", "--strategy", "ddp", "--batch", "8192")
    (one,) = ranking(choose(*options, "--device-memory", "11MiB", "--json"))["candidates"]
    assert one["batch_size"] * one["accumulate_grad_batches"] == 4096
    assert 1 < one["accumulate_grad_batches"] < 4096
    assert one["trainer"].endswith(
        f"accumulate_grad_batches={one['accumulate_grad_batches']})  # batches of {one['batch_size']}"
    )


def test_on_smaller_devices_the_choice_may_be_the_same_layout_with_more_batches(choose):
    options = ("--devices", "2", "--batch", "8192", "--device-memory", "60MiB")
    first = choose(*options, "--strategy", "ddp", "--strategy", "ddp(bucket_cap_mb=50)").stdout
    choice = re.search(r"the\s+choice\s+is\s+(\S+)\s+with\s+(\d+)\s+batches\s+of\s+(\d+)\.", first)
    assert choice, first
    assert int(choice[2]) * int(choice[3]) == 4096


def test_a_batch_that_does_not_divide_is_refused(choose):
    shown = ranking(choose("--devices", "2", "--strategy", "ddp", "--batch", "9", "--json"))
    reason = "9 samples do not divide among 2 groups of ranks"
    assert shown["refused"] == {"ddp": reason, "ddp(activation_checkpointing='full')": reason}


def test_layouts_of_a_mesh_are_compared_or_refused_with_the_reason(choose):
    pytest.importorskip("dstrat_mesh")
    shown = ranking(choose("--devices", "2", "--strategy", "mesh", "--json"))
    assert {one["strategy"] for one in shown["candidates"]} == {"mesh", "mesh(dp_replicate=2)"}
    reasons = {name: reason.split(",")[0] for name, reason in shown["refused"].items()}
    refused = {name: reason for name, reason in reasons.items() if "offload" not in name and "activation" not in name}
    assert refused == {
        "mesh(cp=2)": "Sequential does not call torch's attention",
        "mesh(pp=2, microbatches=2)": "Sequential has no configure_pipeline",
        "mesh(pp=2, microbatches=8)": "Sequential has no configure_pipeline",
        "mesh(tp=2)": "Sequential has no configure_model",
    }


def test_experts_are_divided_only_where_a_module_has_some(choose):
    pytest.importorskip("dstrat_mesh")
    options = ("--devices", "6", "--strategy", "mesh", "--batch", "6", "--json")
    shown = ranking(choose(*options, factory="Routed", of=machine(devices=6)))
    names = {*(one["strategy"] for one in shown["candidates"]), *shown["refused"]}
    sizes = {int(size) for name in names for size in re.findall(r"\bep=(\d+)", name)}
    assert sizes == {2}  # of those that divide the devices, the one that divides four experts
    divided = next(one for one in shown["candidates"] if one["strategy"] == "mesh(ep=2)")
    assert "all_to_all" in {one["kind"] for one in divided["communication"]["collectives"]}
    without = ranking(choose(*options, factory="Whole", of=machine(devices=6)))
    assert "mesh" in {one["strategy"] for one in without["candidates"]}
    assert "ep=" not in json.dumps(without)


def test_state_that_fits_no_device_is_offloaded_to_the_host(choose):
    pytest.importorskip("dstrat_mesh")
    gpus = machine(device_type="cuda")
    options = ("--devices", "2", "--strategy", "mesh", "--batch", "2", "--json")
    fitting = ranking(choose(*options, of=gpus))["candidates"]
    plain = next(one for one in fitting if one["strategy"] == "mesh")
    offloaded = next(one for one in fitting if one["strategy"] == "mesh(cpu_offload=True)")
    assert offloaded["memory"]["peak"] < plain["memory"]["peak"]
    assert offloaded["seconds"]["offload"] > 0 == plain["seconds"]["offload"]


def test_what_the_host_of_a_machine_does_not_have_is_refused(choose):
    pytest.importorskip("dstrat_fsdp")
    options = ("--devices", "4", "--strategy", "fsdp_cpu_offload", "--json")
    (fitting,) = ranking(choose(*options, of=machine(device_type="cuda", devices=4)))["candidates"]
    of_machine = fitting["memory"]["host_of_machine"]
    assert of_machine == 4 * fitting["memory"]["host"] > 0
    network = Link(kind="any", scope="network", ranks=2, latency=0.0, bandwidth=1e8)
    two = machine(device_type="cuda", host_memory=of_machine * 0.6, links=(*machine().links, network))
    assert ranking(choose(*options, of=two))["candidates"]
    shown = choose(*options, of=dataclasses.replace(two, devices=4))
    assert (shown.exit_code, ranking(shown)["candidates"]) == (1, [])
    assert re.fullmatch(
        r"all ranks of a machine need .* GiB of its host, and 90% of its .* GiB are .*, with batches of 1",
        ranking(shown)["refused"]["fsdp_cpu_offload"],
    )
    given = choose(*options, "--host-memory", "1GiB", of=dataclasses.replace(two, devices=4))
    assert ranking(given)["candidates"]


def test_a_host_whose_memory_is_not_known_is_not_checked_which_is_said(choose):
    pytest.importorskip("dstrat_fsdp")
    options = ("--devices", "2", "--strategy", "fsdp_cpu_offload", "--strategy", "fsdp")
    gpus = machine(device_type="cuda")
    note = "is not checked: mine has no host_memory, so give --host-memory, or a file of `dstrat measure`."
    assert note in " ".join(choose(*options, of=gpus).stdout.split())
    (sentence,) = ranking(choose(*options, "--json", of=gpus))["not_checked"]
    assert sentence.endswith(note)
    assert ranking(choose(*options, "--json", "--host-memory", "1GiB", of=gpus))["not_checked"] == []
    assert ranking(choose("--devices", "2", "--strategy", "fsdp", "--json", of=gpus))["not_checked"] == []


@pytest.mark.parametrize("strategy", ["fsdp_cpu_offload", "mesh(cpu_offload=True)"])
def test_what_is_on_the_host_is_copied_for_each_gather(choose, strategy):
    pytest.importorskip("dstrat_mesh")
    options = ("--devices", "2", "--strategy", strategy, "--json", "--batch")
    gpus = machine(device_type="cuda", host_bandwidth=1e6)
    limit = ("--device-memory", "20MiB")
    few, many = (
        next(
            one
            for one in ranking(choose(*options, batch, *limit, of=gpus))["candidates"]
            if one["strategy"] == strategy
        )
        for batch in ("2", "65536")
    )
    batches = many["accumulate_grad_batches"]
    assert (few["accumulate_grad_batches"], batches > 1) == (1, True)
    more = many["seconds"]["offload"] - few["seconds"]["offload"]
    gathers = 2  # of a layer in each batch
    assert more == pytest.approx((batches - 1) * gathers * WEIGHTS / 2 / 1e6, rel=0.02)


def test_many_layouts_that_do_not_fit_take_one_line(choose):
    pytest.importorskip("dstrat_mesh")
    eight = machine(devices=8)
    options = ("--devices", "8", "--strategy", "mesh", "--device-memory", "1MiB")
    shown = choose(*options, factory="Split", of=eight).stdout
    assert re.search(r"^does not fit, GiB +peak +params", shown, re.MULTILINE), shown
    assert len(re.findall(r"^mesh \(\d+ layouts\) +0\.0 ", shown, re.MULTILINE)) == 1, shown


def test_aliases_that_need_the_same_are_one_line(choose):
    pytest.importorskip("dstrat_fsdp")
    aliases = ["ddp", "ddp_spawn", "ddp_fork_find_unused_parameters_false", "ddp_notebook", "fsdp", "fsdp_native"]
    options = (word for alias in aliases for word in ("--strategy", alias))
    shown = choose("--devices", "2", *options, "--device-memory", "1MiB").stdout
    rows = {line.split("  ")[0] for line in shown.splitlines()}
    assert {"ddp and 3 like it (2 layouts)", "fsdp, fsdp_native (2 layouts)"} <= rows


def test_reasons_of_many_aliases_name_one_of_them(choose):
    aliases = ("ddp_spawn", "ddp", "ddp_fork", "ddp_notebook")
    options = (word for alias in aliases for word in ("--strategy", f"{alias}(find_unused_parameters=True)"))
    shown = " ".join(choose("--devices", "2", *options, "--batch", "9").stdout.split())
    assert "not compared: ddp(find_unused_parameters=True) and 3 like it: 9 samples do not divide" in shown


def test_a_strategy_whose_layouts_cannot_be_read_is_refused_with_the_reason(choose):
    class Broken(ParallelStrategy):
        @classmethod
        def layout_options(cls, module, world_size, ranks_per_machine):
            return module.missing

    with registered("broken", Broken):
        refused = ranking(choose("--devices", "2", "--strategy", "broken", "--json"))["refused"]
    assert refused["broken"].startswith("its layout_options raised AttributeError: 'Sequential' object has no attr")


def test_a_subclass_is_compared_without_options_that_it_lacks(choose):
    pytest.importorskip("dstrat_ddp")
    from dstrat_ddp import DDPStrategy

    class Narrow(DDPStrategy):
        def __init__(self, power=1.0):
            super().__init__()

    with registered("narrow", Narrow):
        shown = choose("--devices", "2", "--strategy", "narrow", "--strategy", "single_device")
    assert "cannot run here: single_device (--json says why)" in shown.stdout


def test_memory_of_a_small_model_is_shown(choose):
    row = choose("--devices", "2", "--strategy", "ddp").stdout.splitlines()[1].split()
    assert (row[0], float(row[-1]) > 0) == ("ddp", True)


def test_a_picture_without_its_folder_is_refused_before_anything_is_measured(choose, tmp_path):
    shown = choose("--devices", "2", "--plot", str(tmp_path / "missing" / "x.svg"), factory="broken")
    assert "there is no folder" in str(shown.exception)


@pytest.mark.parametrize("method", ["memory_layout", "communication_layout", "check_training"])
def test_a_strategy_that_raises_an_error_is_refused_with_it(choose, method):
    pytest.importorskip("dstrat_ddp")
    from dstrat_ddp import DDPStrategy

    raising = type("Raising", (DDPStrategy,), {method: lambda _, training: training.missing})
    with registered("raising", raising):
        shown = ranking(choose("--devices", "2", *DDP_AND_FSDP, "--strategy", "raising", "--json"))
    assert shown["refused"]["raising"].startswith("it raised AttributeError: 'TrainingSize' object has no attribute")
    assert "ddp" in {one["strategy"] for one in shown["candidates"]}


def test_a_strategy_that_raises_an_error_for_similar_layouts_is_compared_without_them(choose):
    pytest.importorskip("dstrat_ddp")
    from dstrat_ddp import DDPStrategy

    class Raising(DDPStrategy):
        @classmethod
        def similar_options(cls, options, module):
            return options["missing"]

    with registered("raising", Raising):
        shown = ranking(choose("--devices", "2", "--strategy", "raising", "--json"))
    assert "raising" in {one["strategy"] for one in shown["candidates"]}
    assert shown["refused"]["layouts like raising"] == "it raised KeyError: 'missing'"


def test_a_strategy_that_drives_several_devices_declares_by_itself_what_they_communicate(choose):
    class Drives(SingleDeviceStrategy):
        drives_several_devices = True

    with registered("drives", Drives):
        several, one = (
            ranking(choose("--devices", count, "--strategy", "drives", "--json", of=machine(devices=2)))
            for count in ("2", "1")
        )
    assert several["candidates"] == []
    assert several["refused"]["drives"] == "it does not declare its communication_layout"
    assert "drives" in {found["strategy"] for found in one["candidates"]}


def test_layouts_like_the_fastest_ones_are_compared_too(choose):
    pytest.importorskip("dstrat_ddp")
    from dstrat_ddp import DDPStrategy

    class Varied(DDPStrategy):
        def __init__(self, bucket_cap_mb=25, **arguments):
            super().__init__(bucket_cap_mb=bucket_cap_mb, **arguments)
            self.size = bucket_cap_mb

        @classmethod
        def layout_options(cls, module, world_size, ranks_per_machine):
            return ({}, {"static_graph": True})

        @classmethod
        def similar_options(cls, options, module):
            return [{**options, "bucket_cap_mb": size} for size in (5, 50)]

        def communication_layout(self, training):
            layout = super().communication_layout(training)
            return dataclasses.replace(layout, collectives=()) if self.size == 50 else layout

    with registered("varied", Varied):
        found = ranking(choose("--devices", "2", "--strategy", "varied", "--json"))
        named = ranking(choose("--devices", "2", "--strategy", "varied(static_graph=True)", "--json"))
    assert found["candidates"][0]["strategy"] == "varied(bucket_cap_mb=50)"
    assert {one["strategy"] for one in named["candidates"]} == {"varied(static_graph=True)"}


def test_a_third_partys_strategy_is_ranked_by_what_it_declares(choose):
    pytest.importorskip("dstrat_ddp")
    from dstrat_ddp import DDPStrategy

    class SendsTwice(DDPStrategy):
        def communication_layout(self, training):
            layout = super().communication_layout(training)
            return dataclasses.replace(layout, collectives=2 * layout.collectives)

    with registered("acme", SendsTwice):
        options = ("--devices", "2", "--strategy", "acme", "--strategy", "ddp", "--json")
        found = {one["strategy"]: one["seconds"] for one in ranking(choose(*options))["candidates"]}
    assert [name for name in found if "(" not in name] == ["ddp", "acme"]
    assert found["acme"]["communication"] > found["ddp"]["communication"]
    assert found["acme"]["compute"] == found["ddp"]["compute"]


def test_of_strategies_that_are_the_same_the_usual_one_is_shown(choose):
    pytest.importorskip("dstrat_ddp")
    from dstrat_ddp import DDPStrategy

    class Renamed(DDPStrategy):
        pass

    with registered("acme", Renamed):
        options = ("--devices", "2", "--strategy", "acme", "--strategy", "ddp", "--json")
        found = [one["strategy"] for one in ranking(choose(*options))["candidates"]]
    assert [name for name in found if "(" not in name] == ["ddp"]


@pytest.fixture
def two_owners(site, monkeypatch):
    """Another distribution offers ``ddp`` too."""
    site.add("acme", site.component("ddp", target="dstrat_ddp.strategy:DDPStrategy", uses_torch_distributed=True))
    monkeypatch.syspath_prepend(site.folder)
    refresh_catalog()
    yield
    monkeypatch.undo()
    refresh_catalog()


def test_an_alias_of_two_distributions_is_compared_with_its_owners(choose, two_owners):
    pytest.importorskip("dstrat_ddp")
    shown = ranking(choose("--devices", "2", "--json"))
    names = {one["strategy"] for one in shown["candidates"]} | shown["refused"].keys() | shown["unusable"].keys()
    assert "ddp@dstrat-ddp" in names
    assert "ddp" not in names
    named = ranking(choose("--devices", "2", "--strategy", "ddp@acme", "--json"))["candidates"]
    assert named[0]["strategy"] == "ddp@acme"
    assert 'strategy="ddp@acme"' in named[0]["trainer"]
    options = ("--devices", "2", "--strategy", "ddp@acme(bucket_cap_mb=50)", "--json")
    assert ranking(choose(*options))["candidates"][0]["strategy"] == "ddp@acme(bucket_cap_mb=50)"


def test_heads_that_do_not_divide_are_refused(choose):
    pytest.importorskip("dstrat_mesh")
    four = machine(devices=4)
    shown = ranking(choose("--devices", "4", "--strategy", "mesh", "--json", factory="AttendsAndSplits", of=four))
    refused = {name: shown["refused"][name] for name in ("mesh(cp=4)", "mesh(tp=4)", "mesh(cp=2, tp=2)")}
    ring, not_divided = (
        ", or context_parallel='ring'",
        "does not divide the 2 heads of AttendsAndSplits: choose",
    )
    assert refused == {
        "mesh(cp=4)": f"cp=4 {not_divided} smaller sizes{ring}",
        "mesh(tp=4)": f"tp=4 {not_divided} smaller sizes",
        "mesh(cp=2, tp=2)": f"tp=2 * cp=2 {not_divided} smaller sizes{ring}",
    }
    assert {"mesh(cp=2)", "mesh(tp=2)"} <= {one["strategy"] for one in shown["candidates"]}


def test_a_module_that_does_not_define_what_a_layout_needs_is_refused(choose):
    pytest.importorskip("dstrat_mesh")
    names = ("mesh(tp=2)", "mesh(pp=2)", "model_parallel")
    options = ("--devices", "2", *(word for name in names for word in ("--strategy", name)), "--json")
    refused = ranking(choose(*options, factory="Whole"))["refused"]
    assert refused["mesh(tp=2)"].startswith("Whole has no configure_model")
    assert refused["model_parallel"].startswith("Whole has no configure_model, in which tensor_parallel_size needs")
    assert refused["mesh(pp=2)"].startswith("Whole has no configure_pipeline")


def test_fewer_layers_than_stages_are_refused(choose):
    pytest.importorskip("dstrat_mesh")
    options = ("--devices", "8", "--strategy", "mesh(pp=4)", "--strategy", "mesh(pp=8)", "--json")
    shown = ranking(choose(*options, factory="Staged", of=machine(devices=8)))
    assert [one["strategy"] for one in shown["candidates"]] == ["mesh(pp=4)"]
    assert shown["refused"]["mesh(pp=8)"].startswith("the pipeline has 4 layers, and each of its 8 stages needs one")


def test_microbatches_may_differ_by_a_sample_and_each_has_one(choose):
    pytest.importorskip("dstrat_mesh")
    names = [f"mesh(pp=2, microbatches={count})" for count in (8, 16)]
    options = ("--devices", "2", *(word for name in names for word in ("--strategy", name)), "--batch", "12", "--json")
    shown = ranking(choose(*options, factory="Staged"))
    assert [(one["strategy"], one["batch_size"]) for one in shown["candidates"]] == [(names[0], 12)]
    assert shown["refused"][names[1]].startswith("a batch of 12 samples cannot be divided into 16 microbatches: give")


@pytest.mark.parametrize("options", ["", ", schedule='Interleaved1F1B', microbatches=4"])
def test_a_pipeline_needs_what_its_fullest_rank_needs_as_explain_shows_it(choose, options):
    pytest.importorskip("dstrat_mesh")
    strategy = f"mesh(pp=2{options})"
    (one,) = ranking(choose("--devices", "2", "--strategy", strategy, "--json", factory="LargeHead"))["candidates"]
    model = ("--model", f"{MODULE}:LargeHead", "--accelerator", "cpu", "--strategy", strategy, "--batch", "16")
    ranks = ranking(CliRunner().invoke(commands, ["explain", *model, "--nodes", "1", "--devices", "2", "--json"]))
    first, last = (rank["peak"] for rank in ranks["memory"])
    assert one["memory"]["peak"] == last > 2 * first
    of_a_rank = ("--devices", "2", "--batch-size", "16", "--json")
    (estimated,) = ranking(CliRunner().invoke(commands, ["estimate", *model[:-2], *of_a_rank]))["estimates"]
    assert estimated["peak"] == last


def test_what_does_not_fit_in_the_smallest_batch_of_microbatches_is_refused_for_its_memory(choose):
    pytest.importorskip("dstrat_mesh")
    options = ("--devices", "2", "--strategy", "mesh(pp=2)", "--batch", "4", "--device-memory", "1MiB", "--json")
    refused = ranking(choose(*options, factory="Staged"))["refused"]
    assert refused["mesh(pp=2)"].startswith("it needs 0.0 GiB with batches of 2 (parameters 0.0")


def test_split_layers_are_ranked_with_their_assumption(choose):
    pytest.importorskip("dstrat_mesh")
    shown = choose("--devices", "2", "--strategy", "mesh(tp=2)", factory="Split")
    assert "mesh(tp=2) is the only layout that fits." in shown.output
    assert "mesh(tp=2) if configure_model splits each weight matrix over 2 ranks" in " ".join(shown.output.split())


def test_strategies_that_cannot_run_there_are_named_and_explained_in_json(choose):
    shown = ranking(choose("--devices", "2", "--json"))
    assert "uses at most 1 device" in shown["unusable"]["single_device"]
    assert (
        "does not declare its communication_layout" in shown["refused"]["ddp2"] if "ddp2" in shown["refused"] else True
    )


def test_without_a_machine_more_devices_than_this_one_has_are_refused():
    shown = CliRunner().invoke(commands, ["choose", f"{MODULE}:plain", "--devices", "4096"])
    assert isinstance(shown.exception, RequestError)
    assert "does not have --devices 4096: give --machine, one of h100x8, " in str(shown.exception)


@pytest.mark.slow
def test_without_a_machine_this_one_is_measured():
    options = ("--devices", "1", "--strategy", "single_device", "--precision", "32-true", "--json")
    shown = CliRunner().invoke(commands, ["choose", f"{MODULE}:plain", *options])
    assert ranking(shown)["candidates"][0]["strategy"] == "single_device"
    assert "measuring this machine" in shown.stderr


def test_devices_that_are_no_whole_machines_are_an_error(choose):
    shown = choose("--devices", "5")
    assert isinstance(shown.exception, RequestError)
    assert "mine" not in str(shown.exception)
    assert str(shown.exception).endswith("has 2 devices, so that --devices 4 is possible")


def test_machines_without_a_link_between_them_are_refused(choose):
    shown = ranking(choose("--devices", "4", "--strategy", "ddp", "--json"))
    assert "has no link between machines: measure it with --num-nodes 2" in shown["refused"]["ddp"]


def test_more_devices_are_advised_only_where_something_is_too_large(choose):
    shown = choose("--devices", "4", "--strategy", "ddp")
    assert shown.exit_code == 1
    assert "has no link between machines" in " ".join(shown.stdout.split())
    assert shown.stdout.endswith("\nno layout can be compared, for the reasons above\n")
    assert "no layout fits" not in shown.stdout


def test_a_machine_of_other_precisions_asks_for_one(choose):
    half = machine(flops={"float16": 1e9})
    shown = choose("--devices", "2", "--strategy", "ddp", of=half, all_precisions=True)
    assert isinstance(shown.exception, RequestError)
    assert "machine 'mine' has no rate of float32 or bfloat16: give a --precision that computes in float16" in str(
        shown.exception
    )


@dataclasses.dataclass
class Ranked:
    strategy: str
    seconds: float
    peak: int = 1
    offload: float = 0.0
    precision: str = "32-true"

    @property
    def training(self):
        return SimpleNamespace(batch_size=8, accumulate_grad_batches=1)

    @property
    def alias(self):
        return self.strategy.partition("(")[0]

    @property
    def time(self):
        return StepTime(compute=self.seconds, communication=0.0, idle=0.0, optimizer=0.0, offload=self.offload)

    def on(self, _machine):
        return self


def test_of_layouts_that_take_as_long_to_the_models_precision_the_usual_one_is_first():
    layouts = [
        Ranked("rare", 1.0, peak=2),
        Ranked("small", 1.005, peak=1),
        Ranked("usual(option=1)", 1.015, peak=3),
        Ranked("slow", 1.03),
        Ranked("usual", 1.2),
    ]
    found = [one.strategy for one in in_order(layouts, {"usual": (-100, 0), "rare": (0, 0)})]
    assert found == ["usual(option=1)", "small", "rare", "slow", "usual"]


def test_among_equally_fast_layouts_the_simple_one_is_first():
    layouts = [
        Ranked("library", 1.0, peak=1),
        Ranked("mesh(pp=2, microbatches=4)", 1.0, peak=1),
        Ranked("mesh(tp=2)", 1.0, peak=2),
        Ranked("plain", 1.01, peak=9),
    ]
    ordered = [one.strategy for one in in_order(layouts, {"library": (0, 1)})]
    assert ordered == ["plain", "mesh(tp=2)", "mesh(pp=2, microbatches=4)", "library"]


def test_offload_is_last_of_what_takes_as_long():
    layouts = [
        Ranked("usual_offload", 1.0, peak=1, offload=0.01),
        Ranked("usual", 1.0, peak=2),
        Ranked("mesh(tp=2)", 0.999, peak=2),
        Ranked("slow", 1.1, peak=1),
    ]
    ordered = [one.strategy for one in in_order(layouts, {"usual": (-1, 0), "usual_offload": (-1, 0)})]
    assert ordered == ["usual", "mesh(tp=2)", "usual_offload", "slow"]


def test_the_first_layout_is_called_the_fastest_only_if_it_is():
    one, other = Ranked("usual", 1.01, peak=2), Ranked("mesh(tp=2)", 1.0, peak=1)
    workload = SimpleNamespace(machine=machine(), precisions=("32-true",))
    assert reasons([one, other], [other], workload) == [
        "usual is as fast as any layout, to 2%: mesh(tp=2) takes 1.0% less, and is not simpler.",
        "With less than 0.0 MiB on each device the choice is mesh(tp=2).",
    ]
    near = Ranked("mesh(tp=2)", 1.00999, peak=3)
    assert reasons([one, near], [], workload) == [
        "usual is as fast as any layout, to 2%: mesh(tp=2) takes as long, and is not simpler."
    ]
    assert reasons([other, one], [], workload) == ["mesh(tp=2) is the fastest; usual takes as long, to 2%."]


def test_reasons_name_the_precisions_where_several_are_compared():
    one, same = Ranked("ddp", 1.01, peak=2, precision="bf16-mixed"), Ranked("ddp", 1.0, peak=3)
    other = Ranked("fsdp", 2.0, peak=1)
    workload = SimpleNamespace(machine=machine(), precisions=("32-true", "bf16-mixed"))
    assert reasons([one, same, other], [other], workload) == [
        "ddp with bf16-mixed is as fast as any layout, to 2%: ddp with 32-true takes 1.0% less, and is not simpler.",
        "With less than 0.0 MiB on each device the choice is fsdp with 32-true.",
    ]
    first, *_ = reasons([same, one], [], workload)
    assert first == "ddp with 32-true is the fastest; ddp with bf16-mixed takes as long, to 2%."
    assert reasons([one], [], workload) == ["ddp with bf16-mixed is the only layout that fits."]


@dataclasses.dataclass
class Sending(Ranked):
    sent: float = 0.0
    bandwidth: float = 1e8

    @property
    def time(self):
        sending = self.sent / self.bandwidth
        return StepTime(compute=self.seconds, communication=sending, idle=0.0, optimizer=0.0, offload=0.0)

    def on(self, other):
        return dataclasses.replace(self, bandwidth=other.links[0].bandwidth)


def test_links_of_another_speed_that_would_change_the_choice_are_named():
    def shown(*layouts):
        workload = SimpleNamespace(machine=machine(), precisions=("32-true",))
        return [one for one in reasons(layouts, [], workload) if one.startswith("With links")]

    alone = Sending("alone", 1.0)
    assert shown(alone, Sending("sends", 0.1, sent=1e8)) == ["With links twice as fast, sends is the fastest."]
    assert shown(Sending("sends", 0.4, sent=5e7), alone) == ["With links half as fast, alone is the fastest."]
    assert shown(Sending("sends", 0.2, sent=2e7), alone) == []


def test_layouts_that_another_of_the_strategy_beats_are_left_out():
    layouts = [
        Ranked("mesh", 1.0, peak=5),
        Ranked("mesh(tp=2)", 1.1, peak=6),
        Ranked("ddp", 1.2, peak=9),
        Ranked("mesh(pp=2)", 1.3, peak=4),
        Ranked("mesh(cp=2)", 1.4, peak=4),
    ]
    assert [one.strategy for one in undominated(layouts)] == ["mesh", "ddp", "mesh(pp=2)"]


def test_without_a_precision_those_of_the_machine_are_compared(choose):
    options = ("--devices", "2", "--strategy", "ddp")
    shown = ranking(choose(*options, "--json", all_precisions=True))
    plain = [one["precision"] for one in shown["candidates"] if one["strategy"] == "ddp"]
    assert plain == ["bf16-mixed", "32-true"]  # products are faster
    assert 'precision="bf16-mixed"' in shown["candidates"][0]["trainer"]
    table = choose(*options, all_precisions=True).stdout.splitlines()
    assert table[0].split()[-1] == "precision"
    assert table[1].split()[-1] == "bf16-mixed"
    single = machine(flops={"float32": 1e9})
    candidates = ranking(choose(*options, "--json", of=single, all_precisions=True))["candidates"]
    assert {one["precision"] for one in candidates} == {"32-true"}


def test_of_precisions_in_which_a_layout_does_not_fit_the_smaller_memory_is_shown():
    def refused(*precisions):
        workload = Workload(
            model=f"{MODULE}:plain", machine=machine(), devices=2, batch_size=None, precisions=precisions, memory=2**20
        )
        return Candidates(loaded_catalog(), workload).rank(["ddp"]).refused["ddp"]

    smaller = refused("bf16-true")
    assert smaller.peak < refused("32-true").peak
    assert refused("32-true", "bf16-true") == refused("bf16-true", "32-true") == smaller


def test_a_legacy_strategy_is_compared_only_when_it_is_named(choose):
    pytest.importorskip("dstrat_fairscale")
    pytest.importorskip("fairscale")
    refused = ranking(choose("--devices", "2", "--json"))["refused"]
    assert refused["ddp_sharded"].startswith("FairScale is no longer developed")
    assert refused["ddp_sharded"].endswith("(--strategy compares it)")
    (named,) = ranking(choose("--devices", "2", "--strategy", "ddp_sharded", "--json"))["candidates"]
    assert named["strategy"] == "ddp_sharded"


def test_a_strategy_with_other_losses_is_compared_only_when_it_is_named(choose):
    pytest.importorskip("dstrat_diloco")
    refused = ranking(choose("--devices", "2", "--json"))["refused"]
    assert refused["diloco"].startswith("groups of ranks train apart")
    (named,) = ranking(choose("--devices", "2", "--strategy", "diloco", "--json"))["candidates"]
    assert named["strategy"] == "diloco"


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_a_picture_of_time_and_memory_is_written(choose, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    path = tmp_path / f"layouts.{suffix}"
    assert choose("--devices", "2", *DDP_AND_FSDP, "--plot", str(path)).exit_code == 0
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        for text in ("ms of a step", "GiB of a device at its peak", "90% of the device", "optimizer step"):
            assert text in content.decode()


def test_a_picture_of_another_format_is_refused_before_anything_is_measured(choose):
    shown = choose("--devices", "2", "--plot", "layouts.txt", factory="missing")
    assert isinstance(shown.exception, RequestError)
    assert str(shown.exception) == "--plot 'layouts.txt' must end in one of .html, .pdf, .png, .svg"


# Sizes of batches


@pytest.fixture
def measured():
    """Batch sizes that were measured."""
    return []


def sizes_of(factory, measured):
    def measure(batch_size):
        measured.append(batch_size)
        return measure_training(
            lambda: read_training(factory(), "a test"),
            TruePrecision(),
            device_type="cpu",
            world_size=2,
            ranks_per_machine=2,
            batch_size=batch_size,
        )

    return TrainingSizes(measure), measure


def test_after_three_batches_on_a_line_no_other_is_measured(measured):
    sizes, measure = sizes_of(attending, measured)
    assert sizes.of_training().batch_size == BATCH
    derived = {count: sizes.of(count) for count in (2, 4, 16, 6, 1)}
    assert measured == [None, 2, 4, 1]
    for count in (16, 6):
        real = measure(count)
        assert derived[count].batch_size == count
        for name in ("outputs", "saved", "work", "optimizer_state", "activations"):
            assert getattr(derived[count], name) == getattr(real, name)
        for share in (0.0, 0.1, 1.0, 3.0):
            layout = dataclasses.replace(real.replicated, activation_share=share)
            assert derived[count].peak(layout) == real.peak(layout)
        assert len(derived[count].timeline) < len(real.timeline) / 2


@pytest.mark.parametrize(("factory", "count"), [("attending", 2), ("comparing", 3)])
def test_batches_that_are_computed_again_are_on_the_line_of_the_usual_ones(factory, count, measured):
    make = {"attending": attending, "comparing": lambda: (ComparesSamples(), torch.zeros(BATCH, WIDTH))}[factory]
    usual, measure = sizes_of(make, measured)
    for size in (2, 4, 8):
        usual.of(size)
    measured.clear()
    again = TrainingSizes(measure, usual)
    derived = [again.of(size).work for size in (2, 4, 8)]
    assert len(measured) == count
    assert derived == [usual.of(size).work for size in (2, 4, 8)]


class ComparesSamples(nn.Module):
    """Attends between samples, so that its work grows with their square."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        output = self.layer(x)
        return (output @ output.T).square().mean()


def test_every_batch_is_measured_where_they_are_not_on_a_line(measured):
    sizes, _ = sizes_of(lambda: (ComparesSamples(), torch.zeros(BATCH, WIDTH)), measured)
    for count in (BATCH, 2, 4, 16, 16):
        sizes.of(count)
    assert measured == [BATCH, 2, 4, 16]


def test_a_batch_that_cannot_be_measured_is_not_measured_again(measured):
    sizes, _ = sizes_of(broken, measured)
    for _ in range(2):
        with pytest.raises(DstratError, match="required positional argument"):
            sizes.of_training()
    assert measured == [None]


def test_gradients_are_reduced_in_a_buffer_once_as_many_are_computed(training):
    timed = dataclasses.replace(training, timeline=((50, 0), (45, 20), (10, 90)))
    layout = MemoryLayout(parameters=7, gradients=0, optimizer_state=0, step_buffers=5)
    peaks = [timed.peak(dataclasses.replace(layout, reduction_buffer=size)) - 12 for size in (0, 20, 30, 90, 91)]
    assert peaks == [50, 45 + 20, 50, 10 + 90, 50]


# The model of the time


@pytest.fixture(scope="module")
def training():
    def make():
        module, batch = plain()
        return TrainingSetup(
            module=module, batch=batch, make_optimizers=lambda one: torch.optim.AdamW(one.parameters())
        )

    return measure_training(make, TruePrecision(), device_type="cpu", world_size=2, ranks_per_machine=2)


def test_work_is_counted_in_both_passes_and_in_the_optimizer_step(training):
    assert training.work.flops == 2 * BATCH * WIDTH * WIDTH * (4 + 4 + 3)
    assert training.work.operations >= 11
    assert training.optimizer_work.flops == 0
    assert training.optimizer_work.moved > 4 * WEIGHTS  # parameters, gradients and two moments


def test_idle_time_offload_and_shared_batches_are_parts_of_a_step(training):
    shared = CommunicationLayout(ranks_per_batch=2, idle=0.2)
    held = MemoryLayout(parameters=0, gradients=0, optimizer_state=0, host=10**8)
    alone = step_time(machine(), training, training.replicated, CommunicationLayout())
    time = step_time(machine(), training, held, shared)
    assert time.compute == pytest.approx(alone.compute / 2)
    assert time.idle == pytest.approx(time.compute / 4)
    assert (alone.offload, time.offload) == (0, pytest.approx(2.0))
    assert (alone.optimizer > 0, time.optimizer) == (True, 0)


def test_ranks_wait_for_passes_with_the_collectives_in_them(training):
    sent = Collective(kind="send", bytes=10**7, messages=1, ranks=2)  # 100 ms
    beside = dataclasses.replace(sent, kind="all_gather", overlaps=True)
    layouts = [CommunicationLayout(collectives=several, idle=0.2) for several in ((), (beside,), (sent, beside))]
    alone, hidden, waiting = (step_time(machine(), training, training.replicated, one) for one in layouts)
    assert alone.idle == hidden.idle == pytest.approx(alone.compute / 4)
    assert waiting.idle == pytest.approx((alone.compute + 0.1) / 4)


def test_collectives_of_each_batch_are_hidden_beside_all_batches(training):
    of_batch = dataclasses.replace(training, work=Work(flops=10**8), trainable_parameters=0)  # 100 ms
    gather = Collective(kind="all_gather", bytes=8 * 10**7, messages=8, ranks=2, overlaps=True)  # 400 ms
    layouts = [
        CommunicationLayout(collectives=(dataclasses.replace(gather, in_each_batch=each),)) for each in (False, True)
    ]
    last, each = (
        step_time(machine(overlap=1.0), of_batch.for_steps_of(8), training.replicated, layout) for layout in layouts
    )
    assert last.communication == pytest.approx(0.4 - 0.1 * 2 / 3)
    assert each.communication == pytest.approx(0)


def test_collectives_that_take_the_processors_of_computation_delay_both(training):
    of_batch = dataclasses.replace(training, work=Work(flops=10**9))  # a second, of which 2 / 3 are the backward pass
    gather = Collective(kind="all_gather", bytes=8 * 10**7, messages=8, ranks=2, overlaps=True)  # 400 ms
    layout = CommunicationLayout(collectives=(gather,))
    times = [step_time(machine(overlap=share), of_batch, training.replicated, layout) for share in (0.5, 0.0, -0.5)]
    assert [one.communication for one in times] == [pytest.approx(seconds) for seconds in (0.2, 0.4, 0.6)]


def test_hooks_in_python_take_time_where_the_machine_says_so(training):
    layout = CommunicationLayout(hooks=30)
    times = [step_time(machine(hook_latency=latency), training, training.replicated, layout) for latency in (0.0, 1e-3)]
    assert [one.communication for one in times] == [0, pytest.approx(0.03)]


def test_pages_of_new_memory_take_time_where_the_machine_says_so(training):
    layout = CommunicationLayout(allocated=100 * 4096)
    times = [
        step_time(machine(page_latency=latency), training, training.replicated, layout) for latency in (None, 1e-3)
    ]
    assert [one.communication for one in times] == [0, pytest.approx(0.1)]


def test_operands_of_products_take_time_as_far_as_the_machine_does_not_hide_it(training):
    layout = CommunicationLayout(ranks_per_batch=2, weight_share=0.5)
    of_batch = dataclasses.replace(training, work=Work(flops=10**9, operands=4 * 10**8))
    times = [
        step_time(machine(operand_overlap=share), of_batch, training.replicated, layout).compute
        for share in (None, 1.0, 0.25)
    ]
    assert times == [pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5 + 0.75 * 0.2)]


def test_each_microbatch_reads_the_weights_and_adds_to_their_gradients(training):
    size = training.trainable_parameters  # all of them
    of_batch = dataclasses.replace(training, work=Work(operands=10 * size))  # 3 are weights, and 7 of samples
    layout = CommunicationLayout(ranks_per_batch=4, passes=8, weight_share=0.5)
    time = step_time(machine(), of_batch, training.replicated, layout)
    moved = 7 / 4 + 8 * 3 / 2 + 7 * 3 / 2  # of samples, weights, and gradients
    assert time.compute == pytest.approx(moved * size / machine().memory_bandwidth)


def test_a_rank_moves_its_share_of_activations_which_split_layers_divide_in_part(training):
    size = training.trainable_parameters
    of_batch = dataclasses.replace(training, work=Work(operands=7 * size, moved=10 * size))  # 3 are weights
    whole = CommunicationLayout(ranks_per_batch=2, weight_share=0.5)
    times = [
        step_time(machine(), of_batch, training.replicated, layout).compute * machine().memory_bandwidth / size
        for layout in (whole, dataclasses.replace(whole, activation_share=0.75))
    ]
    assert times == [pytest.approx(14 / 2 + 3 / 2), pytest.approx(0.75 * 14 + 3 / 2)]


def test_further_batches_add_to_gradients(training):
    one, three = (
        step_time(machine(), training.for_steps_of(count), training.replicated, CommunicationLayout()).compute
        for count in (1, 3)
    )
    added = 2 * 3 * training.trainable_parameters / machine().memory_bandwidth
    assert three == pytest.approx(3 * one + added)


def test_a_machine_that_was_measured_by_an_older_version_is_noted(choose):
    options = ("--devices", "2", "--strategy", "ddp")
    noted = choose(*options)
    assert (
        "machine.json has no hook_latency and no page_latency and no operand_overlap, which counts as nothi"
        in noted.stderr
    )
    assert choose(*options, of=machine(hook_latency=0.0, page_latency=0.0, operand_overlap=1.0)).stderr == ""


def test_ranks_that_split_operations_begin_all_of_them(training):
    slow = machine(operation_latency=1e-3)
    work = Work(flops=10**9, operations=100)
    of_batch = dataclasses.replace(training, work=work)
    split, staged = CommunicationLayout(ranks_per_batch=4), CommunicationLayout(ranks_per_batch=4, operation_share=2.0)
    times = [step_time(slow, of_batch, training.replicated, layout).compute for layout in (split, staged)]
    assert times == [pytest.approx(0.25 + 0.1), pytest.approx(0.25 + 0.2)]


def test_an_optimizer_step_of_a_shard_takes_its_share(training):
    state = training.optimizer_state
    whole = step_time(machine(), training, training.replicated, CommunicationLayout())
    half = dataclasses.replace(training.replicated, optimizer_state=state // 2)
    assert step_time(machine(), training, half, CommunicationLayout()).optimizer == pytest.approx(whole.optimizer / 2)


def test_an_optimizer_step_without_state_takes_the_share_of_gradients(training):
    sgd = dataclasses.replace(training, optimizer_state=0)
    layouts = [dataclasses.replace(sgd.replicated, gradients=share * WEIGHTS // 2) for share in (2, 1, 0)]
    whole, half, views = (step_time(machine(), sgd, one, CommunicationLayout()).optimizer for one in layouts)
    assert half == pytest.approx(whole / 2)
    assert views == whole


def test_collectives_between_machines_take_the_link_between_them():
    network = Link(kind="any", scope="network", ranks=2, latency=1e-3, bandwidth=1e6)
    two = machine(links=(*machine().links, network))
    gradients = Collective(kind="all_reduce", bytes=10**6, messages=4, ranks=4)
    assert collective_seconds(two, gradients, 4) == pytest.approx(1.5e6 / 1e8)
    assert collective_seconds(two, gradients, 1) == pytest.approx(1.5 + 4 * 3e-3)


def test_a_message_to_a_neighbour_takes_the_same_time_in_any_number_of_ranks():
    slow = Link(kind="any", scope="machine", ranks=2, latency=1e-3, bandwidth=1e6)
    two, eight = (Collective(kind="send", bytes=10**6, messages=4, ranks=ranks) for ranks in (2, 8))
    seconds = [collective_seconds(machine(links=[slow]), one, 8) for one in (two, eight)]
    assert seconds == [pytest.approx(1 + 4e-3)] * 2


def test_a_collective_between_machines_has_the_networks_of_all_its_ranks_on_a_machine():
    network = Link(kind="any", scope="network", ranks=2, latency=0.0, bandwidth=1e6)
    fast = machine(links=(*machine().links, network))
    gradients = Collective(kind="all_reduce", bytes=10**6, messages=1, ranks=16)
    seconds = gradients.sent / 1e6
    assert collective_seconds(fast, gradients, 8) == pytest.approx(seconds / 8)
    assert collective_seconds(fast, dataclasses.replace(gradients, stride=2), 8) == pytest.approx(seconds / 4)
    assert collective_seconds(fast, dataclasses.replace(gradients, stride=8), 8) == pytest.approx(seconds)
    tokens = dataclasses.replace(gradients, kind="all_to_all")
    assert collective_seconds(fast, tokens, 8) == pytest.approx(tokens.sent / 1e6)
    slow_inside = machine(links=(dataclasses.replace(machine().links[0], bandwidth=2e6), network))
    assert collective_seconds(slow_inside, gradients, 8) == pytest.approx(seconds / 2)


def test_work_shows_up_to_the_rate_of_the_dtype(training):
    mixed = dataclasses.replace(training, precision=TruePrecision("bf16-true"), work=Work(flops=4 * 10**9))
    assert step_time(machine(), mixed, training.replicated, CommunicationLayout()).compute == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("factory", "strategy", "reason"),
    [
        ("odd_sequence", "mesh(cp=2)", "sequences of 15 tokens cannot be divided over the 2 ranks of cp"),
        (
            "returns_weights",
            "mesh(cp=2)",
            "does not call torch's attention, whose sequences cp divides, or asks",
        ),
        (
            "NeverSplits",
            "mesh(tp=2)",
            "configure_model of NeverSplits does not use the mesh: tp needs",
        ),
        ("NeverSplits", "model_parallel", "configure_model of NeverSplits does not use the mesh: tensor_parallel_size"),
        ("SplitsElsewhere", "mesh(tp=2)", "SplitsElsewhere asks for device_mesh['tensor_parallel']: tp needs"),
        ("with_muon", "fsdp", "Muon cannot step parameters as FSDPStrategy shards them"),
        ("with_muon", "mesh", "Muon cannot step parameters as MeshStrategy shards them"),
        ("Unused", "ddp", "the loss does not depend on unused.weight, unused.bias, and ddp waits for a gradient"),
        ("Unused", "bagua", "the loss does not depend on unused.weight, unused.bias, and bagua exchanges a gradient"),
    ],
)
def test_what_a_trainer_would_refuse_is_not_ranked(choose, factory, strategy, reason):
    pytest.importorskip("dstrat_mesh")
    shown = ranking(choose("--devices", "2", "--strategy", strategy, "--json", factory=factory))
    assert reason in shown["refused"][strategy]


@pytest.mark.parametrize(
    ("factory", "strategy"),
    [
        ("SplitsElsewhere", "model_parallel"),
        ("Unused", "ddp_find_unused_parameters_true"),
        ("Unused", "bagua(find_unused_parameters=True)"),
        ("Scheduled", "ddp"),
    ],
)
def test_what_a_trainer_would_accept_is_ranked(choose, factory, strategy):
    pytest.importorskip("dstrat_mesh")
    (first, *_) = ranking(choose("--devices", "2", "--strategy", strategy, "--json", factory=factory))["candidates"]
    assert first["strategy"].startswith(strategy)


def test_layers_that_repeat_are_not_unused():
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    setup = TrainingSetup(module=layers, batch=torch.zeros(BATCH, WIDTH), make_optimizers=adamw)
    devices = {"device_type": "cpu", "world_size": 2, "ranks_per_machine": 2}
    assert measure_training(lambda: setup, TruePrecision(), **devices).unused == ()


@pytest.mark.parametrize(
    ("factory", "error"), [("broken", "missing 1 required positional argument"), ("without_parameters", "empty")]
)
def test_a_training_that_cannot_be_measured_is_an_error(choose, factory, error):
    shown = choose("--devices", "2", factory=factory)
    assert isinstance(shown.exception, DstratError)  # with which the program exits with 2
    assert error in str(shown.exception)


def test_an_operation_that_fails_prints_no_traceback(choose, caplog):
    shown = choose("--devices", "2", factory="mismatched")
    assert isinstance(shown.exception, DstratError)
    assert caplog.records == []


def test_what_a_factory_prints_is_not_in_the_json(choose):
    shown = choose("--devices", "2", "--strategy", "ddp", "--json", factory="printing")
    assert ranking(shown)["candidates"]
    assert "made" in shown.stderr


def test_a_tensor_with_one_row_does_not_say_how_many_samples_there_are(choose):
    (one,) = ranking(choose("--devices", "2", "--strategy", "ddp", "--json", factory="positioned"))["candidates"]
    assert (one["batch_size"], one["accumulate_grad_batches"]) == (BATCH, 1)
