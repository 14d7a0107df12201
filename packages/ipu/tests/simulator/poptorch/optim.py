"""Optimizers whose step is a part of the graph, and whose state lives on the device.

After graphcore/poptorch, python/optim.py (state_dict, load_state_dict, has_state, max_grad_norm) and
python/_optimizer_attributes.py (convertOptimizerToDict).  Names of the state's tensors are PopART's
(graphcore/popart, willow/include/popart/tensornames.hpp; sgd2decompose.cpp for SGD).
"""

from __future__ import annotations

import copy
import math
import numbers

import torch

LOCALS = ("max_grad_norm", "loss_scaling", "accum_type", "use_combined_accum")
STATES = {
    "SGD": {"Accl1___": "momentum_buffer"},
    "Adam": {"Accl1___": "exp_avg", "Accl2___": "exp_avg_sq", "Step___": "step"},
    "AdamW": {"Accl1___": "exp_avg", "Accl2___": "exp_avg_sq", "Step___": "step"},
    "RMSprop": {"Accl1___": "square_avg", "Accl2___": "grad_avg", "Accl3___": "momentum_buffer"},
}
_HYPERPARAMETERS = ("lr", "momentum", "dampening", "weight_decay", "betas", "eps", "alpha", "centered")


class Optimizer:
    """What poptorch's optimizers have beside torch's."""

    def __init__(self, max_grad_norm, loss_scaling):
        self._state_dict = {"ipu_state": None, "ipu_param": None}
        self.ipu_state_is_dirty = self.host_state_is_dirty = False
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling

    def state_dict(self):
        return self.get_state_dict()

    def load_state_dict(self, state):
        torch.optim.Optimizer.load_state_dict(self, state)
        self.set_state_dict(state)

    def get_state_dict(self):
        return {**self._state_dict, **torch.optim.Optimizer.state_dict(self)}

    def set_state_dict(self, state):
        if not state:
            raise RuntimeError("Cannot load optimizer state dictionary because it is empty.")
        if not ("ipu_state" in state and "ipu_param" in state):
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        self._state_dict = state
        self.ipu_state_is_dirty, self.host_state_is_dirty = True, False

    def has_state(self):
        return self._state_dict.get("ipu_state") is not None and self._state_dict.get("ipu_param") is not None

    def step(self, closure=None):
        raise RuntimeError("the optimizer steps inside of the compiled model")


def _made(base):
    class Made(Optimizer, base):
        def __init__(self, params, lr=None, *, max_grad_norm=None, loss_scaling=None, accum_type=None, **kwargs):
            Optimizer.__init__(self, max_grad_norm, loss_scaling)
            given = kwargs if lr is None else {"lr": lr, **kwargs}
            base.__init__(self, params, **{name: value for name, value in given.items() if value is not None})

    Made.__name__ = Made.__qualname__ = base.__name__
    return Made


SGD, Adam, AdamW, RMSprop = map(_made, (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop))


def kind_of(optimizer):
    """Return the name of a supported class of torch's."""
    for name in ("SGD", "AdamW", "Adam", "RMSprop"):
        if isinstance(optimizer, getattr(torch.optim, name)):
            return name
    raise AssertionError(f"Unsupported optimizer type. Types supported {list(STATES)}")


def as_dict(optimizer):
    """Return the values of an optimizer as the device gets them, which later changes do not reach."""
    groups = []
    for group in optimizer.param_groups:
        if group.get("nesterov"):
            raise ValueError("Nesterov momentum is currently not supported.")
        if group.get("amsgrad"):
            raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
        if group.get("maximize"):
            raise ValueError("maximize is not supported.")
        _check_numbers(group)
        groups.append({name: copy.copy(group[name]) for name in _HYPERPARAMETERS if name in group})
    return {
        "type": kind_of(optimizer),
        "groups": groups,
        "max_grad_norm": getattr(optimizer, "max_grad_norm", math.inf),
    }


def _check_numbers(group):
    """Refuse tensors and lists, as ``_assertIsNumber`` and ``assertIsFloatPair`` of _optimizer_attributes.py do."""
    for name in ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha"):
        assert isinstance(group.get(name, 0.0), numbers.Number), f"Expected a number for {name} but got {group[name]}"
    betas = group.get("betas", (0.0, 0.0))
    assert isinstance(betas, tuple), f"Expected a pair for betas but got {betas} instead"
    assert all(isinstance(beta, numbers.Number) for beta in betas), f"Expected numbers for betas but got {betas}"


class DeviceOptimizer:
    """An optimizer on the device: parameters in float32, and the state that PopART keeps.

    Args:
        values: As :func:`as_dict` returns them.
        groups: Names of the parameters of each group.
        weights: Device tensors by name, of any floating dtype.
    """

    def __init__(self, values, groups, weights):
        self.kind, self._weights = values["type"], weights
        self._shadows = {name: torch.nn.Parameter(weights[name].float()) for names in groups for name in names}
        made = [
            {"params": [self._shadows[name] for name in names], **options}
            for names, options in zip(groups, values["groups"], strict=True)
        ]
        self._optimizer = getattr(torch.optim, self.kind)(made, lr=0.0)
        self.update(values)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizer.state[parameter] = self._initial(group, parameter)

    def _initial(self, group, parameter):
        zeros = {name: torch.zeros_like(parameter) for name in STATES[self.kind].values()}
        if self.kind == "SGD":
            return zeros if group["momentum"] else {}
        if self.kind == "RMSprop":
            return {
                "step": torch.zeros(()),
                "square_avg": zeros["square_avg"],
                **({"grad_avg": zeros["grad_avg"]} if group["centered"] else {}),
                **({"momentum_buffer": zeros["momentum_buffer"]} if group["momentum"] else {}),
            }
        return {"step": torch.zeros(()), "exp_avg": zeros["exp_avg"], "exp_avg_sq": zeros["exp_avg_sq"]}

    def update(self, values):
        """Take other hyperparameters."""
        self._max_grad_norm = values["max_grad_norm"]
        for group, options in zip(self._optimizer.param_groups, values["groups"], strict=True):
            group.update(copy.deepcopy(options))

    def step(self, gradients):
        """Step with gradients by name, and write the weights in their dtype."""
        for name, shadow in self._shadows.items():
            shadow.data.copy_(self._weights[name])
            shadow.grad = gradients.get(name)
        if math.isfinite(self._max_grad_norm):
            torch.nn.utils.clip_grad_norm_(list(self._shadows.values()), self._max_grad_norm)
        self._optimizer.step()
        for name, shadow in self._shadows.items():
            self._weights[name].copy_(shadow.data)

    def read(self):
        """Return the state by PopART's names, and the hyperparameters."""
        state = {}
        for name, shadow in self._shadows.items():
            for prefix, key in STATES[self.kind].items():
                if (value := self._optimizer.state[shadow].get(key)) is not None:
                    state[prefix + name] = value.detach().clone().reshape(1 if key == "step" else value.shape)
        groups = self._optimizer.param_groups
        parameters = {f"learningRate___default___{i}": torch.tensor(group["lr"]) for i, group in enumerate(groups)}
        return {"ipu_state": state, "ipu_param": parameters}

    def write(self, saved):
        """Take back what :meth:`read` returned; what is missing stays."""
        for name, shadow in self._shadows.items():
            for prefix, key in STATES[self.kind].items():
                if (value := saved["ipu_state"].get(prefix + name)) is not None:
                    own = self._optimizer.state[shadow][key]
                    own.copy_(value.reshape(own.shape))
