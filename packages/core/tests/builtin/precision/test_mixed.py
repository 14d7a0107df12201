"""Computing in 16 bits with parameters in 32."""

import logging
import pickle

import pytest
import torch
from tests.sharpness import Sam
from torch import nn

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.errors import ConflictError, MisuseError, RequestError

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def scaling(init_scale=1024.0, device="cpu", **kwargs):
    """16-mixed with a scale that these losses do not overflow."""
    return MixedPrecision("16-mixed", scaler=torch.amp.GradScaler(device, init_scale=init_scale, **kwargs))


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen = {}

    def forward(self, x, y):
        output = self.layer(x)
        self.seen = {"input": x.dtype, "product": output.dtype, "loss": nn.functional.mse_loss(output, y).dtype}
        return nn.functional.mse_loss(output, y)


class Training:
    """A loop as somebody would write it by hand."""

    def __init__(self, precision, *, device="cpu", optimizer=torch.optim.SGD, lr=0.05):
        torch.manual_seed(0)
        self.precision = precision
        self.module = precision.connect(Recorder()).to(device)
        self.optimizer = optimizer(self.module.parameters(), lr=lr)
        self.x, self.y = torch.randn(8, 4, device=device), torch.ones(8, 1, device=device)

    def backward(self, factor=1.0):
        with self.precision.forward_context():
            loss = self.module(self.x, self.y)
        self.precision.backward(loss * factor)
        return loss

    def step(self, factor=1.0):
        def closure():
            self.optimizer.zero_grad()
            return self.backward(factor)

        return self.precision.optimizer_step(self.optimizer, closure).item()

    @property
    def weight(self):
        return self.module.layer.weight.detach().clone()

    @property
    def grad(self):
        return self.module.layer.weight.grad.clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flag", DTYPES)
def test_products_are_in_16_bits_and_parameters_in_32(flag, device):
    precision = MixedPrecision(flag)
    training = Training(precision, device=device)
    losses = [training.step() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert training.module.seen == {"input": torch.float32, "product": DTYPES[flag], "loss": torch.float32}
    assert training.weight.dtype == training.grad.dtype == torch.float32
    assert precision.compute_dtype == DTYPES[flag]
    assert precision.param_dtype == precision.reduce_dtype == torch.float32


@pytest.mark.parametrize("flag", DTYPES)
def test_autocast_ends_with_the_context_also_after_an_exception(flag):
    precision = MixedPrecision(flag)
    precision.connect(Recorder())
    with pytest.raises(LookupError, match=f"True {DTYPES[flag]}"), precision.forward_context():
        raise LookupError(f"{torch.is_autocast_enabled('cpu')} {torch.get_autocast_dtype('cpu')}")
    assert not torch.is_autocast_enabled("cpu")


def test_contexts_may_be_nested():
    precision = MixedPrecision()
    precision.connect(Recorder())
    with precision.forward_context():
        with precision.forward_context():
            pass
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_the_device_may_be_given_where_there_is_no_module():
    with MixedPrecision("bf16-mixed", device="cpu").forward_context():
        assert torch.is_autocast_enabled("cpu")
    with pytest.raises(MisuseError, match="'bf16-mixed' has no device yet: connect a module"):
        MixedPrecision("bf16-mixed").forward_context()


def test_a_module_without_parameters_runs():
    precision = MixedPrecision()
    precision.connect(nn.ReLU())
    with precision.forward_context():
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("flag", DTYPES)
def test_losses_stay_near_those_of_float32(flag):
    torch.manual_seed(0)
    reference = Training(MixedPrecision(flag))
    with torch.autocast("cpu", enabled=False):
        exact = nn.functional.mse_loss(reference.module.layer(reference.x), reference.y).item()
    assert reference.step() == pytest.approx(exact, rel=0.02)


def test_16_mixed_scales_the_loss_and_undoes_it_before_anyone_looks():
    precision = scaling()
    scaled, plain = Training(precision), Training(MixedPrecision("bf16-mixed"))
    scaled.backward()
    plain.backward()
    assert torch.allclose(scaled.grad, 1024 * plain.grad, rtol=0.05)
    precision.unscale_gradients(scaled.optimizer)
    precision.unscale_gradients(scaled.optimizer)
    assert torch.allclose(scaled.grad, plain.grad, rtol=0.05)


def test_gradients_too_small_for_float16_survive():
    scaled = Training(MixedPrecision("16-mixed"))
    scaled.backward(factor=1e-8)
    scaled.precision.unscale_gradients(scaled.optimizer)
    assert scaled.grad.abs().max() > 0
    lost = Training(scaling(init_scale=1.0))
    lost.backward(factor=1e-8)
    assert lost.grad.abs().max() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_is_not_finite_is_skipped_and_logged_and_the_scale_falls(device, caplog):
    training = Training(scaling(device=device), device=device)
    before = training.weight
    training.step(factor=float("inf"))
    assert torch.equal(training.weight, before)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "step skipped: a gradient is not finite at the loss scale" in caplog.text
    assert training.precision.state_dict()["scale"] == 512.0
    training.step()
    assert not torch.equal(training.weight, before)
    assert len(caplog.records) == 1


def test_clipping_sees_gradients_without_the_scale():
    training = Training(scaling(), lr=1.0)
    before = nn.utils.parameters_to_vector(training.module.parameters()).detach().clone()
    training.backward()
    training.precision.clip_gradients(training.optimizer, 1e-3)
    training.precision.optimizer_step(training.optimizer, lambda: torch.zeros(()))
    after = nn.utils.parameters_to_vector(training.module.parameters()).detach()
    assert (after - before).norm().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("algorithm", "size"), [("norm", torch.linalg.vector_norm), ("value", lambda g: g.abs().max())]
)
def test_gradients_are_clipped_by_norm_or_by_value(algorithm, size):
    training = Training(scaling())
    training.backward()
    training.precision.clip_gradients(training.optimizer, 1e-3, algorithm)
    gradients = nn.utils.parameters_to_vector(p.grad for p in training.module.parameters())
    assert size(gradients).item() == pytest.approx(1e-3, rel=1e-2)


def test_accumulated_gradients_share_one_scale():
    training, once = Training(scaling()), Training(scaling())
    for _ in range(4):
        training.backward(factor=0.25)
    training.precision.optimizer_step(training.optimizer, lambda: torch.zeros(()))
    once.step()
    assert torch.allclose(training.weight, once.weight, atol=1e-4)


def test_two_optimizers_undo_the_scale_that_their_gradients_have():
    precision = scaling()
    first, second, expected = Training(precision), Training(precision), Training(scaling())
    expected.step()
    first.backward(factor=float("inf"))
    second.backward()
    for training in first, second:  # the first is skipped, and the scale that falls must not reach the second
        precision.optimizer_step(training.optimizer, lambda: torch.zeros(()))
    assert torch.equal(second.weight, expected.weight)
    assert precision.state_dict()["scale"] == 512.0


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_after_a_step_that_was_left_out_have_no_scale(to_none):
    training, plain = Training(scaling()), Training(MixedPrecision("bf16-mixed"))
    for part in training, plain:
        part.backward()
        part.precision.unscale_gradients(part.optimizer)
        part.optimizer.zero_grad(set_to_none=to_none)
        part.backward()
        part.precision.unscale_gradients(part.optimizer)
    assert torch.allclose(training.grad, plain.grad, rtol=0.05)


def test_gradients_are_added_to_clipped_ones_with_the_same_scale():
    training = Training(scaling(), lr=1.0)
    before = training.weight
    for _ in range(2):
        training.backward()
        training.precision.clip_gradients(training.optimizer, 1e-3, "value")
    training.backward()
    summed = training.grad / 1024
    training.precision.optimizer_step(training.optimizer, lambda: torch.zeros(()))
    assert torch.allclose(before - training.weight, summed, rtol=1e-3)
    assert training.grad.abs().max() > 1e-3


def test_another_loss_before_the_step_changes_no_clipped_gradients():
    precision = scaling()
    first, second = Training(precision, lr=1.0), Training(precision)
    before = first.weight
    first.backward()
    precision.clip_gradients(first.optimizer, 1e-3, "value")
    clipped = first.grad
    second.backward()
    for training in second, first:
        precision.optimizer_step(training.optimizer, lambda: torch.zeros(()))
    assert torch.allclose(before - first.weight, clipped, rtol=1e-3)


def test_clipped_gradients_outlast_the_step_of_another_optimizer():
    precision = scaling()
    first, second = Training(precision, lr=1.0), Training(precision)
    before = first.weight
    first.backward()
    second.backward()
    precision.clip_gradients(first.optimizer, 1e-3, "value")
    clipped = first.grad
    precision.optimizer_step(second.optimizer, lambda: torch.zeros(()))
    second.step()
    precision.unscale_gradients(first.optimizer)
    assert torch.allclose(first.grad, clipped, rtol=1e-3)
    precision.optimizer_step(first.optimizer, lambda: torch.zeros(()))
    assert torch.allclose(before - first.weight, clipped, rtol=1e-3)


def test_a_clipped_overflow_is_skipped_after_another_loss():
    precision = scaling()
    first, second = Training(precision), Training(precision)
    before = first.weight
    first.backward(factor=float("inf"))
    precision.clip_gradients(first.optimizer, 1e-3, "value")
    second.backward()
    for training in first, second:
        precision.optimizer_step(training.optimizer, lambda: torch.zeros(()))
    assert torch.equal(first.weight, before)
    assert precision.state_dict()["scale"] == 512.0


def test_the_scale_goes_on_from_a_checkpoint():
    training = Training(scaling(growth_interval=2))
    training.step()
    state = training.precision.state_dict()
    resumed = MixedPrecision("16-mixed")
    assert resumed.state_dict() == {}
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    again = Training(resumed)
    again.step()
    training.step()
    assert again.precision.state_dict() == training.precision.state_dict()
    assert again.precision.state_dict()["scale"] == 2048.0


def test_a_scaler_of_the_users_own_is_used():
    precision = scaling(init_scale=8.0)
    Training(precision).backward()
    assert precision.state_dict()["scale"] == 8.0


def test_a_step_without_gradients_changes_nothing():
    training = Training(MixedPrecision("16-mixed"))
    before = training.weight
    assert training.precision.optimizer_step(training.optimizer, lambda: None) is None
    assert torch.equal(training.weight, before)


def test_gradients_of_a_loss_that_was_not_scaled_are_refused():
    training = Training(MixedPrecision("16-mixed"))
    training.module(training.x, training.y).backward()
    with pytest.raises(MisuseError, match="has not scaled: compute them with the strategy's backward"):
        training.precision.optimizer_step(training.optimizer, lambda: torch.zeros(()))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sam])
def test_several_losses_in_a_step_are_refused_with_a_loss_scale_and_run_without(kind):
    with pytest.raises(ConflictError, match=r"cannot scale the losses of (LBFGS|Sam).*choose 'bf16-mixed'"):
        Training(MixedPrecision("16-mixed"), optimizer=kind).step()
    training = Training(MixedPrecision("bf16-mixed"), optimizer=torch.optim.LBFGS)
    assert training.step() > training.step()


def test_bf16_mixed_needs_no_scale():
    assert MixedPrecision("bf16-mixed").state_dict() == {}
    with pytest.raises(
        ConflictError, match="scaler needs precision='16-mixed', not 'bf16-mixed', which scales no loss"
    ):
        MixedPrecision("bf16-mixed", scaler=torch.amp.GradScaler("cpu"))


def test_it_travels_to_another_process():
    precision = pickle.loads(pickle.dumps(MixedPrecision("16-mixed")))
    assert Training(precision).step() > 0


def test_teardown_lets_the_module_go():
    precision = MixedPrecision()
    precision.connect(Recorder())
    precision.teardown()
    with pytest.raises(MisuseError):
        precision.forward_context()


def test_another_flag_is_refused_with_those_that_are_possible():
    with pytest.raises(RequestError, match=r"'8-mixed'.*choose bf16-mixed or 16-mixed"):
        MixedPrecision("8-mixed")
