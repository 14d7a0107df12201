from __future__ import annotations

import pytest
import torch

from dstrat.errors import RankFailedError


@pytest.fixture
def fit(quiet_trainer, make_line, loader, averaging, recorder):
    """Trains with what a module logs in its training step, and returns the trainer."""

    def run(log, *, devices, batch_size=4, **options):
        class Logging(type(make_line())):
            def training_step(self, batch, batch_idx):
                log(self, batch, batch_idx)
                return self.loss(batch)

        strategy = averaging() if devices > 1 else "single_device"
        settings = {"log_every_n_steps": 1, "max_epochs": 1} | options
        trainer = quiet_trainer(strategy=strategy, devices=devices, logger=recorder, **settings)
        trainer.fit(make_line(Logging), loader(batch_size))
        return trainer

    return run


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 0.5), ("sum", 1.0), ("max", 1.0), ("min", 0.0)])
def test_sync_dist_reduces_it_over_all_processes(fit, recorder, reduce_fx, expected):
    def log(module, batch, batch_idx):
        value = float(module.global_rank)
        module.log("number", value, sync_dist=True, reduce_fx=reduce_fx)
        module.log("tensor", torch.tensor(value), sync_dist=True, reduce_fx=reduce_fx)

    trainer = fit(log, devices=2)
    assert [{**row, "epoch": 0} for _, row in recorder.rows] == [
        {"epoch": 0, "number": expected, "tensor": expected}
    ] * 6
    assert trainer.callback_metrics == {"number": expected, "tensor": expected}


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_mean_of_a_step_is_weighted_too(fit, recorder, devices):
    def log(module, batch, batch_idx):
        module.log("rank", float(module.global_rank), sync_dist=True, batch_size=1 + module.global_rank)

    fit(log, devices=devices)
    ranks = range(devices)
    assert recorder.rows[0][1]["rank"] == pytest.approx(sum(r * (1 + r) for r in ranks) / sum(1 + r for r in ranks))


def test_callbacks_of_all_processes_see_the_same_value_and_only_a_reduced_one(fit, tmp_path):
    def log(module, batch, batch_idx):
        with (tmp_path / f"rank_{module.global_rank}").open("a") as file:
            print(module.trainer.callback_metrics.get("rank"), file=file)
        module.log("rank", float(module.global_rank + batch_idx), sync_dist=True)

    fit(log, devices=2, log_every_n_steps=2)
    seen = [(tmp_path / f"rank_{rank}").read_text().splitlines() for rank in (0, 1)]
    assert seen[0] == seen[1]
    assert [line.split(",")[0] for line in seen[0]] == ["None"] * 2 + ["tensor(1.5000"] * 2 + ["tensor(3.5000"] * 2


def test_without_loggers_it_is_reduced_too(fit, quiet_trainer, make_line, loader, averaging):
    class Logging(type(make_line())):
        def training_step(self, batch, batch_idx):
            self.log("rank", float(self.global_rank), sync_dist=True)
            return self.loss(batch)

    trainer = quiet_trainer(strategy=averaging(), devices=2, log_every_n_steps=100)
    trainer.fit(make_line(Logging), loader(4))
    assert trainer.callback_metrics == {"rank": 0.5}


def test_a_value_is_written_once(fit, recorder):
    def log(module, batch, batch_idx):
        if batch_idx % 3 == 0:
            module.log("sometimes", float(batch_idx))
        module.log("always", 1.0, sync_dist=True)

    fit(log, devices=2, log_every_n_steps=2)
    assert [(step, row.get("sometimes")) for step, row in recorder.rows] == [(2, 0.0), (4, 3.0), (6, None)]


def test_a_hundred_values_are_reduced_each_to_its_own(fit, recorder):
    def log(module, batch, batch_idx):
        for index in range(100):
            module.log(f"value_{index}", float(index + module.global_rank), sync_dist=True, on_epoch=True)

    fit(log, devices=2)
    assert {n: v for n, v in recorder.rows[0][1].items() if n != "epoch"} == {
        f"value_{index}_step": index + 0.5 for index in range(100)
    }
    assert {n: v for n, v in recorder.rows[-1][1].items() if n != "epoch"} == {
        f"value_{index}_epoch": index + 0.5 for index in range(100)
    }


def only_rank_0(module, batch, batch_idx):
    if module.global_rank == 0:
        module.log("mine", 1.0, sync_dist=True)


def own_names(module, batch, batch_idx):
    module.log(f"of_{module.global_rank}", 1.0, sync_dist=True)


def own_reductions(module, batch, batch_idx):
    module.log("x", 1.0, sync_dist=True, reduce_fx=["max", "min"][module.global_rank])


def own_number(module, batch, batch_idx):
    for index in range(70 if module.global_rank == 0 else 3):
        module.log(f"x{index:02}", 1.0, sync_dist=True)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (only_rank_0, "rank 0 logged 'mine' and rank 1 did not"),
        (own_names, "rank 0 logged 'of_0' and rank 1 did not"),
        (own_reductions, "rank 0 logged 'x' and rank 1 did so with another reduce_fx"),
        (own_number, "rank 0 logged 'x03', 'x04', .* and rank 1 did not"),
    ],
)
def test_different_names_are_an_error_that_names_ranks_and_names(fit, log, message):
    with pytest.raises(RankFailedError, match=message):
        fit(log, devices=2)


def test_what_rank_0_alone_logs_is_kept_there_where_that_is_said(fit, recorder, tmp_path):
    def log(module, batch, batch_idx):
        module.log("mine", float(10 + module.global_rank), rank_zero_only=True, on_epoch=True)
        (tmp_path / f"rank_{module.global_rank}").write_text(" ".join(module.trainer.callback_metrics))

    fit(log, devices=2)
    assert recorder.rows[-1][1] == {"epoch": 0, "mine_epoch": 10.0}
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == ["mine_step", ""]


def test_a_group_of_processes_reduces_its_own(fit, recorder, averaging):
    def log(module, batch, batch_idx):
        if batch_idx == 0:
            groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
            module.group = groups[module.global_rank // 2]
        module.log("rank", float(module.global_rank), sync_dist=True, sync_dist_group=module.group, on_epoch=True)
        module.log("all", float(module.global_rank), sync_dist=True)

    fit(log, devices=4)
    assert recorder.rows[0][1] == {"epoch": 0, "rank_step": 0.5, "all": 1.5}
    assert recorder.rows[-1][1] == {"epoch": 0, "rank_epoch": 0.5}
