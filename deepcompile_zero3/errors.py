"""The one exception type of our own."""


class Zero3Error(RuntimeError):
    """Sharded training was asked for something that it cannot do rightly.

    The message names the parameter or module, the values, and the remedy.
    """
