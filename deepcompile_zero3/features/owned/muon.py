"""``Muon``: torch's, for batches of matrices and on the matrices that each rank has whole."""

from collections.abc import Iterable, MutableMapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error


class Muon(torch.optim.Muon):
    """:class:`torch.optim.Muon`, whose parameters may also be batches of matrices.

    Each rank updates the matrices that it has whole, bit for bit as torch's updates each of them,
    and communicates nothing. A parameter [..., rows, columns] is a batch. A group with
    ``"matrices": n`` has parameters [rows, columns] that are n matrices of equal size, one below
    the other, such as the weight of a layer that computes queries, keys and values.

    ::

        experts = [p for p in model.parameters() if p.dim() == 3]  # Shard(0): whole experts
        qkv = [p for n, p in model.named_parameters() if n.endswith("qkv.weight")]  # see Owned
        muon = Muon([{"params": experts}, {"params": qkv, "matrices": 3}], lr=0.02)

    Args:
        params: parameters, pairs of a name and a parameter, or groups of either. Parameters are
            plain tensors, DTensors with an owner, or DTensors that are sharded on another dimension
            than the last two.
        options: the arguments of :class:`torch.optim.Muon`.

    Raises:
        Zero3Error: a rank would have parts of matrices.
        ValueError: a parameter is not made of matrices.
        TypeError: the parameters of a group are a set, which has no order.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor]
        | Iterable[tuple[str, torch.Tensor]]
        | Iterable[dict[str, Any]],
        **options: Any,
    ) -> None:
        # torch's constructor checks the options. It takes parameters of two dimensions only.
        super().__init__([torch.empty(1, 1)], **options)
        self.param_groups.clear()
        given: list[Any] = list(params)
        if not given:
            raise ValueError("Muon got an empty parameter list")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; see :meth:`torch.optim.Optimizer.add_param_group`."""
        given = param_group["params"]
        if isinstance(given, torch.Tensor):
            given = [given]
        elif not isinstance(given, set):  # torch refuses sets, like what is not a tensor
            given = list(given)
        for each in given:
            fqn, parameter = each if isinstance(each, tuple) else (None, each)
            if isinstance(parameter, torch.Tensor):
                _check(fqn, parameter, param_group.get("matrices", 1))
        super().add_param_group({"matrices": 1, **param_group, "params": given})

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[torch.Tensor],
        grads: list[torch.Tensor],
        muon_momentum_bufs: list[torch.Tensor],
    ) -> bool:
        for parameter in group["params"]:
            _sum_gradient(parameter)
        parameters: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        momenta: list[torch.Tensor] = []
        has_complex = super()._init_group(group, parameters, gradients, momenta)
        for wholes, parts in (
            (parameters, params_with_grad),
            (gradients, grads),
            (momenta, muon_momentum_bufs),
        ):
            for whole in wholes:
                parts += _matrices(whole, group.get("matrices", 1))
        return has_complex


def _sum_gradient(parameter: torch.Tensor) -> None:
    """Gives the gradient of ``parameter`` its placements. Collective if it is a partial sum."""
    if not isinstance(parameter, DTensor) or parameter.grad is None:
        return
    gradient = cast(DTensor, parameter.grad)
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)


def _matrices(tensor: torch.Tensor, in_rows: int) -> list[torch.Tensor]:
    """Returns views of the matrices of ``tensor`` that this rank has."""
    local = torch_internals.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0:
        return []
    if in_rows > 1:
        return list(local.chunk(in_rows, dim=-2))
    matrices = [local]
    for _ in range(local.dim() - 2):  # not flatten(), which may copy
        matrices = [part for matrix in matrices for part in matrix.unbind()]
    return matrices


def _check(fqn: str | None, parameter: torch.Tensor, in_rows: int) -> None:
    """Raises unless each matrix of ``parameter`` is whole on the ranks that have any of it."""
    shape = list(parameter.shape)
    what = f"{'a parameter' if fqn is None else repr(fqn)} of shape {shape}"
    if len(shape) < 2:
        raise ValueError(f"{what} is not a matrix, and Muon updates matrices: use AdamW")
    if not isinstance(in_rows, int) or in_rows < 1 or shape[-2] % in_rows:
        raise ValueError(
            f"{what} is not made of {in_rows} equal matrices: set matrices to a divisor of "
            f"{shape[-2]}"
        )
    if in_rows > 1 and len(shape) > 2:
        raise ValueError(
            f"{what} is a batch of matrices, and not made of {in_rows} below each other: leave out "
            "matrices"
        )
    if not isinstance(parameter, DTensor):
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    for size, placement in zip(mesh.shape, placements, strict=True):
        if size > 1 and getattr(placement, "dim", None) in (len(shape) - 2, len(shape) - 1):
            raise Zero3Error(
                f"{what} is {placements} over {mesh}, so that ranks have parts of its matrices: "
                "give each matrix to one rank by "
                "fully_shard(shard_placement_fn=MatrixOwners(model, mesh))"
            )
