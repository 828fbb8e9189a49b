"""``MatrixOwners``: chooses the ranks that own the matrices of a model."""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.utils.weak import WeakIdKeyDictionary

from deepcompile_zero3.features.owned.owned import Owned
from deepcompile_zero3.sharding.setup.arguments import default_mesh


def newton_schulz_cost(parameter: torch.Tensor) -> float:
    """Returns the multiplications of a Newton-Schulz step for matrices [..., rows, columns]."""
    *batch, rows, columns = parameter.shape
    short, long = sorted((rows, columns))
    return float(math.prod(batch) * short * short * (2 * long + short))


class MatrixOwners:
    """Gives each matrix of a model to one rank: a ``shard_placement_fn`` of ``fully_shard``.

    Matrices go to ranks in descending order of cost, each to the rank that has least to do.

    ::

        owners = MatrixOwners(model)
        for block in model.blocks:
            fully_shard(block, shard_placement_fn=owners)
        fully_shard(model, shard_placement_fn=owners)
        muon = torch.optim.Muon([p for n, p in model.named_parameters() if n in owners.rank_of])

    Args:
        model: the model, before anything in it is sharded. It may be on the meta device. Until it
            is sharded, nothing may replace its parameters, as ``to_empty()`` does.
        mesh: the mesh that it will be sharded over; the default is that of ``fully_shard``.
        is_matrix: whether a rank shall own the parameter of a name. The default is True for
            weights of two dimensions, but not for those of an ``nn.Embedding``. It includes an
            output head, which is usually left to AdamW.
        cost: relative time to update a parameter; the default is that of Muon.

    Attributes:
        rank_of: the owner of each matrix, by the name of the parameter.
        costs: the sum of the costs for each rank.

    Raises:
        ValueError: ``is_matrix`` is True for a parameter of fewer than two dimensions. A call with
            a parameter raises it if ``model`` did not have the parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None = None,
        *,
        is_matrix: Callable[[str, nn.Parameter], bool] | None = None,
        cost: Callable[[nn.Parameter], float] = newton_schulz_cost,
    ) -> None:
        embeddings = {
            id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
        }

        def is_weight(name: str, parameter: nn.Parameter) -> bool:
            return parameter.dim() == 2 and id(parameter) not in embeddings

        mesh = default_mesh() if mesh is None else mesh
        chosen = is_weight if is_matrix is None else is_matrix
        self._placements = WeakIdKeyDictionary()  # keeps no full parameter alive
        matrices = []
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):  # with weak references it could not be swapped
                self._placements[parameter] = None
            if not chosen(name, parameter):
                continue
            if parameter.dim() < 2:
                raise ValueError(
                    f"'{name}' is not a matrix: its shape is {list(parameter.shape)}; is_matrix "
                    "has to return False for it"
                )
            matrices.append((name, parameter, cost(parameter)))
        self.rank_of: dict[str, int] = {}
        self.costs = [0.0] * mesh.size(mesh.ndim - 1)
        for name, parameter, its_cost in sorted(matrices, key=lambda each: -each[2]):
            rank = min(range(len(self.costs)), key=self.costs.__getitem__)
            self.costs[rank] += its_cost
            self.rank_of[name] = rank
            self._placements[parameter] = Owned(rank)

    def __call__(self, parameter: nn.Parameter) -> Owned | None:
        """Returns the placement of ``parameter``, or None for the default."""
        if parameter not in self._placements and not isinstance(parameter, DTensor):
            raise ValueError(
                f"MatrixOwners does not know a parameter of shape {list(parameter.shape)}: make it "
                "of the model as it is sharded, after to_empty() or anything else that replaces "
                "parameters"
            )
        return cast(Owned | None, self._placements.get(parameter))
