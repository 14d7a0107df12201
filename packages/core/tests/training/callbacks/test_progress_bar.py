from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import pty
import re
import struct
import sys
import termios
import threading
import time
from itertools import pairwise

import pytest
import torch
from tests.accelerators import ACCELERATOR
from tests.warm_program import WarmProgram
from torch.utils.data import IterableDataset

from dstrat import Callback, ModelCheckpoint, RichProgressBar, RichProgressBarTheme, TQDMProgressBar, Trainer
from dstrat.errors import RequestError
from dstrat.loggers import CSVLogger, Logger
from dstrat.training.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from dstrat.training.callbacks.progress import Progress
from dstrat.training.callbacks.progress_bar import ProgressBar
from dstrat.training.callbacks.progress_terminal import LiveDisplay
from dstrat.training.metrics import publisher

NUMBER = r"[\d.e+-]+"
BAR = r"[━╸╺]+"
LOSS = rf"loss {NUMBER}"
TIME = r"\d:\d\d"


@pytest.fixture
def shown(quiet_trainer, loader, capfd):
    """Fits with lines of progress, and returns the lines that stderr got."""

    def shown_(module, *, validates=False, **options):
        trainer = quiet_trainer(enable_progress_bar=True, **options)
        trainer.fit(module, loader(), loader() if validates else None)
        return capfd.readouterr().err.splitlines()

    return shown_


def trained(epochs, steps, *values):
    """A pattern of the line after a training."""
    counts = f"{epochs} epoch{'s' * (epochs != 1)}, " * (epochs > 0) + f"{steps} step{'s' * (steps != 1)}"
    return rf"trained {counts}, in {NUMBER} s: {', '.join([LOSS, *values])}"


def matches(lines, *patterns):
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern.replace("SPEED", rf"{NUMBER} (it/s|s/it)"), line), line
    return True


class Telling:
    """Mixed into a module: logs to the bar."""

    def training_step(self, batch, batch_idx):
        self.log("step", batch_idx, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", 0.123456, prog_bar=True)
        self.log("hidden", 1.0)


@pytest.fixture
def telling(line_class):
    return type("TellingLine", (Telling, line_class), {})


def test_elsewhere_than_on_a_terminal_there_is_a_line_for_each_epoch(shown, telling):
    assert matches(
        shown(telling(), validates=True),
        rf"Epoch 1/2: 6/6 batches, SPEED, {LOSS}, step 5, val 0\.1235",
        rf"Epoch 2/2: 6/6 batches, SPEED, {LOSS}, step 5, val 0\.1235",
        trained(2, 12, "step 5", r"val 0\.1235"),
    )


def test_further_lines_come_in_the_interval_that_was_asked_for(shown, telling):
    lines = shown(telling(), validates=True, callbacks=ProgressBar(refresh_seconds=0), max_epochs=1)
    done = [line.split(" batches")[0] for line in lines[:-1]]
    assert done == [
        "Sanity check: 0/2", "Sanity check: 1/2", "Sanity check: 2/2",
        "Epoch 1/1: 0/6", *(f"Epoch 1/1: {n}/6" for n in range(1, 7)),
        *(f"Validation, in Epoch 1/1: {n}/6" for n in range(7)),
        "Epoch 1/1: 6/6",
    ]  # fmt: skip
    assert "val" not in lines[2]


def test_the_speed_of_training_leaves_validation_out(quiet_trainer, line_class, loader, capfd, monkeypatch):
    now = 1000.0
    for name in ("progress", "progress_bar"):
        monkeypatch.setattr(f"dstrat.training.callbacks.{name}.monotonic", lambda: now)

    class Clocked(line_class):
        def training_step(self, batch, batch_idx):
            nonlocal now
            now += 0.125
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            nonlocal now
            now += 1.0

    trainer = quiet_trainer(callbacks=ProgressBar(refresh_seconds=1e6), enable_progress_bar=True, val_check_interval=3)
    trainer.fit(Clocked(), loader(), loader(count=16))
    speeds = [line.split(", ")[1] for line in capfd.readouterr().err.splitlines() if line.startswith("Epoch")]
    assert speeds == ["8 it/s", "8 it/s"]


def test_the_end_by_max_steps_is_the_end_of_the_bar(shown, line):
    lines = shown(line, max_epochs=None, max_steps=4, accumulate_grad_batches=1)
    assert matches(lines, rf"Epoch 1: 4/4 batches, SPEED, {LOSS}", trained(0, 4))


@pytest.mark.parametrize(
    ("steps", "total"),
    [
        ({"max_epochs": 1}, 6),
        ({"max_epochs": None, "max_steps": 5}, 5),
        ({"max_epochs": None, "max_steps": 1, "accumulate_grad_batches": 5}, 5),
    ],
)
def test_an_epoch_that_is_continued_begins_where_it_was(quiet_trainer, line, loader, capfd, tmp_path, steps, total):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 3:
                trainer.save_checkpoint(tmp_path / "saved")

    quiet_trainer(callbacks=Saving(), **steps).fit(line, loader())
    capfd.readouterr()
    trainer = quiet_trainer(enable_progress_bar=True, callbacks=ProgressBar(refresh_seconds=0), **steps)
    trainer.fit(line, loader(), ckpt_path=tmp_path / "saved")
    lines = capfd.readouterr().err.splitlines()
    done = [re.search(r"(\d)/(\d) batches", line).groups() for line in lines[:-1]]
    assert done == [(str(n), str(total)) for n in (*range(4, total + 1), total)]
    assert "it/s" not in lines[0]
    assert "s/it" not in lines[0]  # nothing has been done in this run


def test_accumulated_batches_count_until_the_last_step(shown, line):
    lines = shown(line, max_epochs=None, max_steps=2, accumulate_grad_batches=2)
    assert matches(lines, rf"Epoch 1: 4/4 batches, SPEED, {LOSS}", trained(0, 2))


def test_evaluation_and_prediction_have_a_line_each_with_their_own_values(
    quiet_trainer, telling, line_class, loader, capfd
):
    trainer = quiet_trainer(enable_progress_bar=True)
    module = telling()
    trainer.validate(module, [loader(), loader(count=8)], verbose=False)
    trainer.test(module, loader(), verbose=False)
    trainer.predict(module, loader())
    assert matches(
        capfd.readouterr().err.splitlines(),
        r"Validation: 7/7 batches, SPEED, val/dataloader_idx_0 0\.1235, val/dataloader_idx_1 0\.1235",
        r"Test: 6/6 batches, SPEED",
        r"Prediction: 6/6 batches, SPEED",
    )


def test_a_loader_without_a_length_is_counted_without_an_end(quiet_trainer, telling, capfd):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(8), torch.zeros(1))] * 3)

    module = telling()
    trainer = quiet_trainer(enable_progress_bar=True, max_epochs=1)
    trainer.fit(module, torch.utils.data.DataLoader(Stream()))
    trainer.predict(module, torch.utils.data.DataLoader(Stream()))
    assert matches(
        capfd.readouterr().err.splitlines(),
        rf"Epoch 1/1: 3 batches, SPEED, {LOSS}, step 2",
        trained(1, 3, "step 2"),
        r"Prediction: 3 batches, SPEED",
    )


def test_an_exception_leaves_a_line_about_where_it_happened(quiet_trainer, line_class, loader, capfd):
    class Failing(line_class):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(enable_progress_bar=True)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Failing(), loader())
    assert matches(
        capfd.readouterr().err.splitlines(),
        r"Epoch 1/2: 3/6 batches, SPEED, 0:00 left",
        "training failed in epoch 1, after 3 steps",
    )


def test_one_bar_serves_several_fits(quiet_trainer, telling, line, loader, capfd):
    bar = ProgressBar()
    for module in (telling(), line):
        quiet_trainer(callbacks=bar, enable_progress_bar=True, max_epochs=1).fit(module, loader())
    assert matches(
        capfd.readouterr().err.splitlines(),
        rf"Epoch 1/1: 6/6 batches, SPEED, {LOSS}, step 5",
        trained(1, 6, "step 5"),
        rf"Epoch 1/1: 6/6 batches, SPEED, {LOSS}",
        trained(1, 6),
    )
    pickle.dumps(bar)


def test_only_rank_0_shows_it(quiet_trainer, line, loader, averaging, capfd):
    trainer = quiet_trainer(enable_progress_bar=True, devices=2, strategy=averaging(), max_epochs=1)
    trainer.fit(line, loader())
    assert matches(capfd.readouterr().err.splitlines(), rf"Epoch 1/1: 3/3 batches, SPEED, {LOSS}", trained(1, 3))


def test_values_are_read_only_when_they_are_shown(telling, loader, tmp_path):
    class Counting(Trainer):
        reads = 0

        @property
        def progress_bar_metrics(self):
            Counting.reads += 1
            return super().progress_bar_metrics

    trainer = Counting(accelerator=ACCELERATOR, devices=1, max_epochs=2, logger=False, enable_checkpointing=False)
    trainer.fit(telling(), loader(batch_size=1))
    assert trainer.global_step == 96
    assert Counting.reads == 2


def test_bar_checkpoint_and_csv_cost_a_few_calls_per_batch(line_class, tmp_path, monkeypatch):
    """Counted rather than timed, and nothing is drawn or written because time has passed: load changes nothing."""
    monkeypatch.setattr(publisher, "SECONDS_BETWEEN_SAVES", 1000)

    def calls(batches, *, enabled):
        module = line_class()
        module.log = lambda *args, **kwargs: None
        count = 0

        def on_call(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        trainer = Trainer(
            accelerator=ACCELERATOR, devices=1, max_epochs=1,
            default_root_dir=tmp_path, logger=enabled, log_every_n_steps=50,
            enable_progress_bar=enabled, enable_checkpointing=enabled, enable_model_summary=enabled,
            callbacks=[ProgressBar(refresh_seconds=1000)] if enabled else [],
        )  # fmt: skip
        data = torch.utils.data.DataLoader([(torch.zeros(1, 8), torch.zeros(1, 1))] * batches, batch_size=None)
        sys.setprofile(on_call)
        try:
            trainer.fit(module, data)
        finally:
            sys.setprofile(None)
        return count

    def per_batch(*, enabled):
        return (calls(400, enabled=enabled) - calls(100, enabled=enabled)) / 300

    calls(100, enabled=True)
    assert per_batch(enabled=True) - per_batch(enabled=False) < 8


def test_rich_is_not_loaded_where_no_bar_moves(tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys, torch\n"
        "for name in [*sys.modules]:  # what the fork server has loaded, and only what torch needs may stay\n"
        "    if name.split('.')[0] in ('dstrat', 'rich'): del sys.modules[name]\n"
        "from dstrat import Trainer, TrainModule\n"
        "class Net(TrainModule):\n"
        "    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(2, 1)\n"
        "    def training_step(self, batch, index): return self.layer(batch).sum()\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "Trainer(accelerator='cpu', max_epochs=1).fit(\n"
        "    Net(), torch.utils.data.DataLoader([torch.zeros(1, 2)], batch_size=None))\n"
        "print('rich' in sys.modules)"
    )
    program = WarmProgram(tmp_path / "script.py")
    out, err = program.communicate()
    assert (program.returncode, out) == (0, "False\n"), err
    assert "Epoch 1/1: 1/1 batches" in err


def test_of_several_loaders_it_is_said_which_one_is_read(quiet_trainer, telling, loader, capfd):
    bar = ProgressBar(refresh_seconds=0)
    quiet_trainer(enable_progress_bar=True, callbacks=bar).validate(telling(), [loader(24), loader(48)], verbose=False)
    done = [line.split(" batches")[0] for line in capfd.readouterr().err.splitlines()]
    assert done == [
        "Validation 1 of 2: 0/3", "Validation 1 of 2: 1/3", "Validation 2 of 2: 2/3", "Validation 2 of 2: 3/3",
        "Validation: 3/3",
    ]  # fmt: skip


def test_the_values_of_training_stay_while_validation_goes_on(quiet_trainer, telling, loader, capfd):
    class Watching(telling):
        def on_validation_start(self):
            if not self.trainer.sanity_checking:
                bar._update(self.trainer)

    bar = ProgressBar(refresh_seconds=1e6)
    quiet_trainer(enable_progress_bar=True, callbacks=bar, max_epochs=1).fit(Watching(), loader(), loader())
    lines = capfd.readouterr().err.splitlines()
    assert matches(
        lines,
        rf"Validation, in Epoch 1/1: 0/6 batches, {LOSS}, step 5",
        rf"Epoch 1/1: 6/6 batches, SPEED, {LOSS}, step 5, val 0\.1235",
        trained(1, 6, "step 5", r"val 0\.1235"),
    )


def test_an_evaluation_that_breaks_says_so(quiet_trainer, line_class, loader, capfd):
    class Failing(line_class):
        def test_step(self, batch, batch_idx):
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        quiet_trainer(enable_progress_bar=True).test(Failing(), loader())
    assert capfd.readouterr().err.splitlines()[-1] == "test terminated"


def test_the_line_about_a_break_names_the_newest_checkpoint(quiet_trainer, line_class, loader, capfd, tmp_path):
    def breaking(error):
        class Breaking(line_class):
            def on_train_epoch_start(self):
                if self.trainer.current_epoch == 2:
                    raise error

        return Breaking()

    older = ModelCheckpoint(tmp_path / "one", every_n_epochs=1, save_top_k=1)
    newer = OnExceptionCheckpoint(tmp_path / "other")
    both = ModelCheckpoint(tmp_path / "third", save_on_exception=True)
    for callbacks, newest in (
        ([older], "one/epoch=1-step=12.ckpt"),
        ([older, newer], "other/on_exception.ckpt"),
        ([both], "third/on_exception.ckpt"),
    ):
        trainer = quiet_trainer(enable_progress_bar=True, callbacks=callbacks, max_epochs=3)
        error = KeyboardInterrupt if newest.startswith("one") else ValueError
        with pytest.raises(error):
            trainer.fit(breaking(error), loader())
        last = capfd.readouterr().err.splitlines()[-1]
        assert last == (
            f"training {'interrupted' if error is KeyboardInterrupt else 'failed'} in epoch 3, "
            f"after 12 steps; newest checkpoint: {tmp_path / newest}"
        )


def test_a_negative_interval_is_an_error():
    with pytest.raises(RequestError, match=r"ProgressBar\(refresh_seconds=-1\) must be 0 or more"):
        ProgressBar(refresh_seconds=-1)


class Recording:
    """A display that shows the time, and keeps what it was given."""

    seconds_between_updates = 0.1
    starts_at_once = True
    shows_time = True

    def __init__(self):
        self.drawn = []
        self.is_closed = False

    def update(self, running, values):
        assert not self.is_closed
        self.drawn.append((running[-1].done, dict(values), running[-1].seconds))

    def finish(self, progress, values):
        pass

    def close(self):
        self.is_closed = True


def test_while_a_batch_takes_long_the_time_goes_on_and_what_is_done_is_shown(
    quiet_trainer, telling, loader, monkeypatch
):
    display = Recording()

    class Stalling(telling):
        def training_step(self, batch, batch_idx):
            deadline = time.monotonic() + 300
            while batch_idx == 5 and len(drawn_while_stalled()) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    def drawn_while_stalled():
        return [seconds for done, _, seconds in display.drawn if done == 5]

    monkeypatch.setattr("dstrat.training.callbacks.progress_bar.make_display", lambda: display)
    quiet_trainer(enable_progress_bar=True, max_epochs=1).fit(Stalling(), loader())
    while_stalled = drawn_while_stalled()
    assert len(while_stalled) >= 4
    assert all(later > earlier for earlier, later in pairwise(while_stalled))
    assert display.is_closed
    assert not any(thread.name == "progress" for thread in threading.enumerate())


ON_A_TERMINAL = """
import os, sys
print("opens", end="", flush=True)
terminal = os.open(sys.argv[1], os.O_RDWR)  # which controls the process from now on, as it has no other
for number, name in enumerate(("stdin", "stdout", "stderr")):
    os.dup2(terminal, number)
    setattr(sys, name, open(number, "r" if name == "stdin" else "w", buffering=1, closefd=False))
os.close(terminal)
os.environ["TERM"] = "xterm"
"""


@pytest.fixture
def at_terminal(tmp_path):
    """Runs code as a program at a terminal of its own; gives what talks to it there, and sees that it ends well."""
    pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
    from pexpect.fdpexpect import fdspawn

    @contextlib.contextmanager
    def at_terminal(code):
        (tmp_path / "script.py").write_text(ON_A_TERMINAL + code)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        with fdspawn(ours, timeout=100, encoding="utf-8") as child:
            program = WarmProgram(tmp_path / "script.py", os.ttyname(theirs))
            assert program.stdout.read() == "opens"
            os.close(theirs)
            yield child
            child.expect(pexpect.EOF)
            program.run()

    return at_terminal


PROMPTING = """
import code, torch
from dstrat import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            code.interact(banner="at the prompt", exitmsg="", local={})
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = torch.utils.data.DataLoader([torch.zeros(1, 2)] * 3, batch_size=None)
Trainer(accelerator="cpu", logger=False, enable_model_summary=False, max_epochs=1).fit(Net(), loader)
"""


def test_nothing_is_drawn_while_someone_types_at_a_prompt(at_terminal):
    pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
    with at_terminal(PROMPTING) as child:
        child.expect(">>>")
        child.expect([pexpect.TIMEOUT, "Epoch"], timeout=0.3)  # the bars below the prompt
        child.expect([pexpect.TIMEOUT, "Epoch"], timeout=1.5)
        assert child.after is pexpect.TIMEOUT
        child.sendline("print('typed', 6 * 7)")
        child.expect("typed 42")
        child.send("\x04")  # the end of what is typed
        child.expect("3/3")


FOREIGN = r"""
import os, sys
from dstrat.training.callbacks.progress import Progress
from dstrat.training.callbacks.progress_terminal import LiveDisplay

display = LiveDisplay()
display.update([Progress("Epoch", 10), Progress("Validation", 10)], {"loss": 1.0})
os.write(2, b"from another process\n")
display.update([Progress("Epoch", 10)], {})
print("from this one")
os.write(2, b"again\n")
display.update([Progress("Epoch", 10), Progress("Validation", 10)], {"loss": 1.0})
display.finish(Progress("Epoch", 10), {})
display.close()
print("after")
"""


def test_what_other_processes_write_to_the_terminal_stays_above_the_bars(make_screen, at_terminal):
    with at_terminal(FOREIGN) as child:
        pass
    assert matches(
        make_screen(child.before).lines,
        "from another process", "from this one", "again", r"Epoch: 0/10 batches, 0:00", "after", "",
    )  # fmt: skip


FORKING = """
import os, sys, threading
from dstrat.training.callbacks.progress import Progress
from dstrat.training.callbacks.progress_terminal import LiveDisplay
from dstrat.training.callbacks.progress_bar import Ticker

display = LiveDisplay()
ticker = Ticker(lambda: display.update([Progress("Epoch", 10)], {}) or 0)
for _ in range(100):
    if (child := os.fork()) == 0:
        print("child", file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
ticker.stop()
display.close()
print("survived")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_while_the_bar_is_drawn_can_write(tmp_path):
    pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
    child = pexpect.spawn(  # a small program, as a hundred copies of one that has torch cost more than its start
        sys.executable, ["-W", "ignore", "-c", FORKING], env=os.environ | {"TERM": "xterm"}, timeout=400,
        dimensions=(24, 100), cwd=str(tmp_path),
    )  # fmt: skip
    child.expect("survived")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.fixture
def slow(line_class):
    """A module whose batches take long enough for a bar to move."""

    class Slow(Telling, line_class):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            self.say(batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            time.sleep(0.02)
            super().validation_step(batch, batch_idx)

        def say(self, batch_idx):
            pass

    return Slow


@pytest.fixture
def bar_trainer(quiet_trainer):
    return lambda **options: quiet_trainer(enable_progress_bar=True, **options)


def test_on_a_terminal_bars_end_with_the_last_state_below_what_was_written(terminal, bar_trainer, slow, loader):
    class Chatty(slow):
        def say(self, batch_idx):
            if batch_idx == 30:
                print("printed")
                log.warning("logged")
                sys.stderr.write("written\n")

    log = logging.Logger("test")  # noqa: LOG001 - a logger that nothing else sees
    with terminal() as screen:
        logging.root.manager.loggerDict["test"] = log
        log.addHandler(handler := logging.StreamHandler())
        trainer = bar_trainer()
        trainer.fit(Chatty(), loader(1), loader(2))
        trainer.validate(Chatty(), loader(2), verbose=False)
        print("after")
        log.warning("afterwards")
        assert handler.stream is sys.stderr
        del logging.root.manager.loggerDict["test"]
    assert matches(
        screen.lines,
        "printed", "logged", "written",
        rf"Epoch 1/2: 48/48 batches, {TIME}, SPEED  {LOSS}  step 47  val 0.1235",
        "printed", "logged", "written",
        rf"Epoch 2/2: 48/48 batches, {TIME}, SPEED  {LOSS}  step 47  val 0.1235",
        trained(2, 96, "step 47", "val 0.1235"),
        rf"Validation: 24/24 batches, {TIME}, SPEED  val 0.1235",
        "after", "afterwards", "",
    )  # fmt: skip
    assert screen.cursor_is_visible


def test_a_handler_that_looks_its_stream_up_writes_above_the_bars(terminal, bar_trainer, slow, loader):
    class Logging(slow):
        def say(self, batch_idx):
            if batch_idx == 2:
                log.warning("looked up")

    log = logging.Logger("test")  # noqa: LOG001 - a logger that nothing else sees
    log.addHandler(logging.lastResort)  # its stream cannot be set, as that of the handler which dill adds
    with terminal() as screen:
        logging.root.manager.loggerDict["test"] = log
        bar_trainer(max_epochs=1).fit(Logging(), loader(8))
        log.warning("afterwards")
        del logging.root.manager.loggerDict["test"]
    finished = rf"Epoch 1/1: 6/6 batches, {TIME}, SPEED  {LOSS}  step 5"
    assert matches(screen.lines, "looked up", finished, trained(1, 6, "step 5"), "afterwards", "")


def test_validation_has_a_bar_below_the_epoch_and_an_exception_keeps_both(terminal, bar_trainer, slow, loader):
    class Failing(slow):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if batch_idx == 20:
                raise ValueError("broken")

    with terminal() as screen, pytest.raises(ValueError, match="broken"):
        bar_trainer().fit(Failing(), loader(1), loader(1))
    assert matches(
        screen.lines,
        rf"Epoch 1/2\s+{BAR} 48/48 SPEED +0:0\d",
        rf"Validation {BAR} 20/48 SPEED +0:0\d 0:0\d left",
        rf"{LOSS}  step 47",
        "training failed in epoch 1, after 48 steps",
        "",
    )
    assert screen.cursor_is_visible


def test_a_value_stays_in_one_line_with_its_name(terminal):
    values = {f"a_long_name_{number}": number / 7 for number in range(1, 9)}
    with terminal() as screen:
        display = LiveDisplay()
        display.update([Progress("Epoch 1", 3)], values)
        display.close()
    assert max(map(len, screen.lines)) <= 100
    shown = [pair for line in screen.lines[1:-1] for pair in line.split("  ")]
    assert shown == [f"{name} {value:.4g}" for name, value in values.items()]


def test_what_is_printed_into_a_file_stays_there(terminal, bar_trainer, slow, loader, tmp_path, monkeypatch):
    class Chatty(slow):
        def say(self, batch_idx):
            print("result", batch_idx)

    with terminal() as screen, (tmp_path / "results").open("w") as results, contextlib.redirect_stdout(results):
        bar_trainer(max_epochs=1).fit(Chatty(), loader(2))
    finished = rf"Epoch 1/1: 24/24 batches, {TIME}, SPEED  {LOSS}  step 23"
    assert matches(screen.lines, finished, trained(1, 24, "step 23"), "")
    assert (tmp_path / "results").read_text().splitlines() == [f"result {index}" for index in range(24)]


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(terminal, bar_trainer, telling, loader, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as screen:
        bar_trainer().fit(telling(), loader())
    epochs = [rf"Epoch {number}/2: 6/6 batches, SPEED, {LOSS}, step 5" for number in (1, 2)]
    assert matches(screen.lines, *epochs, trained(2, 12, "step 5"), "")


INTERRUPTED = """
import sys, time, torch
from dstrat import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

original = sys.stdout
try:
    loader = torch.utils.data.DataLoader([torch.zeros(1, 2)] * 3000, batch_size=None)
    Trainer(accelerator="cpu", logger=False, enable_model_summary=False).fit(Net(), loader)
except KeyboardInterrupt:
    print("interrupted", sys.stdout is original)
"""


def test_ctrl_c_leaves_the_terminal_in_order(make_screen, at_terminal):
    with at_terminal(INTERRUPTED) as child:
        child.expect(r"\d\d/3000")
        text = child.before + child.after
        child.send("\x03")  # Ctrl-C
    screen = make_screen(text + child.before)
    assert matches(
        [line.replace("^C", "") for line in screen.lines], rf"Epoch 1/1000 {BAR} \d+/3000 SPEED +0:\d\d +[\d:]+ left",
        LOSS,
        r"training interrupted in epoch 1, after \d+ steps", "interrupted True", "",
    )  # fmt: skip
    assert screen.cursor_is_visible


class Renaming:
    """Mixed into a bar: shows other values."""

    def get_metrics(self, trainer, module):
        return {**super().get_metrics(trainer, module), "note": "mine"}


def test_a_subclass_chooses_the_values_that_are_shown(shown, telling):
    bar = type("Bar", (Renaming, ProgressBar), {})()
    assert matches(
        shown(telling(), callbacks=bar, max_epochs=1),
        rf"Epoch 1/1: 6/6 batches, SPEED, {LOSS}, step 5, note mine",
        trained(1, 6, "step 5", "note mine"),
    )


@pytest.mark.parametrize("bar_class", [RichProgressBar, TQDMProgressBar])
def test_updates_wait_for_as_many_batches_as_were_asked_for_and_zero_shows_nothing(
    bar_class, quiet_trainer, telling, loader, monkeypatch, capfd
):
    for rate, expected in ((4, [4]), (0, [])):
        display = Recording()
        display.seconds_between_updates, display.shows_time = 0.0, False
        monkeypatch.setattr(bar_class, "make_display", lambda self, display=display: display)
        trainer = quiet_trainer(callbacks=bar_class(refresh_rate=rate), enable_progress_bar=True, max_epochs=1)
        trainer.fit(telling(), loader())
        assert [done for done, _, _ in display.drawn if done] == expected
        assert matches(capfd.readouterr().err.splitlines(), *([trained(1, 6, "step 5")] if rate else []))
    with pytest.raises(RequestError, match=r"ProgressBar\(refresh_rate=-1"):
        bar_class(refresh_rate=-1)


@pytest.mark.parametrize("bar_class", [RichProgressBar, TQDMProgressBar])
def test_a_bar_that_shows_nothing_counts_no_batches_of_evaluations(bar_class, quiet_trainer, telling, loader, capfd):
    trainer = quiet_trainer(callbacks=bar_class(refresh_rate=0), enable_progress_bar=True, num_sanity_val_steps=1)
    trainer.fit(telling(), loader(), loader())
    trainer.predict(telling(), loader())
    assert not capfd.readouterr().err


def test_themed_bars_stay_above_each_other_where_that_is_asked_for(terminal, bar_trainer, slow, loader):
    theme = RichProgressBarTheme(progress_bar="red", metrics_format=".3f", metrics_text_delimiter=" | ")
    bar = RichProgressBar(leave=True, theme=theme, console_kwargs={"width": 60})
    with terminal() as screen:
        bar_trainer(callbacks=bar).fit(slow(), loader(8), loader(8))
    assert matches(
        screen.lines,
        rf"Epoch 1/2 {BAR} 6/6 SPEED 0:0\d", rf"{LOSS} \| step 5.000 \| val 0.123",
        rf"Epoch 2/2 {BAR} 6/6 SPEED 0:0\d", rf"{LOSS} \| step 5.000 \| val 0.123",
        trained(2, 12, "step 5", r"val 0\.1235"), "",
    )  # fmt: skip
    assert max(map(len, screen.lines[:4])) <= 60


def drawn_by_tqdm(text):
    """Return the states of bars that tqdm has drawn in a file, without those that only the clock made."""
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_tqdm_shows_epochs_validation_and_values(quiet_trainer, telling, loader, capfd):
    class Eager(TQDMProgressBar):
        def make_display(self):
            display = super().make_display()
            display.seconds_between_updates = 0.0
            return display

    trainer = quiet_trainer(callbacks=Eager(), enable_progress_bar=True, max_epochs=1)
    module = telling()
    trainer.fit(module, loader(), loader(count=16))
    trainer.predict(module, loader())
    states = drawn_by_tqdm(capfd.readouterr().out)
    assert any(state.startswith("Sanity check: 100%") for state in states)
    assert any(state.startswith("Validation: 100%") and "2/2" in state for state in states)
    assert any(re.fullmatch(r"Epoch 1/1:  50%.*3/6 .*step=2\]", state) for state in states)
    assert any(re.fullmatch(r"Epoch 1/1: 100%.*6/6 .*step=5, val=0.1235\]", state) for state in states)
    assert re.fullmatch(r"Prediction: 100%.*6/6 .*\]", states[-1])
    pickle.dumps(TQDMProgressBar())


def test_bars_of_tqdm_take_each_others_place_on_a_terminal(terminal, bar_trainer, slow, loader):
    class Wide(TQDMProgressBar):
        def init_train_tqdm(self):
            bar = super().init_train_tqdm()
            bar.bar_format = "{desc}{n_fmt} of {total_fmt}"
            return bar

    for leave in (False, True):
        with terminal() as screen:
            fcntl.ioctl(sys.stdout, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
            bar_trainer(callbacks=Wide(leave=leave)).fit(slow(), loader(8), loader(8))
        lines = [line for line in screen.lines if line]
        assert lines[:-1] == [*(["Epoch 1/2: 6 of 6"] if leave else []), "Epoch 2/2: 6 of 6"]


def test_the_loss_is_that_of_the_last_batch_not_divided_by_the_accumulated_ones(
    quiet_trainer, line_class, loader, capfd
):
    class Constant(line_class):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0 + 2.5 + batch_idx

    quiet_trainer(enable_progress_bar=True, max_epochs=1, accumulate_grad_batches=3).fit(Constant(), loader())
    assert "loss 7.5" in capfd.readouterr().err.splitlines()[0]


def test_a_loss_that_the_module_logs_is_shown_instead(shown, line_class):
    class Own(line_class):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", 1.0 + batch_idx, on_step=True, on_epoch=True, prog_bar=True)
            return loss

    first, last = shown(Own(), max_epochs=1)
    assert first.endswith(", train_loss 3.5")  # of the epoch, and in one column
    assert last.endswith(": train_loss 3.5")


def test_the_best_value_is_marked_and_the_last_line_says_where_things_are(
    quiet_trainer, line_class, loader, capfd, tmp_path
):
    class Getting(line_class):
        def validation_step(self, batch, batch_idx):
            self.log("val", [3.0, 1.0, 2.0][self.current_epoch], prog_bar=True)

    saves = ModelCheckpoint(tmp_path / "saved", monitor="val", filename="{epoch}")
    quiet_trainer(enable_progress_bar=True, max_epochs=3, callbacks=saves, logger=True, default_root_dir=tmp_path).fit(
        Getting(), loader(), loader()
    )
    *epochs, last = capfd.readouterr().err.splitlines()
    assert [line.rpartition(", ")[2] for line in epochs] == ["val 3 (best)", "val 1 (best)", "val 2"]
    assert last.endswith(
        f", val 2; checkpoint {tmp_path / 'saved' / 'epoch=1.ckpt'}/; logs {tmp_path / 'dstrat_logs' / 'version_0'}"
    )


def test_the_last_line_has_the_folder_of_the_first_logger_with_one(quiet_trainer, line, loader, capfd, tmp_path):
    class Printing(Logger):
        def log_metrics(self, metrics, step=None):
            pass

    loggers = [Printing(), CSVLogger(tmp_path, name="csv")]
    quiet_trainer(enable_progress_bar=True, max_epochs=1, logger=loggers).fit(line, loader())
    assert capfd.readouterr().err.splitlines()[-1].endswith(f"; logs {tmp_path / 'csv' / 'version_0'}")


def test_the_last_line_is_printed_where_the_working_directory_was_removed(
    quiet_trainer, line, loader, capfd, tmp_path, monkeypatch
):
    class Removing(Callback):
        def on_train_start(self, trainer, module):
            (tmp_path / "gone").rmdir()

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    trainer = quiet_trainer(
        enable_progress_bar=True, max_epochs=1, callbacks=[Removing(), ModelCheckpoint(tmp_path / "saved", "one")]
    )
    trainer.fit(line, loader())
    assert capfd.readouterr().err.splitlines()[-1].endswith(f"; checkpoint {tmp_path / 'saved' / 'one.ckpt'}/")


def test_what_manual_optimization_returns_as_a_loss_need_be_no_number(shown, line_class):
    class Manual(line_class):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(loss := super().training_step(batch, batch_idx))
            self.optimizers().step()
            return {"loss": {"parts": loss}} if batch_idx % 2 else {"loss": torch.ones(3)}

    first, _ = shown(Manual(), max_epochs=1, callbacks=ProgressBar(refresh_seconds=0))[-2:]
    assert "loss" not in first


def test_the_loss_of_a_batch_goes_when_the_module_logs_that_of_the_epoch(quiet_trainer, line_class, loader, capfd):
    class OfEpoch(line_class):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", 2.0, on_step=False, on_epoch=True, prog_bar=True)
            return loss

    bar = ProgressBar(refresh_seconds=0)
    quiet_trainer(enable_progress_bar=True, callbacks=bar, max_epochs=2).fit(OfEpoch(), loader())
    lines = capfd.readouterr().err.splitlines()
    assert ", loss " in lines[3]
    assert lines[-1].endswith(": train_loss 2")
    assert not any(", loss " in line for line in lines[-6:])


def test_an_evaluation_after_a_failed_fit_shows_no_loss_of_it(quiet_trainer, line_class, loader, capfd):
    class Failing(line_class):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(enable_progress_bar=True)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Failing(), loader())
    trainer.validate(line_class(), loader(), verbose=False)
    assert "loss" not in capfd.readouterr().err.splitlines()[-1].replace("val_loss", "")


@pytest.mark.parametrize("columns", [80, 400])
def test_a_terminal_does_not_cut_the_paths_of_the_closing_line(
    quiet_trainer, line, loader, terminal, monkeypatch, tmp_path, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    with terminal() as screen:
        trainer = quiet_trainer(enable_progress_bar=True, enable_checkpointing=True, max_epochs=1, logger=True)
        trainer.fit(line, loader())
    shown = "\n".join(screen.lines)
    separator = "\n" if columns == 80 else "; "
    path = "dstrat_logs/version_0/checkpoints/epoch=0-step=6.ckpt/"
    assert re.search(
        f"trained 1 epoch.*{separator}checkpoint {path}{separator}logs dstrat_logs/version_0$", shown.strip()
    )


def test_a_subclass_may_set_the_trainer_by_itself(shown, line):
    class Own(ProgressBar):
        def setup(self, trainer, module, stage):
            self.trainer = trainer

    assert shown(line, callbacks=Own(), max_epochs=1)[-1].startswith("trained 1 epoch")
