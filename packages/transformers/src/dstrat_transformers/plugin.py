"""Records of the conversions of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Adapter, hookimpl


@hookimpl
def dstrat_components() -> list[Adapter]:
    """Return the conversion of models that are passed to a Trainer as they are."""
    return [
        Adapter(
            foreign=("transformers.modeling_utils:PreTrainedModel", "peft.peft_model:PeftModel"),
            target="dstrat_transformers.module:adapt_model",
            summary="model of transformers or peft as a TrainModule",
        )
    ]
