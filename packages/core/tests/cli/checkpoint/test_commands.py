"""``dstrat checkpoint`` and what is below it."""

import argparse
import enum
import json
import os
import pathlib
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch

from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.cli.checkpoint.group import readable_size
from dstrat.data.random_state import RandomState
from dstrat.errors import CheckpointError

WITHOUT_TORCH = """
import sys
from dstrat.cli.main import commands
try:
    commands(sys.argv[1:])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


class Size(enum.Enum):
    SMALL = 1


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return eval, (f"open({str(self.path)!r}, 'w')",)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


@pytest.fixture
def optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def path(tmp_path, model):
    values = {"epoch": 2, "global_step": 30, "saved_with": "ddp", "lr": 0.5}
    checkpoint = {**values, "state_dict": model.state_dict(), "per_rank": {"seed": 1}}
    PortableCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a")
    return tmp_path / "a"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "checkpoint", *map(str, arguments)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


@pytest.fixture
def invoke():
    """Run a command in this process, which has torch already; return its exit code and what it printed."""
    from click.testing import CliRunner

    from dstrat.cli.checkpoint.group import checkpoint

    def call(*arguments):
        outcome = CliRunner().invoke(checkpoint, list(map(str, arguments)))
        if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
            raise outcome.exception
        return outcome.exit_code, outcome.stdout

    return call


def test_inspect_shows_what_is_inside_without_torch(path):
    outcome = run("inspect", path.parent / "last")
    assert outcome.stderr == "False\n"
    assert "\nstep        30\nepoch       2\nsaved by    ddp on 1 rank\n" in outcome.stdout
    assert "state_dict/0.weight               3 x 4   float32  48 B" in outcome.stdout
    assert "state_dict/1.num_batches_tracked  scalar  int64    8 B" in outcome.stdout


def test_inspect_folds_random_state_into_one_row(invoke, tmp_path):
    state = RandomState.capture().state_dict()
    per_rank = {"random": state, "beginning": {"random": state}, "gradients": {"random": torch.zeros(3)}}
    checkpoint = {"state_dict": {"random": torch.zeros(2)}, "per_rank": per_rank}
    PortableCheckpointIO().save_checkpoint(checkpoint, tmp_path / "a")
    TorchCheckpointIO().save_checkpoint(checkpoint, str(tmp_path / "b.ckpt"))
    for name in ("a", "b.ckpt"):
        lines = invoke("inspect", tmp_path / name)[1].partition("\ntensor ")[2].split("\n")[1:-1]
        rank = "0/" if name == "a" else ""
        assert [line.split("  ")[0] for line in lines] == [
            "state_dict/random", f"per_rank/{rank}gradients/random", "random state",
        ]  # fmt: skip
        assert lines[-1].split()[2:4] == ["6", "tensors"]


def test_inspect_as_json(path, invoke):
    code, output = invoke("inspect", path, "--json")
    facts = json.loads(output)
    assert code == 0
    assert (facts["step"], facts["epoch"], facts["strategy"], facts["world_size"]) == (30, 2, "ddp", 1)
    assert facts["tensors"]["state_dict/2.weight"] == {
        "dtype": "float32", "shape": [2, 3], "bytes": 24, "pieces": 1, "same_as": None,
    }  # fmt: skip
    assert facts["bytes"] == sum(file.stat().st_size for file in path.iterdir())


def test_verify_says_that_all_is_well_without_torch(path):
    outcome = run("verify", path)
    assert (outcome.returncode, outcome.stderr) == (0, "False\n")
    assert "all 5 files are whole" in outcome.stdout


def test_verify_names_everything_that_is_wrong(path, invoke):
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(data)
    (path / "rank-00000.json").unlink()
    (path / "notes.txt").write_text("mine")
    code, output = invoke("verify", path)
    assert code == 1
    problems = output.splitlines()
    assert len(problems) == 3
    assert "rank-00000.json: no such file" in problems[0]
    assert "rank-00000.safetensors has wrong bytes" in problems[1]
    assert "notes.txt: the manifest does not list it" in problems[2]
    assert len(json.loads(invoke("verify", path, "--json")[1])["problems"]) == 3


def test_diff_finds_none_between_equal_checkpoints(path, invoke, tmp_path, model):
    checkpoint = {"epoch": 2, "global_step": 30, "saved_with": "ddp", "state_dict": model.state_dict(), "lr": 0.5}
    PortableCheckpointIO().save_checkpoint(checkpoint, tmp_path / "b")
    assert invoke("diff", path, tmp_path / "b") == (0, "both hold the same values and tensors\n")


def test_diff_shows_values_and_tensors(path, invoke, tmp_path, model):
    weights = dict(model.state_dict())
    weights["0.weight"] = weights["0.weight"] + torch.eye(3, 4)
    weights["0.bias"] = torch.zeros(7)
    weights["new"] = weights.pop("2.bias")
    PortableCheckpointIO().save_checkpoint(
        {"epoch": 2, "global_step": 40, "state_dict": OrderedDict(weights), "lr": 0.25}, tmp_path / "b"
    )
    code, output = invoke("diff", path, tmp_path / "b", "--json")
    rows = {row["name"]: row for row in json.loads(output)["differences"]}
    assert code == 1
    assert rows["global_step"]["difference"] == "+10"
    assert rows["lr"]["difference"] == "-0.25"
    assert rows["state_dict/0.weight"]["difference"] == "3 of 12 elements, at most 1 apart"
    assert (rows["state_dict/0.bias"]["first"], rows["state_dict/0.bias"]["second"]) == ("float32 [3]", "float32 [7]")
    assert rows["state_dict/2.bias"]["second"] == "-"
    assert rows["state_dict/new"]["first"] == "-"
    assert "state_dict/2.weight" not in rows


@pytest.fixture
def single(tmp_path, model):
    """A checkpoint in one file, as TorchCheckpointIO writes it."""
    weights = {**model.state_dict(), "tied": model[0].weight}
    content = {"epoch": 2, "global_step": 30, "saved_with": "ddp", "world_size": 2, "state_dict": weights}
    TorchCheckpointIO().save_checkpoint(content, tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def test_inspect_shows_what_a_single_file_has(single, invoke):
    code, output = invoke("inspect", single)
    assert code == 0
    assert "\nstep        30\nepoch       2\nsaved by    ddp on 2 ranks\n" in output
    assert "in one file of torch\n" in output
    assert "state_dict/0.weight               3 x 4   float32  48 B" in output
    assert "the same as state_dict/0.weight" in output


def test_inspect_names_what_a_single_file_has_of_other_classes(single, invoke, tmp_path):
    torch.save({"state_dict": {}, "size": Size.SMALL, "bomb": Bomb(tmp_path / "hit")}, single)
    assert f"not read    size (of {__name__}.Size), bomb (of builtins.eval)\n" in invoke("inspect", single)[1]
    assert not (tmp_path / "hit").exists()


def test_diff_compares_single_files_with_each_other_and_with_folders(single, path, invoke, tmp_path, model):
    assert invoke("diff", single, single) == (0, "both hold the same values and tensors\n")
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    torch.save({"epoch": 2, "global_step": 31, "state_dict": model.state_dict()}, tmp_path / "other.ckpt")
    for first in (single, path):
        code, output = invoke("diff", first, tmp_path / "other.ckpt", "--json")
        rows = {row["name"]: row["difference"] for row in json.loads(output)["differences"]}
        assert code == 1
        assert rows.pop("global_step") == "+1"
        assert rows.pop("state_dict/0.weight") == "1 of 12 elements, at most 1 apart"
        assert all(difference == "" for difference in rows.values())


def test_diff_does_not_compare_what_each_rank_has(single, invoke, tmp_path):
    content = TorchCheckpointIO().load_checkpoint(str(single))
    per_rank = {"random": {"seed": 3, "words": torch.ones(2)}}
    TorchCheckpointIO().save_checkpoint({**content, "per_rank": per_rank}, tmp_path / "more.ckpt")
    assert invoke("diff", single, tmp_path / "more.ckpt") == (0, "both hold the same values and tensors\n")


def test_verify_reads_a_single_file_and_finds_damage(single, invoke):
    assert (
        "one.ckpt: the file can be read, and its checksums, those of torch.save, are right"
        in invoke("verify", single)[1]
    )
    data = bytearray(single.read_bytes())
    at = data.index(b"global_step")
    data[at] ^= 1
    single.write_bytes(data)
    code, output = invoke("verify", single)
    assert code == 1
    assert "one.ckpt' is damaged" in output
    assert json.loads(invoke("verify", single, "--json")[1])["problems"] == [output.strip()]


def test_what_is_neither_a_folder_nor_a_file_of_torch_is_said_to_be_so(tmp_path, invoke):
    (tmp_path / "notes.txt").write_text("mine")
    for command in ("inspect", "convert"):
        with pytest.raises(CheckpointError, match=r"is damaged, or was not written by torch\.save"):
            invoke(command, tmp_path / "notes.txt", *([tmp_path / "new"] if command == "convert" else []))
    assert invoke("verify", tmp_path / "notes.txt")[0] == 1


def test_consolidate_says_that_a_file_is_one_already(single, invoke, tmp_path):
    with pytest.raises(CheckpointError, match="is one file already"):
        invoke("consolidate", single, tmp_path / "x.safetensors")


def test_consolidate_into_a_file_of_torch(path, invoke, tmp_path, model):
    code, _ = invoke("consolidate", path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert code == 0
    assert whole["global_step"] == 30
    assert whole["per_rank"] == {"seed": 1}
    assert all(torch.equal(whole["state_dict"][name], tensor) for name, tensor in model.state_dict().items())


def test_consolidate_into_safetensors(path, invoke, tmp_path, model):
    code, output = invoke("consolidate", path, tmp_path / "w.safetensors", "--json")
    assert code == 0
    assert json.loads(output)["tensors"] == len(model.state_dict())
    data = (tmp_path / "w.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert set(header) == {"__metadata__", *model.state_dict()}
    begin, end = header["0.weight"]["data_offsets"]
    assert data[8 + length + begin : 8 + length + end] == model[0].weight.detach().numpy().tobytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "last", "w.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("consolidate", "{a}", "{a}"), "exists already"),
        (("consolidate", "{a}", "{a}.zip"), "ends in '.zip': choose .safetensors"),
        (("inspect", "{a}x"), "does not exist"),
        (("verify", "{a}/.."), "is a folder without manifest.json"),
        (("convert", "{a}", "{a}2"), "is a folder, and a file was expected"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(path, invoke, arguments, reason):
    from dstrat.errors import CheckpointError

    with pytest.raises(CheckpointError) as caught:
        invoke(*(word.format(a=path) for word in arguments))
    assert reason in str(caught.value)


def lightning(model, optimizer):
    return {
        "pytorch-lightning_version": "2.5.0",
        "epoch": 3,
        "global_step": 40,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 4}],
        "callbacks": {"Early": 1},
        "loops": {},
        "hyper_parameters": {"lr": 0.1},
    }


def test_a_lightning_checkpoint_is_converted(tmp_path, invoke, model, optimizer):
    torch.save(lightning(model, optimizer), tmp_path / "l.ckpt")
    code, output = invoke("convert", tmp_path / "l.ckpt", tmp_path / "c")
    assert code == 0
    assert "9 weights, epoch 3, step 40, 1 optimizer, 1 scheduler\n" in output
    assert "left out: 'callbacks' (Lightning's own)" in output
    converted = PortableCheckpointIO().load_checkpoint(tmp_path / "c")
    assert (converted["epoch"], converted["global_step"], converted["hyper_parameters"]) == (3, 40, {"lr": 0.1})
    (state,) = converted["optimizers"]
    assert state["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(converted["state_dict"][name], parameter)
        assert torch.equal(state["state"][name]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_hyperparameters_of_unknown_classes_are_left_out_and_named(tmp_path, invoke, model, optimizer):
    args = argparse.Namespace(depth=2, size=Size.SMALL, where=pathlib.PurePosixPath("a/b"))
    settings = {"lr": 0.1, "args": args, "act": torch.nn.ReLU, "sizes": [Size.SMALL], "bomb": Bomb(tmp_path / "hit")}
    source = lightning(model, optimizer) | {"hyper_parameters": settings, "callbacks": {"Early": Size.SMALL}}
    torch.save(source, tmp_path / "l.ckpt")
    code, output = invoke("convert", tmp_path / "l.ckpt", tmp_path / "c")
    assert code == 0
    assert output.splitlines()[1:] == [
        "left out: 'callbacks' (Lightning's own)",
        f"left out: 'hyper_parameters/args/size' (of {__name__}.Size)",
        "left out: 'hyper_parameters/act' (of torch.nn.modules.activation.ReLU)",
        f"left out: 'hyper_parameters/sizes/0' (of {__name__}.Size)",
        "left out: 'hyper_parameters/bomb' (of builtins.eval)",
    ]
    converted = PortableCheckpointIO().load_checkpoint(tmp_path / "c")
    assert converted["hyper_parameters"] == {"lr": 0.1, "args": {"depth": 2, "where": "a/b"}}
    assert not (tmp_path / "hit").exists()


def test_what_a_training_needs_is_not_converted_without_what_cannot_be_read(tmp_path, invoke, model, optimizer):
    source = lightning(model, optimizer)
    source["optimizer_states"][0]["param_groups"][0]["mode"] = Bomb(tmp_path / "hit")
    torch.save(source, tmp_path / "l.ckpt")
    with pytest.raises(CheckpointError, match=r"'optimizer_states/0/param_groups/0/mode' is of builtins\.eval, which"):
        invoke("convert", tmp_path / "l.ckpt", tmp_path / "c")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["l.ckpt"]


def test_a_file_that_would_run_a_command_is_refused(tmp_path, invoke, model, optimizer):
    class Command:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/hit",)

    torch.save(lightning(model, optimizer) | {"callbacks": {"a": Command()}}, tmp_path / "l.ckpt")
    with pytest.raises(CheckpointError, match=r"is not read: it holds \w+\.system that cannot be read without running"):
        invoke("convert", tmp_path / "l.ckpt", tmp_path / "c")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["l.ckpt"]


def test_an_optimizer_whose_parameters_are_not_certain_goes_by_their_order(tmp_path, invoke, model):
    optimizer = torch.optim.AdamW(model[2].parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    torch.save(lightning(model, optimizer), tmp_path / "l.ckpt")
    _, output = invoke("convert", tmp_path / "l.ckpt", tmp_path / "c")
    assert "1 optimizer (which must be made of the same parameters in the same order again)" in output
    (state,) = PortableCheckpointIO().load_checkpoint(tmp_path / "c")["optimizer_states"]
    assert state["param_groups"][0]["params"] == [0, 1]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**3, "1.0 GiB"),
        (3 * 10**15, "2.7 PiB"),
    ],
)
def test_sizes_are_readable(size, text):
    assert readable_size(size) == text


def test_all_of_them_take_urls(invoke, model, tmp_path):
    url = f"memory://commands/{tmp_path.name}"
    PortableCheckpointIO().save_checkpoint({"state_dict": model.state_dict(), "saved_with": "ddp"}, f"{url}/a")
    assert "saved by    ddp on 1 rank\n" in invoke("inspect", f"{url}/last")[1]
    assert invoke("verify", f"{url}/a")[0] == 0
    assert invoke("diff", f"{url}/a", f"{url}/a") == (0, "both hold the same values and tensors\n")
    for name in ("w.safetensors", "all.pt"):
        assert invoke("consolidate", f"{url}/a", f"{url}/{name}")[0] == 0
        with pytest.raises(CheckpointError, match="exists already"):
            invoke("consolidate", f"{url}/a", f"{url}/{name}")
    file = as_path(url) / "a" / "state.json"
    file.write_bytes(file.read_bytes().replace(b"ddp", b"dpd"))
    assert "state.json has wrong bytes" in invoke("verify", f"{url}/a")[1]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_path_that_the_system_refuses_is_an_invalid_value(command):
    done = run(command, "x" * 300)
    assert done.returncode == 2
    assert f"Invalid value for 'PATH': {'x' * 300!r} cannot be used: file name too long" in done.stderr
