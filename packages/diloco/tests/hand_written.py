"""DiLoCo by hand: the groups one after the other in one process, without dstrat."""

import copy

import torch
from tests.hand_loop import batches


def hand_written(
    module,
    *,
    groups,
    ranks,
    every,
    steps,
    outer_lr=0.7,
    outer_momentum=0.9,
    fragments=None,
    delay=0,
    mixing=0.5,
    clip=None,
):
    """Return the mean loss of the groups in each step, and the mean of their parameters at the end.

    Args:
        module: The module, which is not changed.
        groups: Number of groups.
        ranks: Number of ranks of each of them.
        every: Steps of a round.
        steps: Steps.
        outer_lr: Of the outer SGD.
        outer_momentum: Of the outer SGD.
        fragments: Names of parameters in each fragment; None for a single one.
        delay: Steps between sending and applying.
        mixing: Share of a group's own weights after that.
        clip: Largest norm of gradients.
    """
    names = [name for name, _ in module.named_parameters()]
    fragments = fragments or [names]
    replicas = [copy.deepcopy(module) for _ in range(groups)]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    weights = [dict(replica.named_parameters()) for replica in replicas]
    outer = {name: torch.nn.Parameter(one.detach().clone()) for name, one in module.named_parameters()}
    sgd = torch.optim.SGD(outer.values(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    dtype = next(module.parameters()).dtype
    losses, flying = [], []
    for step, batch in enumerate(batches(steps), 1):
        inputs, targets = (tensor.to(dtype) for tensor in batch)
        of_step = []
        for group, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            rows = [row for rank in range(ranks) for row in range(group * ranks + rank, len(inputs), groups * ranks)]
            optimizer.zero_grad()
            loss = replica.training_step((inputs[rows], targets[rows]), step)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(replica.parameters(), clip)
            optimizer.step()
            of_step.append(float(loss.detach()))
        losses.append(sum(of_step) / groups)
        with torch.no_grad():
            for number, fragment in enumerate(fragments):
                if (step - 1) % every + 1 == -(-every * (number + 1) // len(fragments)):
                    deltas = {name: outer[name] - sum(one[name] for one in weights) / groups for name in fragment}
                    flying.append((step + delay, deltas))
            for due, deltas in [one for one in flying if one[0] == step]:
                flying.remove((due, deltas))
                for name in names:
                    outer[name].grad = deltas.get(name)
                sgd.step()
                for name in deltas:
                    for one in weights:
                        share = mixing if delay else 0.0
                        one[name].copy_(share * one[name] + (1 - share) * outer[name])
    return losses, {name: sum(one[name].detach() for one in weights) / groups for name in names}
