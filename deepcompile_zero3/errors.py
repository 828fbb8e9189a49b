"""``Zero3Error``, and a check of bool arguments."""


class Zero3Error(RuntimeError):
    """Raised when sharded training is asked for something that it cannot do correctly.

    The message names the parameter or module, the values, and the remedy.
    """


def check_bool(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a bool. The message begins with ``name``."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, got {value!r}")
