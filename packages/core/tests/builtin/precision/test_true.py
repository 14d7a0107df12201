"""One dtype throughout."""

import pytest
import torch
from torch import nn

from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import RequestError

DTYPES = {"64-true": torch.float64, "32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
CONVERTING = {flag: dtype for flag, dtype in DTYPES.items() if flag != "32-true"}


class Recorder(nn.Module):
    """A tiny regression that notes the dtypes that it meets."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
        self.seen = []

    def forward(self, batch):
        output = self.layer(batch["x"])
        self.seen += [batch["x"].dtype, output.dtype, torch.zeros(1).dtype]
        return (output - batch["y"]).square().mean()


def train(precision, *, steps=5, device="cpu"):
    with precision.tensor_init_context():
        module = Recorder()
    module = precision.connect(module).to(device)
    nn.init.constant_(module.layer.weight, 0.3)  # random values depend on the dtype that they are drawn in
    nn.init.zeros_(module.layer.bias)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 4, generator=data), "y": torch.ones(8, 1), "label": torch.zeros(8, dtype=torch.int64)}
    batch = {name: tensor.to(device) for name, tensor in precision.convert_input(batch).items()}
    losses = []

    def closure():
        optimizer.zero_grad()
        with precision.forward_context():
            loss = module(batch)
        precision.backward(loss)
        precision.unscale_gradients(optimizer)
        precision.clip_gradients(optimizer, 10.0)
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        assert precision.optimizer_step(optimizer, closure) is not None
    return module, losses


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("flag", DTYPES)
def test_training_runs_in_one_dtype_and_the_loss_falls(flag, device):
    precision = TruePrecision(flag)
    module, losses = train(precision, device=device)
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in module.parameters()} == {DTYPES[flag]}
    assert {parameter.grad.dtype for parameter in module.parameters()} == {DTYPES[flag]}
    assert set(module.seen) == {DTYPES[flag]}
    assert {precision.param_dtype, precision.compute_dtype, precision.reduce_dtype} == {DTYPES[flag]}


@pytest.mark.parametrize(("flag", "dtype"), DTYPES.items())
def test_modules_can_be_created_in_the_dtype_at_once(flag, dtype):
    with TruePrecision(flag).tensor_init_context():
        assert nn.Linear(2, 2).weight.dtype == dtype
    assert nn.Linear(2, 2).weight.dtype == torch.float32


@pytest.mark.parametrize(("flag", "dtype"), CONVERTING.items())
def test_only_floating_point_tensors_are_converted(flag, dtype):
    precision = TruePrecision(flag)
    module = precision.connect(Recorder())
    assert (module.count.dtype, module.phase.dtype) == (torch.int64, torch.complex64)
    batch = precision.convert_input({"x": torch.ones(1), "labels": [torch.ones(1, dtype=torch.int64)], "name": "a"})
    assert (batch["x"].dtype, batch["labels"][0].dtype, batch["name"]) == (dtype, torch.int64, "a")


def test_32_true_leaves_everything_as_it_is():
    precision = TruePrecision()
    module = precision.connect(nn.Linear(2, 2, dtype=torch.float64))
    batch = torch.ones(1, dtype=torch.float16)
    assert precision.flag == "32-true"
    assert module.weight.dtype == torch.float64
    assert precision.convert_input(batch) is batch


@pytest.mark.parametrize("flag", CONVERTING)
@pytest.mark.parametrize("context", ["tensor_init_context", "forward_context"])
def test_the_default_dtype_comes_back_after_an_exception(flag, context):
    precision = TruePrecision(flag)
    with pytest.raises(LookupError, match=str(DTYPES[flag])), getattr(precision, context)():
        raise LookupError(torch.get_default_dtype())
    assert torch.get_default_dtype() == torch.float32


def test_the_default_dtype_comes_back_to_what_the_user_had_set():
    torch.set_default_dtype(torch.float64)
    try:
        with TruePrecision("bf16-true").forward_context():
            assert torch.ones(1).dtype == torch.bfloat16
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_float64_is_more_exact_than_float32():
    exact, single = (train(TruePrecision(flag))[1][-1] for flag in ("64-true", "32-true"))
    assert exact != single
    assert exact == pytest.approx(single, rel=1e-5)


def test_there_is_nothing_to_put_into_a_checkpoint():
    assert TruePrecision("16-true").state_dict() == {}


def test_another_flag_is_refused_with_those_that_are_possible():
    with pytest.raises(RequestError, match=r"'16-mixed'.*choose one of 64-true, 32-true, bf16-true, 16-true"):
        TruePrecision("16-mixed")
