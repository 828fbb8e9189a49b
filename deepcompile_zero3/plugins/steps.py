"""What features look at when an optimizer steps, and which of them take the step."""

from deepcompile_zero3.features.checks import unsharded
from deepcompile_zero3.features.optimizer_steps import plain_step
from deepcompile_zero3.sharding.gradients import step_versions

step_versions.LOOKS += [
    unsharded.warn_of_unsharded,
]
step_versions.TAKERS += [
    plain_step.TAKER,
]
