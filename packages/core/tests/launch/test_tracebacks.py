"""Frames in the tracebacks of errors that leave a run."""

import time
import traceback

import pytest
from packages.core.tests.training.conftest import Averaging, Line, numbers
from torch.utils.data import DataLoader, Dataset

from dstrat import Callback, Trainer
from dstrat.errors import DstratError, RankFailedError
from dstrat.launch.failures import describe_failure
from dstrat.launch.tracebacks import fold_frames

OPTIONS = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Failing(Line):
    def training_step(self, batch, batch_idx):
        try:
            self.layer(batch[0][:, :1])
        except RuntimeError as error:
            raise ValueError("mine") from error


class LogsTwice(Line):
    def training_step(self, batch, batch_idx):
        self.log("loss", "no number")


class WrongState(Line):
    def on_train_start(self):
        self.trainer.run.hooks = None


class Broken(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise KeyError(index)


def frames_after_fit(module, data=None, **options):
    """Return the error of a fit, and the frames between the call of fit and its end."""
    data = numbers() if data is None else data
    with pytest.raises(Exception) as raised:
        Trainer(**(OPTIONS | {"devices": 1} | options)).fit(module, DataLoader(data, batch_size=8))
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names[:3] == ["frames_after_fit", "fit", "_launch"]
    return raised.value, names[3:]


def test_a_traceback_goes_from_the_call_of_fit_to_the_line_of_the_program():
    error, names = frames_after_fit(Failing())
    assert names == ["training_step"]
    assert isinstance(error.__cause__, RuntimeError)
    causes = [frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)]
    assert (causes[0], causes[-1]) == ("training_step", "forward")  # of torch, which the program has called


def hidden(error):
    """Return the frames that notebooks and pytest leave out."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return [frame.f_code.co_name for frame in frames if frame.f_locals.get("__tracebackhide__")]


def test_frames_that_cannot_be_removed_are_marked_for_notebooks(monkeypatch):
    error, _ = frames_after_fit(Failing())
    assert hidden(error) == ["fit", "_launch"]
    error, _ = frames_after_fit(WrongState())  # which may be a fault of ours
    assert hidden(error) == []
    monkeypatch.setenv("DSTRAT_FULL_TRACEBACK", "1")
    error, _ = frames_after_fit(Failing())
    assert hidden(error) == []


def test_our_own_errors_end_at_the_line_of_the_program_that_calls_us():
    error, names = frames_after_fit(LogsTwice())
    assert isinstance(error, DstratError)
    assert names == ["training_step"]


def test_frames_of_libraries_that_call_the_program_within_ours_go_too():
    error, names = frames_after_fit(Line(), Broken())
    assert isinstance(error, KeyError)
    assert names == ["__getitem__"]


def test_an_error_that_our_code_raises_by_accident_keeps_its_frames():
    error, names = frames_after_fit(WrongState())
    assert isinstance(error, AttributeError)
    assert names[:2] == ["launch", "execute"]


def test_all_frames_are_shown_on_request(monkeypatch):
    monkeypatch.setenv("DSTRAT_FULL_TRACEBACK", "1")
    _, names = frames_after_fit(Failing())
    assert names[:2] == ["launch", "execute"]


def test_a_failed_rank_reports_the_frames_of_the_program():
    with pytest.raises(RankFailedError) as raised:
        Trainer(**OPTIONS, strategy=Averaging(), devices=2).fit(Failing(), DataLoader(numbers(), batch_size=8))
    _, _, last = raised.value.rank_traceback.rpartition("Traceback (most recent call last):\n")
    assert last.count('  File "') == 1
    assert "in training_step" in last
    assert "RuntimeError: mat1" in raised.value.rank_traceback


class FailsFirstAndHangs(Callback):
    """Rank 0 fails before rank 1, and hangs in its cleanup."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        time.sleep(0.5 * trainer.global_rank)

    def on_exception(self, trainer, module, exception):
        if trainer.global_rank == 0:
            time.sleep(60)


def test_a_failed_rank_that_hangs_in_its_cleanup_reports_the_frames_of_the_program():
    trainer = Trainer(**OPTIONS, strategy=Averaging(), devices=2, callbacks=[FailsFirstAndHangs()])
    with pytest.raises(RankFailedError) as raised:
        trainer.fit(Failing(), DataLoader(numbers(), batch_size=8))
    assert raised.value.rank == 0
    _, _, last = raised.value.rank_traceback.rpartition("Traceback (most recent call last):\n")
    assert last.count('  File "') == 1


def test_a_note_of_an_error_leaves_its_frames_in_place():
    error, _ = frames_after_fit(WrongState())
    before = traceback.extract_tb(error.__traceback__)
    describe_failure(error)
    assert traceback.extract_tb(error.__traceback__) == before


def test_a_request_that_is_refused_has_no_frames_of_the_resolution():
    with pytest.raises(DstratError) as raised:
        Trainer(**OPTIONS, strategy="dpd")
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names == ["test_a_request_that_is_refused_has_no_frames_of_the_resolution", "__init__"]


def test_an_error_that_causes_itself_is_folded():
    error = ValueError("circle")
    error.__cause__ = error
    fold_frames(error)
    assert describe_failure(error).error == "ValueError"


def test_the_end_of_a_test_by_its_time_limit_keeps_the_frames_that_show_where_it_was():
    class Slow(Line):
        def training_step(self, batch, batch_idx):
            pytest.fail("Timeout")

    with pytest.raises(BaseException) as raised:
        Trainer(**OPTIONS, devices=1).fit(Slow(), DataLoader(numbers(), batch_size=8))
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert any(file.endswith("fit_loop.py") for file in files)
