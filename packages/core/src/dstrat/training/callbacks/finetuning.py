"""Callbacks that freeze layers and unfreeze them in the course of a training."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from dstrat.errors import MisuseError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

Modules: TypeAlias = "nn.Module | Iterable[Modules]"
"""A module, or modules in any nesting of iterables."""

_log = logging.getLogger(__name__)


class BaseFinetuning(Callback):
    """Freezing of layers before a training, and unfreezing as it goes on; the base of such callbacks.

    The layers that are frozen when the optimizers are made belong to none of them, so ``configure_optimizers`` must
    leave them out, and :meth:`unfreeze_and_add_param_group` adds them later::

        class UnfreezeEncoder(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.encoder)

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 5:
                    self.unfreeze_and_add_param_group(module.encoder, optimizer)


        class Net(TrainModule):
            def configure_optimizers(self):
                return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)

    A checkpoint holds the groups that were added and what is frozen, so that a training that goes on from it continues
    exactly.  :meth:`finetune_function` is called once for each epoch, also where one is interrupted and resumed.

    Some strategies cannot unfreeze parameters while they train, and raise an error of their own.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._tuned_epoch = -1
        self._added_groups: list[list[dict[str, Any]]] = []
        self._frozen: list[str] = []
        self._untracked: list[str] = []
        self._num_configured: list[int] = []
        self._resumes = False

    # What a subclass implements

    def freeze_before_training(self, module: TrainModule) -> None:  # noqa: ARG002 - for subclasses
        """Freeze what is not trained from the start, with :meth:`freeze`."""
        raise MisuseError(f"{type(self).__name__} must implement freeze_before_training(module)")

    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:  # noqa: ARG002 - for subclasses
        """Unfreeze what is trained from an epoch on, with :meth:`unfreeze_and_add_param_group`.

        Args:
            module: The module that is trained.
            epoch: Index of the epoch that begins, from 0.
            optimizer: Called once for each optimizer.
        """
        raise MisuseError(f"{type(self).__name__} must implement finetune_function(module, epoch, optimizer)")

    # What a subclass calls

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the modules that have parameters of their own or no children, in order."""
        return [module for module in _all_modules(modules) if module._parameters or not list(module.children())]  # noqa: SLF001 - torch has no public name for those of the module alone

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[Parameter]:
        """Yield the parameters that are trained, or with ``requires_grad=False`` those that are frozen.

        Args:
            modules: Where to look.
            train_bn: Whether those of batch-norm layers are among them.
            requires_grad: Whether trainable or frozen parameters are wanted.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                yield from (p for p in module.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters, and let batch-norm layers update their running statistics."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, enabled=True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of one module, without those of its children."""
        _set_trainable(module, enabled=False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters.

        Args:
            modules: What to freeze.
            train_bn: Whether batch-norm layers stay trainable.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, enabled=train_bn and isinstance(module, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Parameter]) -> list[Parameter]:
        """Return the parameters that the optimizer does not have yet, each once; log a warning where it has some."""
        params = list(dict.fromkeys(params))
        existing = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        new = [parameter for parameter in params if parameter not in existing]
        if len(new) < len(params):
            _log.warning(
                "%d of %d parameters to unfreeze are in the %s already and stay in their group: let "
                "configure_optimizers leave out what is frozen: %s(p for p in self.parameters() if p.requires_grad)",
                len(params) - len(new),
                len(params),
                type(optimizer).__name__,
                type(optimizer).__name__,
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to an optimizer as a group.

        Args:
            modules: What to unfreeze.
            optimizer: Gets the group.
            lr: The group's learning rate; None divides that of the first group by ``initial_denom_lr``.
            initial_denom_lr: The divisor.
            train_bn: Whether batch-norm layers are in the group.
        """
        existing = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        # Norms that were trainable all along are in the optimizer by right: only frozen ones are worth a warning.
        trained = existing.intersection(BaseFinetuning.filter_params(modules))
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        unfrozen = (p for p in BaseFinetuning.filter_params(modules, train_bn=train_bn) if p not in trained)
        new = BaseFinetuning.filter_on_optimizer(optimizer, unfrozen)
        if new:
            # A scheduler that is made later, and some of torch's, read the initial rate of each group.
            initial = {"initial_lr": rate} if "initial_lr" in optimizer.param_groups[0] else {}
            optimizer.add_param_group({"params": new, "lr": rate, **initial})

    # The run

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._begin()
            self.freeze_before_training(module)

    @override
    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        # Here rather than in load_state_dict: the groups must exist before the optimizer's state is loaded into them.
        if trainer.is_fitting and self.state_key in checkpoint.get("callbacks", {}):
            self._resumes = True
            self.load_state_dict(checkpoint["callbacks"][self.state_key])

    @override
    def on_configure_optimizers(self, trainer: Trainer, module: TrainModule, optimizers: Sequence[Optimizer]) -> None:
        self._num_configured = [len(optimizer.param_groups) for optimizer in optimizers]
        if not self._resumes:
            return
        self._resumes = False
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in self._frozen)
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm):
                layer.track_running_stats = name not in self._untracked
        parameters = dict(module.named_parameters())
        for optimizer, groups in zip(optimizers, self._added_groups, strict=False):
            for group in groups:
                optimizer.add_param_group({**group, "params": [parameters[name] for name in group["params"]]})

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.current_epoch == self._tuned_epoch:  # resumed in the middle of it
            return
        self._tuned_epoch = trainer.current_epoch
        for optimizer in trainer.optimizers:
            self.finetune_function(module, trainer.current_epoch, optimizer)
        self._note(module, trainer.optimizers)

    def _note(self, module: TrainModule, optimizers: Sequence[Optimizer]) -> None:
        """Keep by name what a checkpoint needs."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._frozen = [name for parameter, name in names.items() if not parameter.requires_grad]
        self._untracked = [
            name
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and not layer.track_running_stats
        ]
        self._added_groups = [
            [
                {**group, "params": [names[parameter] for parameter in group["params"]]}
                for group in optimizer.param_groups[count:]
            ]
            for optimizer, count in zip(optimizers, self._num_configured, strict=True)
        ]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "tuned_epoch": self._tuned_epoch,
            "added_groups": self._added_groups,
            "frozen": self._frozen,
            "untracked": self._untracked,
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._tuned_epoch = state_dict["tuned_epoch"]
        self._added_groups = state_dict["added_groups"]
        self._frozen = state_dict["frozen"]
        self._untracked = state_dict["untracked"]


class BackboneFinetuning(BaseFinetuning):
    """Training of the head alone, and of ``module.backbone`` too from an epoch on.

    The backbone's learning rate starts below that of the head, and is multiplied in each epoch until it reaches it.

    Args:
        unfreeze_backbone_at_epoch: Index of the first epoch that trains the backbone.
        lambda_func: Called with the number of the epoch, returns the factor of the backbone's learning rate; by default
            always 2.
        backbone_initial_ratio_lr: The backbone's first learning rate over the head's.
        backbone_initial_lr: The backbone's first learning rate, instead of the ratio.
        should_align: Whether the backbone's learning rate stays at the head's once it has reached it.
        initial_denom_lr: Divisor of the head's learning rate where no other is known.
        train_bn: Whether batch-norm layers of the backbone are trained.
        verbose: Whether both learning rates are logged in each epoch.
        rounding: Digits of the learning rates that are logged.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] | None = None,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and not isinstance(getattr(module, "backbone", None), nn.Module):
            raise MisuseError(
                f"{type(self).__name__} freezes {type(module).__name__}.backbone, and there is no module of that name: "
                "call the part that is to be frozen 'backbone', or derive from BaseFinetuning"
            )
        super().setup(trainer, module, stage)

    @override
    def _begin(self) -> None:
        super()._begin()
        self.previous_backbone_lr: float | None = None

    @override
    def freeze_before_training(self, module: TrainModule) -> None:
        self.freeze(_backbone(module))

    @override
    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        head_lr = optimizer.param_groups[0]["lr"]
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        if epoch == self.unfreeze_backbone_at_epoch or self.previous_backbone_lr is None:
            lr = self.backbone_initial_lr
            lr = head_lr * self.backbone_initial_ratio_lr if lr is None else lr
            self.unfreeze_and_add_param_group(
                _backbone(module), optimizer, lr, initial_denom_lr=self.initial_denom_lr, train_bn=self.train_bn
            )
        else:
            factor = 2.0 if self.lambda_func is None else self.lambda_func(epoch + 1)
            lr = factor * self.previous_backbone_lr
            lr = min(lr, head_lr) if self.should_align else lr
            optimizer.param_groups[-1]["lr"] = lr
        self.previous_backbone_lr = lr
        if self.verbose:
            _log.info("learning rate %s, of the backbone %s", round(head_lr, self.rounding), round(lr, self.rounding))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]


def _backbone(module: TrainModule) -> nn.Module:
    backbone: nn.Module = module.backbone  # type: ignore[assignment]  # setup has checked it
    return backbone


def _all_modules(modules: Modules) -> Iterator[nn.Module]:
    if isinstance(modules, nn.Module):  # also containers, which can be iterated but may have parameters of their own
        yield from modules.modules()
    else:
        for module in modules:
            yield from _all_modules(module)


def _set_trainable(module: nn.Module, *, enabled: bool) -> None:
    """Freeze or unfreeze one module, without its children."""
    if isinstance(module, _BatchNorm):
        module.track_running_stats = enabled
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(enabled)
