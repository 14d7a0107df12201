from __future__ import annotations

import pytest
import torch

from dstrat.errors import MisuseError, RequestError
from dstrat.training.callbacks.checkpoint_name import CheckpointName, UnusedPaths


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("epoch={epoch}-step={step}", "epoch=3-step=40"),
        ("{epoch:02d}-{val_loss:.3f}", "03-0.250"),
        ("{val/loss}", "0.5"),
        ("{val.acc[0]:.1f}", "0.8"),
        ("plain", "plain"),
        ("{{braces}}", "{braces}"),
    ],
)
def test_templates_take_logged_values_under_their_own_names(template, name):
    values = {"epoch": 3, "step": 40, "val_loss": torch.tensor(0.25), "val/loss": 0.5, "val.acc[0]": 0.75}
    assert CheckpointName(template).fill(values) == name


def test_names_can_be_shown_before_their_values():
    values = {"epoch": 3, "val/loss": torch.tensor(0.25)}
    assert CheckpointName("{{a}}-{epoch:02d}_{val/loss!s:>5}.", shows_names=True).fill(values) == (
        "{a}-epoch=03_val/loss= 0.25."
    )


def test_a_name_that_was_not_logged_is_an_error_that_lists_the_known_ones():
    message = r"filename='\{vall\}' asks for 'vall', which was not logged: log it, or choose from loss, step$"
    with pytest.raises(MisuseError, match=message):
        CheckpointName("{vall}").fill({"step": 1, "loss": 0.5})


def test_a_format_that_a_number_does_not_have_is_an_error():
    with pytest.raises(MisuseError, match=r"filename='\{loss:d\}' cannot be filled: "):
        CheckpointName("{loss:d}").fill({"loss": 0.5})


@pytest.mark.parametrize(
    ("template", "message"),
    [("{epoch", r"filename='\{epoch' is not a template: "), ("{}", r"filename='\{\}' has a field without a name")],
)
def test_a_template_that_is_none_is_refused(template, message):
    with pytest.raises(RequestError, match=message):
        CheckpointName(template)


def test_a_path_that_is_taken_gets_the_next_suffix_unless_it_may_be_replaced(tmp_path):
    assert UnusedPaths().choose(tmp_path, "best", None) == str(tmp_path / "best.ckpt")
    (tmp_path / "best.ckpt").touch()
    (tmp_path / "best-v1.ckpt").touch()
    assert UnusedPaths().choose(tmp_path, "best", None) == str(tmp_path / "best-v2.ckpt")
    assert UnusedPaths().choose(tmp_path, "best", str(tmp_path / "best.ckpt")) == str(tmp_path / "best.ckpt")


def test_of_two_jobs_the_second_chooses_another_path_until_the_first_has_saved(tmp_path):
    first, second, third = UnusedPaths(), UnusedPaths(), UnusedPaths()
    paths = [job.choose(tmp_path, "best") for job in (first, second)]
    assert paths == [str(tmp_path / "best.ckpt"), str(tmp_path / "best-v1.ckpt")]
    first.release(paths[:1])  # as it could not save
    assert third.choose(tmp_path, "best") == paths[0]
    for job in (first, second, third):
        job.release()
    assert list(tmp_path.iterdir()) == []


def test_a_path_is_chosen_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "kept"  # of which the save says what is wrong
    assert UnusedPaths().choose(path, "best") == str(path / "best.ckpt")
