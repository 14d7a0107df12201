"""When ranks leave their group for a larger one with new processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstrat.training.loops import fit_loop


@pytest.mark.parametrize(
    ("batches", "accumulate", "expected"),
    [(6, 1, [0, 1, 2, 3, 4] * 2), (6, 2, [1, 3] * 2), (1, 1, [0, 0]), (2, 2, [1, 1])],
    ids=["in an epoch", "after whole steps", "an epoch of one batch", "an epoch of one step"],
)
def test_ranks_leave_between_steps_and_not_at_the_end_of_an_epoch(
    quiet_trainer, line, loader, monkeypatch, batches, accumulate, expected
):
    left = []
    monkeypatch.setattr(fit_loop, "newcomers_wait", lambda _run: True)
    monkeypatch.setattr(fit_loop, "admit_newcomers", lambda run: left.append(run.fit_loop.batch_idx))
    trainer = quiet_trainer(max_epochs=2, accumulate_grad_batches=accumulate, limit_train_batches=batches)
    trainer.plan = replace(trainer.plan, elastic="replace")  # which the Trainer allows with several processes only
    trainer.fit(line, loader())
    assert left == expected
