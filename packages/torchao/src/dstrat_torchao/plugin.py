"""Records of the precisions of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_TORCHAO = ("torchao>=0.18",)  # the aliases are listed without it, where a distribution was installed without it

_FLOAT8 = Component(
    kind="precision",
    alias="float8",
    target="dstrat_torchao.float8:Float8Precision",
    summary="products of linear layers in 8-bit floats, one scale for each tensor",
    requires=_TORCHAO,
    options={"precision": "float8"},
)
_INT8_WEIGHTS = Component(
    kind="precision",
    alias="int8-weights",
    target="dstrat_torchao.quantized_weights:QuantizedWeightsPrecision",
    summary="weights of frozen linear layers in 8 bits",
    requires=_TORCHAO,
    options={"precision": "int8-weights"},
)
_TRANSFORMER_ENGINE = Component(
    kind="precision",
    alias="transformer-engine",
    target="dstrat_torchao.transformer_engine:TransformerEnginePrecision",
    summary="layers of NVIDIA's Transformer Engine, products in 8-bit floats",
    requires=("transformer-engine>=1.11",),
    pip_options=("--no-build-isolation",),
    requires_note="it is built for the installed CUDA and torch; its parts are transformer-engine[pytorch]",
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the aliases of the precisions."""
    return [
        _FLOAT8,
        _FLOAT8.variant(
            "float8-rowwise",
            "products of linear layers in 8-bit floats, one scale for each row",
            precision="float8-rowwise",
        ),
        _FLOAT8.variant(
            "float8-rowwise-gw-hp",
            "like float8-rowwise, with gradients of weights in 16 bits",
            precision="float8-rowwise-gw-hp",
        ),
        _INT8_WEIGHTS,
        _INT8_WEIGHTS.variant("nf4-weights", "weights of frozen linear layers in 4 bits", precision="nf4-weights"),
        _TRANSFORMER_ENGINE,
    ]
