from __future__ import annotations

import pytest

from dstrat import Callback, LambdaCallback
from dstrat.errors import RequestError
from dstrat.training.callbacks.lambda_callback import HOOKS


def test_functions_are_called_in_their_hooks(fit):
    seen = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(stage),
        on_train_epoch_end=lambda trainer, module: seen.append((trainer.current_epoch, type(module).__name__)),
        on_train_batch_end=None,
    )
    fit(callback, max_epochs=2)
    assert seen == ["fit", (0, "Scripted"), (1, "Scripted")]


def test_each_hook_of_a_callback_can_be_given():
    assert set(HOOKS) == {name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")}
    given = dict.fromkeys(HOOKS, lambda *_: None)
    callback = LambdaCallback(**given)
    assert all(getattr(callback, name) is function for name, function in given.items())


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("on_train_epoch_ends", r"no hook 'on_train_epoch_ends': did you mean on_train_epoch_end\?"),
        ("on_epoch_end", r"no hook 'on_epoch_end': did you mean .*on_train_epoch_end"),
        ("q", r"no hook 'q': choose from setup, teardown, "),
        ("state_dict", r"no hook 'state_dict'"),
    ],
)
def test_an_unknown_hook_is_an_error_that_names_the_near_ones(hook, message):
    with pytest.raises(RequestError, match=message):
        LambdaCallback(**{hook: print})


def test_what_is_no_function_is_refused():
    with pytest.raises(RequestError, match=r"on_fit_start='print' of LambdaCallback is not a function"):
        LambdaCallback(on_fit_start="print")
