"""Tools that inspect sharded models and their graphs. The core imports none of them."""

try:
    import rich  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the tools of deepcompile_zero3 (explain, plan, trace, doctor) print with rich, which "
        "training does not need: pip install rich"
    ) from error
