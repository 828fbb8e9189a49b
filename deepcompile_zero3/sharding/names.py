"""Names of parameters and buffers."""

# What torch.compile and checkpoint_wrapper put into the names of what is in a module.
_OF_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Returns the name that a parameter or buffer has in a model without wrappers.

    It is the name that ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` gives it.
    """
    for wrapper in _OF_WRAPPERS:
        name = name.replace(wrapper, "")
    return name
