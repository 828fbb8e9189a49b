"""What features look at when an optimizer steps, and do in its place."""

from deepcompile_zero3.features.checks import unsharded
from deepcompile_zero3.features.optimizer_steps import stand_in
from deepcompile_zero3.sharding import step_versions

step_versions.LOOKS += [
    unsharded.warn_of_unsharded,
]
step_versions.STAND_INS += [
    step_versions.StandIns(stand_in.may_be_for, stand_in.stand_in_for),
]
