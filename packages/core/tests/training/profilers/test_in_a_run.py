from __future__ import annotations

import pytest

from dstrat import AdvancedProfiler, CSVLogger, SimpleProfiler, TorchProfiler
from dstrat.errors import RequestError


def actions(lines):
    return {line.split()[0]: line.split()[1:] for line in lines}


def test_a_fit_prints_a_table_of_what_the_loops_called(quiet_trainer, line, loader, capsys):
    quiet_trainer(profiler="simple", max_epochs=1).fit(line, loader(), loader(16))
    title, _, _, *lines = capsys.readouterr().err.splitlines()
    assert title.startswith("Profile of fit on rank 0: ")
    table = actions(lines)
    assert {table[name][0] for name in ("training_step", "backward", "optimizer_step")} == {"6"}
    assert table["setup"][0] == "1"
    assert table["validation_step"][0] == str(2 + 3)  # the sanity check, and validation
    assert float(table["optimizer_step"][2]) >= float(table["training_step"][2])
    assert int(table["next_batch"][0]) >= 6 + 2 + 3


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_each_stage_has_its_own_table(quiet_trainer, line, loader, capsys, stage):
    trainer = quiet_trainer(profiler="simple")
    for _ in range(2):
        getattr(trainer, stage)(line, loader())
        title, _, _, *lines = capsys.readouterr().err.splitlines()
        assert title.startswith(f"Profile of {stage} on rank 0: ")
        assert actions(lines)[f"{'validation' if stage == 'validate' else stage}_step"][0] == "6"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_batches_of_an_evaluation_are_traced(quiet_trainer, line, loader, tmp_path, stage):
    profiler = TorchProfiler(wait=1, warmup=1, active=2, row_limit=0, dirpath=tmp_path / "traces")
    getattr(quiet_trainer(profiler=profiler), stage)(line, loader())
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [f"{stage}-rank0-batch4.pt.trace.json"]


def test_in_a_fit_batches_of_training_are_traced_alone(quiet_trainer, line, loader, tmp_path):
    profiler = TorchProfiler(wait=1, warmup=1, active=2, row_limit=0, repeat=0, dirpath=tmp_path / "traces")
    quiet_trainer(profiler=profiler, max_epochs=1).fit(line, loader(), loader())
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == ["fit-rank0-batch4.pt.trace.json"]


def test_a_run_that_breaks_has_a_table_too(quiet_trainer, line_class, loader, capsys):
    class Failing(line_class):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="broken"):
        quiet_trainer(profiler="simple").fit(Failing(), loader())
    assert actions(capsys.readouterr().err.splitlines()[3:])["training_step"][0] == "3"


def test_every_rank_writes_into_the_runs_folder_and_rank_0_prints(
    quiet_trainer, line, loader, averaging, tmp_path, capfd
):
    for profiler, names in (
        (SimpleProfiler(filename="times"), ["fit-times-rank0.txt", "fit-times-rank1.txt"]),
        (TorchProfiler(wait=0, active=2, row_limit=5), [f"fit-rank{rank}-batch3.pt.trace.json" for rank in (0, 1)]),
    ):
        logger = CSVLogger(tmp_path, name="", version=type(profiler).__name__)
        quiet_trainer(profiler=profiler, logger=logger, devices=2, strategy=averaging(), max_epochs=1).fit(
            line, loader()
        )
        written = (tmp_path / type(profiler).__name__).glob("fit-*")
        assert sorted(path.name for path in written) == names
    printed = capfd.readouterr().err
    assert printed.count("Profile of fit on rank 0") == printed.count("trace: ") == 1
    assert "rank 1" not in printed


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SimpleProfiler, {"filename": "times"}),
        (AdvancedProfiler, {"filename": "times"}),
        (AdvancedProfiler, {"dump_stats": True}),
        (TorchProfiler, {}),
    ],
)
def test_a_folder_that_cannot_be_made_is_an_error_before_training(quiet_trainer, line, loader, tmp_path, kind, options):
    (tmp_path / "file").write_text("")
    trainer = quiet_trainer(profiler=kind(dirpath=tmp_path / "file" / "profiles", **options), max_epochs=1)
    with pytest.raises(RequestError, match="file' is not a folder: pass it another dirpath"):
        trainer.fit(line, loader())
    assert trainer.global_step == 0
