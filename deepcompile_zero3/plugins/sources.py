"""What features gather in the place of parameters."""

from deepcompile_zero3.features.extensions.extension import GatheredAsOthers
from deepcompile_zero3.sharding import source

source.KINDS += [
    GatheredAsOthers(),
]
