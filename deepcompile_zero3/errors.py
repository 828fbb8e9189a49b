"""The one exception type that this package defines."""


class Zero3Error(RuntimeError):
    """Raised when sharded training is asked for something that it cannot do correctly.

    The message names the parameter or module, the values, and the remedy.
    """
