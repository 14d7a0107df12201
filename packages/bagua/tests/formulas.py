"""Plain formulas of the algorithms: all ranks in one process, with lists instead of messages."""

import math

import torch
from tests.hand_loop import BATCH, STEPS, Net, batches


def compress(values):
    """Levels of Bagua's MinMaxUInt8, with what is needed to read them."""
    low, high = values.min(), values.max()
    scale = 255.0 / (high - low + 1e-7)
    upper = torch.round(high * scale)
    levels = (torch.round(values * scale) - (upper - 255.0)).clamp(0, 255).to(torch.uint8)
    return levels, low, high


def decompress(levels, low, high):
    scale = 255.0 / (high - low + 1e-7)
    return (levels.float() + (torch.round(high * scale) - 255.0)) / scale


def lossy(values):
    return decompress(*compress(values))


def average(vectors):
    return torch.stack(vectors).mean(0)


def compressed_average(vectors):
    """Scatter and gather: each rank averages a chunk of what the others have compressed."""
    size, numel = len(vectors), vectors[0].numel()
    width = math.ceil(numel / size)
    padded = [torch.cat([vector, torch.zeros(size * width - numel)]) for vector in vectors]
    chunks = [torch.stack([lossy(one[i * width : (i + 1) * width]) for one in padded]).mean(0) for i in range(size)]
    return torch.cat([lossy(chunk) for chunk in chunks])[:numel]


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Replicas:
    """Modules of all ranks, as vectors in the order of their buckets.

    Args:
        size: Ranks.
        order: -1 for algorithms of gradients, whose buckets have the last parameter first; 1 for those of weights.
    """

    def __init__(self, size, order, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
        self.nets = [Net() for _ in range(size)]
        self.optimizers = [make_optimizer(net.parameters()) for net in self.nets]
        self.order = order

    def parameters(self, rank):
        return [*self.nets[rank].parameters()][:: self.order]

    def weights(self):
        return [flat(self.parameters(rank)) for rank in range(len(self.nets))]

    def compute_gradients(self, batch, index):
        """Return the gradients of each rank, of its share of a batch."""
        size, losses = len(self.nets), []
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            loss = net.training_step(tuple(tensor[rank::size] for tensor in batch), index)
            loss.backward()
            losses.append(loss.item())
        return [flat([parameter.grad for parameter in self.parameters(rank)]) for rank in range(size)], losses

    def set_weights(self, rank, vector):
        with torch.no_grad():
            self._copy([parameter.data for parameter in self.parameters(rank)], vector)

    def set_gradients(self, rank, vector):
        self._copy([parameter.grad for parameter in self.parameters(rank)], vector)

    def _copy(self, tensors, vector):
        for tensor, values in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def _train(replicas, before_step, after_step=lambda step: None, steps=STEPS):
    """Train; return the mean loss of each step."""
    losses = []
    for index, batch in enumerate(batches(steps, BATCH)):
        gradients, of_ranks = replicas.compute_gradients(batch, index)
        before_step(index, gradients)
        replicas.step()
        after_step(index)
        losses.append(sum(of_ranks) / len(of_ranks))
    return losses, replicas.weights()


def gradient_formula(size, combine):
    """Every rank applies what a function makes of the gradients of all."""
    replicas = Replicas(size, -1)

    def apply(index, gradients):
        for rank in range(size):
            replicas.set_gradients(rank, combine(gradients))

    return _train(replicas, apply)


def qadam_formula(size, warmup_steps, combine=compressed_average, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8):
    """Adam for some steps; then compressed momentum over the variance of the warm-up."""
    replicas = Replicas(size, -1)
    momentum = torch.zeros_like(replicas.weights()[0])
    variance = torch.zeros_like(momentum)
    losses = []
    for index, batch in enumerate(batches(STEPS, BATCH)):
        gradients, of_ranks = replicas.compute_gradients(batch, index)
        step = index + 1
        if step <= warmup_steps:
            gradient = average(gradients)
            momentum = beta1 * momentum + (1 - beta1) * gradient
            variance = beta2 * variance + (1 - beta2) * gradient**2
        else:
            momentum = combine([beta1 * momentum + (1 - beta1) * gradient for gradient in gradients])
        corrected = variance / (1 - beta2 ** min(step, warmup_steps))
        change = lr * momentum / (1 - beta1**step) / (corrected.sqrt() + eps)
        for rank, weights in enumerate(replicas.weights()):
            replicas.set_weights(rank, weights - change)
        losses.append(sum(of_ranks) / size)
    return losses, replicas.weights()


def decentralized_formula(size, mode, interval=1):
    """Each rank applies its gradient to the average of weights, of all ranks or of a pair."""
    replicas = Replicas(size, 1)

    def mix(index, gradients):
        if index % interval:
            return
        weights, half = replicas.weights(), size // 2
        for rank in range(size):
            if mode == "all":
                replicas.set_weights(rank, average(weights))
            elif rank < half:
                peer = half + (rank + index // interval) % half
                replicas.set_weights(rank, (weights[rank] + weights[peer]) / 2)
                replicas.set_weights(peer, (weights[rank] + weights[peer]) / 2)

    return _train(replicas, mix)


def low_precision_formula(size, interval=1, machines=None):
    """Compressed changes of weights, in a ring of ranks, or of machines whose ranks average before.

    ``known[i]`` is what all that know the weights of unit i know of them.
    """
    replicas, units = Replicas(size, 1), machines or size
    per_unit = size // units
    known = replicas.weights()[:units]

    def exchange(index):
        if index % interval:
            return
        weights = replicas.weights()
        sent = [
            lossy(
                average(weights[unit * per_unit : (unit + 1) * per_unit])
                + known[unit - 1] / 3
                + known[(unit + 1) % units] / 3
                - known[unit] * 5 / 3
            )
            for unit in range(units)
        ]
        for unit in range(units):
            known[unit] = known[unit] + sent[unit]
        for rank in range(size):
            replicas.set_weights(rank, known[rank // per_unit])

    return _train(replicas, lambda index, gradients: None, exchange)
