"""Divided sequences: attention by itself, layers that compute again, predictions, and what does not fit.

Losses of the layouts are in test_layout_conformance.py.
"""

from contextlib import nullcontext
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from packages.mesh.tests import context_fits
from packages.mesh.tests.context_fits import Net, data, fit
from tests.accelerators import ACCELERATOR
from tests.hand_loop import Run, parts
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import dstrat
from dstrat import OwnLoop
from dstrat.errors import DstratError, MisuseError, RequestError
from dstrat_mesh import MeshStrategy
from dstrat_mesh.sequences import Sequences


def trained(cluster, path=None, ckpt=None, accumulate=1, max_steps=context_fits.STEPS, **options):
    shares = MeshStrategy(**options)._axes_of(cluster.world_size)
    batch_size = 8 // (shares.dp_replicate * shares.dp_shard)
    module = fit(
        MeshStrategy(**options),
        cluster.world_size,
        batch_size,
        path=path,
        ckpt=ckpt,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        plugins=[cluster],
    )
    return module.losses, module.validated


def one_device(**options):
    module = fit("single_device", 1, 8, **options)
    return module.losses, module.validated


def test_accumulated_batches_of_layers_that_compute_again_are_those_of_one_device():
    losses, _ = one_device(accumulate_grad_batches=2, max_steps=4)
    options = {"accumulate": 2, "max_steps": 4, "cp": 2, "activation_checkpointing": context_fits.Attention}
    cases = {method: {"context_parallel": method, **options} for method in ("ulysses", "ring")}
    for found in in_ranks(each, function=trained, cases=cases):
        for values, _ in found.values():
            assert values == pytest.approx(losses, rel=1e-6)


class Joined(Net):
    def join_sequences(self, outputs, join):
        return join(outputs)


def predicted(cluster, **options):
    trainer = quiet_trainer(MeshStrategy(**options), cluster)
    return torch.cat(trainer.predict(Joined(), DataLoader(data(10), batch_size=2)))


def test_predictions_are_those_of_whole_sequences():
    expected = torch.cat(quiet_trainer("single_device").predict(Net(), DataLoader(data(10), batch_size=2)))
    cases = {"ulysses": {"cp": 2}, "ring": {"cp": 2, "context_parallel": "ring"}, "stages": {"cp": 2, "pp": 2}}
    for found in in_ranks(each, 4, function=predicted, cases=cases):
        for values in found.values():
            torch.testing.assert_close(values, expected)


class Pooled(Net):
    """Predicts classes of whole sequences, as many as tokens of a part, beside the tokens' means and a name."""

    def predict_step(self, batch, batch_idx):
        tokens = self.net(self.inputs(batch))
        return {"classes": torch.ones(len(tokens), tokens.shape[1]), "means": tokens.mean(-1), "name": "pooled"}

    def join_sequences(self, outputs, join):
        return {**outputs, "means": join(outputs["means"])}


def shapes(cluster, module_class):
    trainer = quiet_trainer(MeshStrategy(cp=2), cluster)
    try:
        (outputs,) = trainer.predict(globals()[module_class](), DataLoader(data(2), batch_size=2))
    except MisuseError as error:
        return str(error)
    return {name: getattr(value, "shape", value) for name, value in outputs.items()}


def test_a_module_says_which_of_its_predictions_are_parts():
    length = context_fits.LENGTH
    cases = {name: {"module_class": name} for name in ("Pooled", "Net")}
    for found in in_ranks(each, function=shapes, cases=cases):
        assert found["Pooled"] == {"classes": (2, length // 2), "means": (2, length), "name": "pooled"}
        assert found["Net"] == (
            "predict_step of Net returned tensors, of which a rank of cp has those of its part of the sequences "
            "or whole ones: define join_sequences(self, outputs, join), which returns the outputs with join(tensor) "
            "for each tensor with a part for each token"
        )


# Attention by itself


def documents(length):
    """Return the mask of two documents in each sequence, which begin at other tokens."""
    numbers = (torch.arange(length) >= torch.tensor([[3], [9]])).int()
    return (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()


def bias(length):
    return torch.randn(4, length, length, generator=torch.Generator().manual_seed(2))


ATTENTION = {
    "documents": {"mask": documents(16)},
    "a bias of each head": {"mask": bias(16)},
    "padding": {"mask": torch.arange(16).expand(2, 1, 1, 16) < torch.tensor([12, 16]).reshape(2, 1, 1, 1)},
    "shared keys": {"is_causal": True, "key_heads": 2, "scale": 0.3},
    "all tokens, around": {"method": "ring"},
    "shared keys, around": {"method": "ring", "is_causal": True, "key_heads": 2, "scale": 0.3},
    "double precision, around": {"method": "ring", "is_causal": True, "dtype": torch.float64},
    "blocks, around": {"method": "ring", "is_causal": True, "length": 4200, "heads": 1, "key_heads": 1},
}


def differences(cluster):
    """Return the largest differences of outputs and gradients from those of one device, by case.

    They are relative to the largest element, as sums over thousands of tokens round by more than those over a few.
    """
    strategy = MeshStrategy()
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    found = {name: difference(strategy.root_device, **case) for name, case in ATTENTION.items()}
    strategy.teardown()
    return found


def difference(device, method="ulysses", heads=4, key_heads=4, length=16, mask=None, dtype=torch.float32, **options):
    generator, group = torch.Generator().manual_seed(0), dist.group.WORLD
    counts = heads, key_heads, key_heads, heads
    whole = [torch.randn(2, number, length, 8, generator=generator, dtype=dtype).to(device) for number in counts]
    mask = None if mask is None else mask.to(device)
    sequences = Sequences(nn.Module(), group, method)
    options["enable_gqa"] = heads != key_heads
    learned = [mask] if mask is not None and mask.is_floating_point() else []

    def compute(query, key, value, weights):
        tensors = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        tensors += [tensor.to(query.dtype, copy=True).requires_grad_() for tensor in learned]
        output = functional.scaled_dot_product_attention(*tensors[:3], tensors[3] if learned else mask, **options)
        (output * weights).sum().backward()
        return [output.detach(), *(tensor.grad for tensor in tensors)]

    # In double precision, as torch's kernel for whole sequences rounds differently on each processor.
    expected = compute(*(tensor.double() for tensor in whole))
    with sequences.attention.replacing():
        found = compute(*(sequences.cut(tensor, 2) for tensor in whole))
    if learned:  # each rank has those of its heads
        dist.all_reduce(found[4])
    cut = [*(sequences.cut(tensor, 2) for tensor in expected[:4]), *expected[4:]]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, cut, strict=True))


def test_attention_is_that_of_whole_sequences():
    for found in in_ranks(differences):
        for name, largest in found.items():
            assert largest == pytest.approx(0, abs=1e-14 if "double" in name else 3e-6), name


# Loops of one's own


def looped(cluster, **options):
    loop = OwnLoop(
        dstrat.build(strategy=MeshStrategy(**options), accelerator=ACCELERATOR, devices=2, plugins=[cluster])
    )
    return loop.launch(loop_losses)


def loop_losses(loop):
    net, losses = Net(), []
    loop.setup(net, Net.configure_optimizers)

    def compute(*batch):
        return (
            functional.cross_entropy(net.net(net.inputs(batch)).flatten(0, 1), batch[2].flatten(), reduction="sum") / 8
        )

    for batch in loop.training_loader(DataLoader(data(), batch_size=8)):
        loss = loop.compute(compute, *batch)
        loop.backward(loss)
        loop.step()
        losses.append(float(loop.strategy.reduce(loss.detach(), reduce_op="mean")))
    return losses


def test_a_loop_of_ones_own_cuts_the_arguments_of_its_function():
    expected = OwnLoop(dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1)).launch(loop_losses)
    for found in in_ranks(each, function=looped, cases={"ring": {"cp": 2, "context_parallel": "ring"}}):
        assert found["ring"] == pytest.approx([loss / 2 for loss in expected], rel=1e-6)


def wrongly_called(cluster, arguments, evaluates=False, **options):
    strategy = MeshStrategy(**options)
    loop = OwnLoop(dstrat.build(strategy=strategy, accelerator=ACCELERATOR, devices=2, plugins=[cluster]))
    return loop.launch(refused_call, arguments, evaluates)


def refused_call(loop, arguments, evaluates):
    loop.setup(Net(), Net.configure_optimizers)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    args, kwargs = [tokens] * arguments.count("tokens"), {name: tokens for name in arguments if name != "tokens"}
    with pytest.raises(MisuseError) as error, loop.evaluation() if evaluates else nullcontext():
        loop.compute(lambda *_args, **_kwargs: tokens.float().mean(), *args, **kwargs)
    return str(error.value)


def test_a_batch_in_keyword_arguments_is_refused():
    cases = {
        "labels=": {"arguments": ["tokens", "labels"], "pp": 2},
        "labels=, mask=": {"arguments": ["tokens", "labels", "mask"], "cp": 2},
        "tokens_=, labels=": {"arguments": ["tokens_", "labels"], "cp": 2, "evaluates": True},
        "no batch": {"arguments": [], "pp": 2},
    }
    for found in in_ranks(each, function=wrongly_called, cases=cases):
        for received, message in found.items():
            assert message == (
                f"compute got {received}, and the mesh divides its batch, which are the positional arguments after the "
                "function: call loop.compute(function, tokens, labels)"
            )


# What does not fit is refused


class Small(nn.Module):
    """Attention with options of a test, on batches of (samples, tokens, 8) and further tensors."""

    heads, options = 2, MappingProxyType({})

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        heads = self.layer(batch[0]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.attend(heads).sum()

    def attend(self, heads):
        return functional.scaled_dot_product_attention(heads, heads, heads, **self.options)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneHead(Small):
    heads = 1


class LocalMask(Small):
    options = MappingProxyType({"attn_mask": torch.ones(4, 4)})


class Dropout(Small):
    options = MappingProxyType({"dropout_p": 0.5})


class Crossed(Small):
    def attend(self, heads):
        return functional.scaled_dot_product_attention(heads, heads[:, :, 1:], heads[:, :, 1:])


class Alone(Small):
    def attend(self, heads):
        return (heads @ heads.mT).softmax(-1) @ heads


class Weights(Small):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def attend(self, heads):
        tokens = heads.transpose(1, 2).flatten(2)
        return self.attention(tokens, tokens, tokens)[0]


class Encoder(Small):
    """Layers of torch, which call the same function."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def attend(self, heads):
        return self.encoder(heads.transpose(1, 2).flatten(2)) * torch.arange(8.0, device=heads.device)


class InStages(dstrat.TrainModule):
    """Layers in stages, whose steps all compute the same; the last stage attends, or none."""

    def __init__(self, last):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(context_fits.WIDTH), last)

    def configure_pipeline(self):
        return dstrat.Pipeline(model=self.net, loss=lambda output, batch: output.square().mean())

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def refusal(cluster, verb, attends, **options):
    trainer = quiet_trainer(MeshStrategy(**options), cluster, fast_dev_run=True)
    last = context_fits.Attention() if attends else nn.LayerNorm(context_fits.WIDTH)
    try:
        getattr(trainer, verb)(InStages(last), DataLoader(torch.ones(2, 8, context_fits.WIDTH), batch_size=2))
    except DstratError as error:
        return str(error)
    return None


VERBS = {"fit": "training", "validate": "validation", "test": "test", "predict": "predict"}


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 2, "pp": 2}], ids=str)
def test_each_kind_of_step_has_to_call_attention_in_some_stage(sizes):
    cases = {verb: {"verb": verb, "attends": False, **sizes} for verb in VERBS}
    if "pp" in sizes:
        cases |= {f"{verb}, attends": {"verb": verb, "attends": True, **sizes} for verb in ("fit", "validate")}
    for found in in_ranks(each, 4 if "pp" in sizes else 2, function=refusal, cases=cases):
        attending = [found.pop(name) for name in cases if "attends" in name]
        assert not any(attending)
        for verb, message in found.items():
            assert message.startswith(f"a {VERBS[verb]} step of InStages has called no attention")


def tensors(length=8, further=()):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, 8, generator=generator), *(torch.ones(2, size) for size in further)]


def outcome(cluster, module_class, batch, **options):
    """Return the loss of the rank's part, or the error."""
    strategy = MeshStrategy(cp=2, **options)
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    torch.manual_seed(0)
    strategy.connect(globals()[module_class]())
    try:
        strategy.setup(Run(strategy.module))
        return float(strategy.training_step(tensors(**batch), 0).detach())
    except DstratError as error:
        strategy.barrier()  # the other rank may still receive from this one
        return str(error)
    finally:
        strategy.teardown()


def test_what_divided_sequences_cannot_do_is_refused():
    cases = {
        "sequences of 7 tokens cannot be divided over the 2 ranks of cp: pad them to a multiple of 2, such as 8": {
            "batch": {"length": 7}
        },
        "sequences of 6 tokens cannot be divided over the 2 ranks of cp, with two parts for each: pad them to a": {
            "batch": {"length": 6},
            "context_parallel": "ring",
        },
        "a batch with tensors of the shapes [(2, 8, 8), (2, 4)] has no one length of sequences": {
            "batch": {"further": (4,)}
        },
        "the 2 ranks of cp divide heads, and attention has 1 of queries and 1 of keys": {"module_class": "OneHead"},
        "scaled_dot_product_attention got a mask of shape (4, 4), and with cp": {"module_class": "LocalMask"},
        "scaled_dot_product_attention got a mask, and context_parallel='ring'": {
            "module_class": "LocalMask",
            "context_parallel": "ring",
        },
        "scaled_dot_product_attention got dropout_p=0.5, and": {"module_class": "Dropout", "context_parallel": "ring"},
        "scaled_dot_product_attention got queries of shape (2, 2, 4, 4) and keys of shape (2, 2, 3, 4)": {
            "module_class": "Crossed"
        },
        "a training step of Alone has called no attention as torch.nn.functional.scaled_dot_product_": {
            "module_class": "Alone"
        },
        "nn.MultiheadAttention was called with need_weights=True": {"module_class": "Weights"},
    }
    cases = {message: {"module_class": "Small", "batch": {}, **case} for message, case in cases.items()}
    for found in in_ranks(each, function=outcome, cases=cases):
        for expected, message in found.items():
            assert str(message).startswith(expected)


def test_layers_of_torch_attend_to_whole_sequences():
    torch.manual_seed(0)
    expected = float(Encoder().training_step(tensors(), 0).detach())
    assert sum(in_ranks(outcome, module_class="Encoder", batch={})) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp": 2, "context_parallel": "rings"}, "context_parallel='rings' is not known: choose 'ulysses' or 'ring'"),
        ({"context_parallel": "ring"}, "is for divided sequences: give cp=2 or more"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(RequestError) as error:
        MeshStrategy(**options)
    assert message in str(error.value)


def test_the_plan_shows_how_sequences_are_divided():
    strategy = MeshStrategy(cp=2, tp=2, context_parallel="ring")
    rows = {subject.strip(): (value, reason) for subject, value, reason in strategy.describe_layout(8, 8)}
    assert rows["mesh"][0] == "dp_shard 2 x cp 2 x tp 2"
    assert rows["cp"] == ("[0, 2] [1, 3] [4, 6] [5, 7]", "parts of sequences")
    assert rows["attention"] == ("ring", "keys and values from rank to rank")
