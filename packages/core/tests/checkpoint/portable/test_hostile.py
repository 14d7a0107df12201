"""Files that somebody has damaged or made up: each is refused with a clear error, and none is run."""

import contextlib
import json
import os
import pickle
import random
import shutil

import pytest
import torch
import xxhash

from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.format import BLOCK
from dstrat.errors import CheckpointError

FILES = ["manifest.json", "rank-00000.json", "rank-00000.safetensors", "state.json", "tensors.json"]
WEIGHT = torch.randn(3, 100_000)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "c"
    checkpoint = {
        "epoch": 1,
        "state_dict": {"w": WEIGHT, "b": torch.ones(3)},
        "per_rank": {"torch": torch.get_rng_state()},
    }
    PortableCheckpointIO().save_checkpoint(checkpoint, path)
    return path


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def bombs(path):
    torch.save(Bomb(path), path.with_name("torch.pt"))
    return [pickle.dumps(Bomb(path), protocol) for protocol in (0, 2, 4)] + [path.with_name("torch.pt").read_bytes()]


def sealed(path, **changes):
    """Write a manifest that is right about everything that is in the folder now, but for what is to be changed."""
    whole = json.loads((path / "manifest.json").read_text())["manifest"]
    for name in whole["files"]:
        if (path / name).is_file():
            data = (path / name).read_bytes()
            blocks = [data[begin : begin + BLOCK] for begin in range(0, len(data), BLOCK)]
            whole["files"][name] = {
                "size": len(data),
                "xxh3": "".join(xxhash.xxh3_64_hexdigest(block) for block in blocks),
            }
    write_manifest(path, {**whole, **changes})


def write_manifest(path, body):
    text = json.dumps(body, separators=(",", ":"))
    (path / "manifest.json").write_text(f'{{"xxh3":"{xxhash.xxh3_64_hexdigest(text.encode())}","manifest":{text}}}\n')


def edited(path, name, change):
    document = json.loads((path / name).read_text())
    document = change(document) or document
    (path / name).write_text(json.dumps(document))
    sealed(path)


@pytest.mark.parametrize("seals", [False, True], ids=["as it is", "with checksums that fit"])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_the_place_of_any_file_is_never_run(path, io, tmp_path, name, seals):
    for bomb in bombs(tmp_path / "exploded"):
        (path / name).write_bytes(bomb)
        if seals and name != "manifest.json":
            sealed(path)
        for checked in (io, PortableCheckpointIO(verify=False)):
            with pytest.raises(CheckpointError, match="is damaged"):
                checked.load_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_anywhere_is_found_and_the_file_named(path, io, name, refusal):
    data = (path / name).read_bytes()
    generator = random.Random(0)
    places = range(len(data)) if len(data) < 300 else sorted(generator.sample(range(len(data)), 150))
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << generator.randrange(8)
        (path / name).write_bytes(changed)
        assert f"is damaged: {name}" in refusal(io.load_checkpoint, path), place
    (path / name).write_bytes(data)
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["w"], WEIGHT)


def test_without_verification_changed_elements_are_not_found(path):
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"xxxx")
    PortableCheckpointIO(verify=False).load_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_or_is_missing_is_named(path, io, name, refusal):
    data = (path / name).read_bytes()
    for size in (0, 1, len(data) // 2, len(data) - 1):
        (path / name).write_bytes(data[:size])
        assert name in refusal(io.load_checkpoint, path)
    (path / name).write_bytes(data + b" ")
    assert name in refusal(io.load_checkpoint, path)
    (path / name).unlink()
    assert name in refusal(io.load_checkpoint, path)


@pytest.mark.parametrize("name", FILES)
def test_links_folders_and_pipes_are_no_files(path, io, tmp_path, name, refusal):
    shutil.move(path / name, tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name}: is a link, and a checkpoint has none" in refusal(io.load_checkpoint, path)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert f"{name} is no regular file" in refusal(io.load_checkpoint, path)
    (path / name).unlink()
    (path / name).mkdir()
    assert f"{name} is no regular file" in refusal(io.load_checkpoint, path)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "..", "", "a/b.json", "x.pkl", ".metadata", "manifest.json"]
)
def test_a_manifest_lists_only_names_that_a_checkpoint_has(path, io, name, refusal):
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    body["files"][name] = {"size": 1, "xxh3": "0" * 16}
    write_manifest(path, body)
    assert "a checkpoint has no file of such a name" in refusal(io.load_checkpoint, path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, r"c' cannot be read: its format is version 2 .* reads version 1: upgrade dstrat$"),
        ({"version": 2, "block": 4096}, "its format is version 2 .* upgrade dstrat"),
        ({"block": 4096}, "its 'block' is 4096, and version 1 has 1048576"),
        ({"format": "other"}, "it is not the manifest of a dstrat checkpoint"),
        ({"world_size": "1"}, "its 'world_size' is '1' and not of type int"),
        ({"world_size": -1}, "its 'world_size' is negative"),
        ({"files": []}, "its 'files' is"),
        ({"files": {"state.json": 1}}, "its record of state.json is no object"),
        ({"files": {"state.json": {"size": 2**80, "xxh3": ""}}}, "its checksums of state.json do not fit"),
        ({"files": {"state.json": {"size": 1, "xxh3": "z" * 16}}}, "its checksums of state.json do not fit"),
        ({"files": {}}, "its manifest does not list"),
    ],
    ids=str,
)
def test_a_manifest_that_makes_no_sense_is_refused(path, io, change, reason):
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    write_manifest(path, {**body, **change})
    with pytest.raises(CheckpointError, match=reason):
        io.load_checkpoint(path)


def tensor(**facts):
    def change(document):
        document["tensors"]["state_dict/w"].update(facts)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (tensor(shape=[2**50, 2**50]), "do not cover it exactly once|bytes .* not its own"),
        (tensor(shape=[2**50]), "bytes .* not its own"),
        (tensor(shape=[3, 100_001]), "not its own"),
        (tensor(shape=[-3, -100_000]), "is no shape"),
        (tensor(shape=[1.5]), "is no shape"),
        (tensor(shape=[True]), "is no shape"),
        (tensor(shape=[1] * 1000), "is no shape"),
        (tensor(shape="abc"), "is no shape"),
        (tensor(dtype="float33"), "dtype 'float33'"),
        (tensor(dtype=["a"]), "its structure is wrong"),
        (tensor(pieces=[]), "do not cover it exactly once"),
        (tensor(pieces=[[0, 0], [0, 0]]), "do not cover it exactly once"),
        (tensor(pieces=[[0, 10**15]]), "not its own"),
        (tensor(pieces=[[5, 0]]), "its structure is wrong"),
        (tensor(pieces=[[-1, 0]]), "is no shape"),
        (tensor(pieces=[[0, -8]]), "is no shape"),
        (tensor(pieces=[[0, 10, [0, 0], [2, 100_000]]]), "do not cover it exactly once"),
        (tensor(pieces=[[0, 10, [0, 0], [2, 100_000]], [0, 10, [1, 0], [2, 100_000]]]), "do not cover"),
        (tensor(pieces=[[0, 10, [0], [3]]]), "do not cover it exactly once"),
        (tensor(pieces={"a": 1}), "'a' is no piece of a tensor"),
        (tensor(same_as="state_dict/b"), "which it cannot be"),
        (tensor(same_as="state_dict/w"), "which it cannot be"),
        (tensor(same_as="nothing"), "which it cannot be"),
        (lambda document: document.update(files=["../../etc/passwd"]), "that the manifest does not list"),
        (lambda document: document.update(tensors=[]), "its structure is wrong"),
        (lambda document: [1], "its structure is wrong"),
        (lambda document: document["tensors"].pop("state_dict/w") and None, "no tensor 'state_dict/w'"),
        (
            lambda document: document["tensors"].update({"copy": document["tensors"]["state_dict/w"]}),
            "bytes in rank-00000.safetensors that are not its own",
        ),
        (
            lambda document: document["tensors"].update({"epoch": document["tensors"].pop("state_dict/b")}),
            "state_dict/b",
        ),
    ],
)
def test_an_index_that_makes_no_sense_is_refused_before_memory_is_taken(path, io, change, reason):
    edited(path, "tensors.json", change)
    with pytest.raises(CheckpointError, match=reason):
        io.load_checkpoint(path)


def test_an_enormous_empty_tensor_is_refused(path, io, refusal):
    edited(path, "tensors.json", tensor(shape=[0] + [2**61] * 20, pieces=[]))
    assert "is damaged" in refusal(io.load_checkpoint, path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"epoch": 1, "epoch": 2}', "the key 'epoch' twice"),
        ("[" * 1_000_000, "nested too deeply"),
        ('{"a": ' * 900 + "1" + "}" * 900, "nested too deeply"),
        ('{"epoch": {"$": "os.system", "items": ["true"]}}', "a value of the kind 'os.system'"),
        ('{"epoch": {"$": "tensor", "name": "per_rank/0/torch"}}', "no tensor 'per_rank/0/torch'"),
        ("[1, 2]", "state.json: its values are a list and no dict"),
        ('{"epoch": Infinity}', "holds Infinity"),
        ("1" * 10_000, "digits"),
    ],
    ids=["twice", "deep list", "deep dict", "unknown mark", "tensor of a rank", "list", "infinity", "digits"],
)
def test_values_that_make_no_sense_are_refused(path, io, text, reason):
    (path / "state.json").write_text(text)
    sealed(path)
    with pytest.raises(CheckpointError, match=reason):
        io.load_checkpoint(path)


@pytest.mark.parametrize(
    "value",
    [{"$": "dict", "items": [[]]}, {"$": "tensor", "name": []}, {"$": "tensor", "name": {}}, {"$": "tensor"}],
    ids=json.dumps,
)
def test_marks_that_make_no_sense_are_refused_where_tensors_are_skipped(path, io, refusal, value):
    edited(path, "state.json", lambda document: document.update(epoch=value))
    assert "is damaged: state.json: " in refusal(io.load_into, path, {"state_dict": None})


def test_a_json_file_that_would_fill_the_memory_is_not_read(path, io, refusal):
    with (path / "state.json").open("r+b") as file:
        file.truncate(300 * 1024 * 1024)  # a hole, so it takes no space
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    body["files"]["state.json"] = {"size": 300 * 1024 * 1024, "xxh3": "0" * 16 * 300}
    write_manifest(path, body)
    assert "268435456 is the limit" in refusal(io.load_checkpoint, path)


def test_a_name_in_the_manifest_twice_is_refused(path, io, refusal):
    text = (path / "manifest.json").read_text()
    body = text[len('{"xxh3":"0123456789abcdef","manifest":') : -2]
    body = body.replace('"world_size":1', '"world_size":1,"world_size":2')
    (path / "manifest.json").write_text(f'{{"xxh3":"{xxhash.xxh3_64_hexdigest(body.encode())}","manifest":{body}}}\n')
    assert "the key 'world_size' twice" in refusal(io.load_checkpoint, path)


@pytest.mark.parametrize("name", FILES)
def test_random_bytes_never_raise_anything_else(path, io, name):
    generator = random.Random(1)
    for _ in range(60):
        data = bytearray((path / name).read_bytes()[:3000])
        for _ in range(generator.randrange(1, 8)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        (path.with_name("copy")).mkdir()
        for other in path.iterdir():
            shutil.copy(other, path.with_name("copy"))
        (path.with_name("copy") / name).write_bytes(data)
        if name != "manifest.json":
            sealed(path.with_name("copy"))
        with contextlib.suppress(CheckpointError):
            io.load_checkpoint(path.with_name("copy"))
        shutil.rmtree(path.with_name("copy"))
