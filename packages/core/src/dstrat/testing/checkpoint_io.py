"""The suite for checkpoint ios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError
from dstrat.plugins.catalog import get_catalog
from dstrat.testing.plugin import check_light, check_record
from dstrat.testing.suite import Suite, fail, standard

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.interfaces.checkpoint_io import CheckpointIO


class CheckpointIOSuite(Suite):
    """Standard tests of a checkpoint io, in one process."""

    kind = "checkpoint_io"

    @standard("basic", "record")
    def test_its_plugin_is_light_to_import(self) -> None:
        check_light(self.offer)

    @standard("basic", "record")
    def test_its_record_is_complete_and_true(self) -> None:
        check_record(self.offer)

    @standard("basic", "round trip")
    def test_what_is_saved_comes_back(self, tmp_path: Path) -> None:
        checkpoint = _checkpoint()
        loaded = self._saved_and_loaded(checkpoint, tmp_path / "checkpoint")
        differing = _differences(checkpoint, loaded)
        if differing:
            fail(
                f"a checkpoint comes back with another {differing[0]}",
                expected="tensors of every dtype bit for bit, and plain values with their types.",
            )

    @standard("basic", "round trip")
    def test_what_is_changed_after_saving_does_not_reach_the_checkpoint(self, tmp_path: Path) -> None:
        checkpoint = _checkpoint()
        io = self._io
        io.save_checkpoint(checkpoint, tmp_path / "checkpoint")
        checkpoint["state_dict"]["weight"].add_(1)
        io.teardown()  # here and below, as it waits for an io that writes in the background
        if _differences(_checkpoint(), io.load_checkpoint(tmp_path / "checkpoint")):
            fail(
                "a tensor that was changed after save_checkpoint had returned is changed in the checkpoint too",
                fix="copy tensors before writing them in the background.",
            )

    @standard("basic", "round trip")
    def test_a_path_may_be_a_text(self, tmp_path: Path) -> None:
        io, path = self._io, str(tmp_path / "checkpoint")
        io.save_checkpoint(_checkpoint(), path)
        io.teardown()
        if _differences(_checkpoint(), io.load_checkpoint(path)):
            fail("a checkpoint that was saved to a path of type str does not come back")

    @standard("basic", "errors")
    def test_a_missing_checkpoint_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        path = tmp_path / "nowhere"
        try:
            self._io.load_checkpoint(path)
        except CheckpointError as error:
            if "nowhere" not in str(error):
                fail(f"the error for a missing checkpoint does not name its path: {error}")
        except Exception as error:  # noqa: BLE001 - the advice names it
            fail(f"loading a missing checkpoint raised {type(error).__name__}: {error}", fix="raise CheckpointError.")
        else:
            fail("loading a missing checkpoint raised nothing")

    @standard("basic", "errors")
    def test_a_damaged_checkpoint_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint"
        self._saved_and_loaded(_checkpoint(), path)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        # Not any file: formats may have small ones that a loading never reads.
        largest = max(files, key=lambda file: file.stat().st_size)
        content = largest.read_bytes()
        largest.write_bytes(content[: len(content) // 2])
        try:
            self._io.load_checkpoint(path)
        except CheckpointError:
            return
        except Exception as error:  # noqa: BLE001 - the advice names it
            fail(f"loading a damaged checkpoint raised {type(error).__name__}: {error}", fix="raise CheckpointError.")
        fail(f"a checkpoint of which {largest.name} has lost its second half was loaded as if it were whole")

    @standard("basic", "removal")
    def test_a_removed_checkpoint_is_gone(self, tmp_path: Path) -> None:
        io, path = self._io, tmp_path / "checkpoint"
        io.save_checkpoint(_checkpoint(), path)
        io.teardown()
        io.remove_checkpoint(path)
        if path.exists():
            fail("remove_checkpoint left the checkpoint where it was, so that disks fill up")

    @standard("basic", "life cycle")
    def test_it_may_be_ended_twice(self) -> None:
        io = self._io
        io.teardown()
        io.teardown()

    @property
    def _io(self) -> CheckpointIO:
        io: CheckpointIO = get_catalog().load(self.offer)(**{**self.component.options, **self.options})
        return io

    def _saved_and_loaded(self, checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
        io = self._io
        io.save_checkpoint(checkpoint, path)
        io.teardown()
        return self._io.load_checkpoint(path)


def _checkpoint() -> dict[str, Any]:
    import torch

    return {
        "state_dict": {
            "weight": torch.arange(12.0).reshape(3, 4) / 7,
            "half": torch.arange(4.0).to(torch.bfloat16),  # which numpy does not have
            "transposed": torch.arange(6.0).reshape(2, 3).T,  # not contiguous
            "counts": torch.tensor([1, -2, 2**40]),  # too large for int32
            "mask": torch.tensor([True, False]),
            "scalar": torch.tensor(0.1, dtype=torch.float64),
            "empty": torch.zeros(0, 3),
        },
        "epoch": 3,
        "loss": 0.1,
        "names": ["a", "b"],
        "nothing": None,
        "flag": True,
        "nested": {"deep": {"value": -1}},
    }


def _differences(one: Any, other: Any, name: str = "") -> list[str]:
    import torch

    if isinstance(one, dict):
        if not isinstance(other, dict):
            return [name]
        missing = [f"{name}.{key}" for key in one if key not in other]
        nested = [
            _differences(value, other[key], f"{name}.{key}".lstrip(".")) for key, value in one.items() if key in other
        ]
        return missing + [differing for names in nested for differing in names]
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [name]
    return [] if type(one) is type(other) and one == other else [name]
