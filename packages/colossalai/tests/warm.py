"""Loads Colossal-AI, whose import takes ten seconds, into the process that ranks are copies of."""

from importlib.util import find_spec

if find_spec("colossalai") and find_spec("dstrat_colossalai"):
    import dstrat_colossalai.strategy  # noqa: F401 - loaded is all that it must be
