"""The suite for precisions."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from dstrat.plugins.catalog import get_catalog
from dstrat.testing.plugin import check_light, check_record
from dstrat.testing.suite import Suite, fail, standard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dstrat.interfaces.precision import Precision


class PrecisionSuite(Suite):
    """Standard tests of a precision, on the CPU."""

    kind = "precision"

    @standard("basic", "record")
    def test_its_plugin_is_light_to_import(self) -> None:
        check_light(self.offer)

    @standard("basic", "record")
    def test_its_record_is_complete_and_true(self) -> None:
        check_record(self.offer)

    @standard("basic", "dtypes")
    def test_its_flag_is_its_alias(self) -> None:
        flag = self._precision.flag
        if flag != self.alias:
            fail(f"flag is {flag!r}, and users write precision={self.alias!r}: the two must be the same")

    @standard("basic", "dtypes")
    def test_it_says_its_dtypes(self) -> None:
        import torch

        precision = self._precision
        for name in ("param_dtype", "compute_dtype", "reduce_dtype"):
            value = getattr(precision, name)
            if not isinstance(value, torch.dtype):
                fail(f"{name} is {value!r}, not a torch.dtype")

    @standard("basic", "dtypes")
    def test_the_module_has_the_dtype_that_it_says(self) -> None:
        precision = self._precision
        module = precision.connect(_module())
        dtypes = {parameter.dtype for parameter in module.parameters()}
        if dtypes != {precision.param_dtype}:
            fail(f"after connect the parameters are {dtypes}, and param_dtype is {precision.param_dtype}")

    @standard("basic", "dtypes")
    def test_contexts_leave_the_default_dtype_as_it_was(self) -> None:
        import torch

        precision, before = self._precision, torch.get_default_dtype()
        precision.connect(_module())
        for context in (precision.tensor_init_context, precision.forward_context):
            for _ in range(2):  # the second time could see what the first one left
                with context():
                    torch.zeros(1)
        if torch.get_default_dtype() != before:
            fail(f"after its contexts the default dtype is {torch.get_default_dtype()}, and it was {before}")

    @standard("basic", "dtypes")
    def test_it_converts_floats_of_a_batch_and_nothing_else(self) -> None:
        import torch

        batch = {"x": torch.ones(2), "y": [torch.tensor([1, 2]), "text", None], "z": torch.tensor([True])}
        converted = self._precision.convert_input(batch)
        if converted["y"][0].dtype != torch.int64 or converted["z"].dtype != torch.bool:
            fail("convert_input changed tensors of integers or booleans: they are indices, labels and masks")
        if converted["y"][1:] != ["text", None]:
            fail(f"convert_input changed what is no tensor: {converted['y'][1:]!r}")
        if batch["x"].dtype != torch.float32:  # type: ignore[attr-defined]  # a dict of mixed values
            fail("convert_input changed the batch that it was given: return another one")

    @standard("basic", "steps")
    def test_gradients_are_true_after_unscaling(self) -> None:
        precision = self._precision
        module, optimizer = self._ready(precision)
        expected = copy.deepcopy(module)  # its gradients are computed without a scaled loss
        self._loss(precision, expected).backward()
        precision.backward(self._loss(precision, module))
        precision.unscale_gradients(optimizer)
        for one, other in zip(expected.parameters(), module.parameters(), strict=True):
            if one.grad is None or other.grad is None or not _close(one.grad, other.grad):
                fail(
                    "after backward and unscale_gradients the gradients are not those of the loss",
                    expected="what scale_loss multiplies is divided out again, before clipping looks at it.",
                )

    @standard("basic", "steps")
    def test_a_step_runs_the_closure_once_and_returns_its_value(self) -> None:
        precision = self._precision
        module, optimizer = self._ready(precision)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        calls: list[Any] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self._loss(precision, module)
            precision.backward(loss)
            precision.unscale_gradients(optimizer)
            calls.append(loss.detach())  # the identity of this tensor is compared
            return calls[-1]  # type: ignore[no-any-return]  # a tensor

        returned = precision.optimizer_step(optimizer, closure)
        if len(calls) != 1 or returned is not calls[0]:
            fail(f"optimizer_step ran the closure {len(calls)} times and returned {returned!r}, not what it returned")
        if all(one.equal(other) for one, other in zip(before, module.parameters(), strict=True)):
            fail("optimizer_step left every parameter as it was")

    @standard("basic", "steps")
    def test_it_clips_to_the_limit(self) -> None:
        precision = self._precision
        module, optimizer = self._ready(precision)
        precision.backward(self._loss(precision, module))
        precision.unscale_gradients(optimizer)
        precision.clip_gradients(optimizer, 0.01)
        norm = sum(float(p.grad.float().square().sum()) for p in module.parameters() if p.grad is not None) ** 0.5
        if norm > 0.0101:  # gradients of 16 bits are rounded
            fail(f"after clip_gradients to a norm of 0.01 the norm is {norm:.4f}")

    @standard("basic", "state")
    def test_its_state_comes_back(self) -> None:
        precision, other = self._precision, self._precision
        other.load_state_dict(precision.state_dict())
        if other.state_dict() != precision.state_dict():
            fail("load_state_dict(state_dict()) gives another state: the loss scale of a resumed run would be another")

    @property
    def _precision(self) -> Precision:
        precision: Precision = get_catalog().load(self.offer)(**{**self.component.options, **self.options})
        return precision

    def _ready(self, precision: Precision) -> tuple[nn.Module, Any]:
        import torch

        module = precision.connect(_module())
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    def _loss(self, precision: Precision, module: nn.Module) -> Tensor:
        import torch

        inputs = precision.convert_input(torch.linspace(-1, 1, 24).reshape(4, 6))
        with precision.forward_context():
            loss: Tensor = module(inputs).float().square().mean()
        return loss


def _module() -> nn.Module:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def _close(one: Tensor, other: Tensor) -> bool:
    # 2 %: bfloat16 rounds to 0.4 %, and the gradients passed through two layers.
    return bool((one.float() - other.float()).abs().max() <= 0.02 * one.float().abs().max() + 1e-6)
