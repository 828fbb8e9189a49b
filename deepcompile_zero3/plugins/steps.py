"""What features look at when an optimizer steps."""

from deepcompile_zero3.features.checks import unsharded
from deepcompile_zero3.sharding import step_versions

step_versions.LOOKS += [
    unsharded.warn_of_unsharded,
]
