"""What features gather in place of shards, and how they lay shards out."""

from deepcompile_zero3.features.extensions.extension import GatheredAsOthers
from deepcompile_zero3.features.hybrid.divided import OVER_REPLICAS
from deepcompile_zero3.sharding import source
from deepcompile_zero3.sharding.setup import placement

source.KINDS += [
    GatheredAsOthers(),
]
placement.CHANGES |= dict(
    [
        OVER_REPLICAS,
    ]
)
