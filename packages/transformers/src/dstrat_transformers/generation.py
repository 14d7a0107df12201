"""Text that a model generates while it is trained."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dstrat import Callback
from dstrat_transformers.pipeline import return_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dstrat import Trainer, TrainModule

_logger = logging.getLogger(__name__)


class GenerationCallback(Callback):
    """Generates text for prompts after each validation, with any strategy, and logs it.

    All processes generate the same text, as sharded parameters are gathered for each token.  Loggers with ``log_text``
    get it; it is also a line of Python's logging, and in :attr:`texts`.  Random numbers of the training do not change.

    Args:
        prompts: The beginnings of the texts.
        tokenizer: Of the model.
        key: The name under which loggers get the texts, with the number of the prompt if there are several.
        seed: Of the random numbers of sampling (``do_sample=True``).
        **generate_kwargs: Arguments of the model's ``generate``, such as ``max_new_tokens``.

    Attributes:
        texts: The last texts, one for each prompt.
    """

    def __init__(
        self,
        prompts: Sequence[str] | str,
        tokenizer: Any,
        *,
        key: str = "generated",
        seed: int = 0,
        **generate_kwargs: Any,
    ) -> None:
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        self.tokenizer = tokenizer
        self.key = key
        self.seed = seed
        self.generate_kwargs = {"max_new_tokens": 32, **generate_kwargs}
        self.texts: list[str] = []

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.texts = []
        for prompt in self.prompts:
            # A step returns tensors, as the hooks of DeepSpeed expect of a module.
            # A strategy that runs the passes of a batch by itself has no cache of the layers of other ranks.
            step = partial(self._generate, module, prompt, has_cache=trainer.strategy.compiled_steps() is None)
            tokens = trainer.strategy.run_step("validation_step", step)
            self.texts.append(str(self.tokenizer.decode(tokens[0], skip_special_tokens=True)))
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        for number, text in enumerate(self.texts):
            key = self.key if len(self.texts) == 1 else f"{self.key}/{number}"
            _logger.info("%s at step %d: %s", key, trainer.global_step, text)
            for logger in trainer.loggers:
                if hasattr(logger, "log_text"):
                    logger.log_text(key, text, step=trainer.global_step)

    def _generate(self, module: Any, prompt: str, *, has_cache: bool) -> Tensor:
        model = getattr(module, "model", module)
        # Without a cache all tokens are computed again for each new one.
        options = self.generate_kwargs if has_cache else {**self.generate_kwargs, "use_cache": False}
        inputs = self.tokenizer(prompt, return_tensors="pt").to(module.device)
        device = module.device
        devices = [] if device.type == "cpu" else [device]
        with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type=device.type):
            torch.manual_seed(self.seed)
            with return_outputs(model):
                tokens: Tensor = model.generate(**inputs, **options)
        return tokens
