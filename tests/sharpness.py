"""An optimizer of sharpness-aware minimization (SAM), as such optimizers are written outside of torch."""

import torch


class Sam(torch.optim.Optimizer):
    """Climbs along the gradient, and descends from where it was with the gradient of the loss there."""

    def __init__(self, params, base=torch.optim.SGD, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def parameters(self):
        groups = (group["params"] for group in self.param_groups)
        return [parameter for group in groups for parameter in group if parameter.grad is not None]

    @torch.no_grad()
    def first_step(self):
        parameters = self.parameters()
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["start"] = parameter.clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for parameter in self.parameters():
            parameter.copy_(self.state[parameter]["start"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        if closure is None:
            raise TypeError("SAM requires a closure")
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
