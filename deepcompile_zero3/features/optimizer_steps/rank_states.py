"""State dicts of optimizers whose states need not be parts of tensors like their parameters.

Between steps, such an optimizer has the plain tensors of its rank. Checkpoints would take them for
equal on all ranks. In a state dict they are therefore DTensors:

* A state that follows the shards is sharded as its parameter is, and loads on any number of ranks.
* A state of a parameter with an owner is the owner's, of any shape.
* Any other is stored as the bytes of each rank, and loads on as many ranks.

Numbers stay as they are, and have to be equal on all ranks.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.optimizer_steps.state_bytes import (
    BY_RANK,
    NO_BYTES,
    Description,
    Missing,
    device_of,
    packed,
    sharded_dims,
    unpacked,
)
from deepcompile_zero3.features.owned.owned import OwnedTensor, OwnerMesh, is_elsewhere, rows_of
from deepcompile_zero3.sharding.layouts.mesh_of_few import adopt
from deepcompile_zero3.transport.json_collectives import all_gather_alike

# Names of floating states of no dimensions that are equal on all ranks.
NUMBERS = ("step", "eta", "mu", "mu_product")
# The key of a list, in place of a tuple, of which torch would save one rank's for all.
AS_TUPLE = "as a tuple"

_Path = tuple[Any, ...]
_Groups = tuple[dist.ProcessGroup, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def localized(value: Any, parameter: DTensor) -> Any:
    """Returns a state of ``parameter`` with the local tensors of its DTensors."""

    def local(_: _Path, leaf: Any) -> Any:
        is_dtensor = isinstance(leaf, DTensor)
        return rows_of(torch_internals.local_tensor(leaf), parameter) if is_dtensor else leaf

    return _mapped(local, value)


def state_to_save(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict ``saved`` with DTensors for states that differ by rank. Collective.

    Raises:
        Zero3Error: ranks have different numbers, or a tensor subclass that no DTensor can hold.
    """
    found = list(_parameters(optimizer, saved))
    everyone: dict[_Groups, list[dict[int, Any]]] = {}
    for groups in dict.fromkeys(
        groups for *_, parameter in found if (groups := _groups(parameter))
    ):
        mine = {}
        for position, (key, _, parameter) in enumerate(found):
            if _groups(parameter) == groups and not is_elsewhere(parameter):
                describe = functools.partial(_described, cast(DTensor, parameter))
                mine[position] = _mapped(describe, saved["state"].get(key, {}))
        everyone[groups] = _of_all_ranks(mine, groups)
    follow = {groups: _that_follow_shards(of_ranks) for groups, of_ranks in everyone.items()}
    states: dict[Any, Any] = {}  # in the same order on all ranks
    for position, (key, name, parameter) in enumerate(found):
        mine = saved["state"].get(key)
        if not (groups := _groups(parameter)):
            if mine is not None:
                states[key] = mine
            continue
        of_ranks = [each.get(position, {}) for each in everyone[groups]]
        if isinstance(parameter, OwnedTensor):
            owner = cast(OwnerMesh, parameter.device_mesh).owner
            of_ranks = [of_ranks[owner]]
            mine = {} if is_elsewhere(parameter) else mine
            stored: Callable[..., Any] = functools.partial(_of_owner, parameter)
        else:
            stored = functools.partial(_of_shard, name, cast(DTensor, parameter), follow[groups])
        if state := _merged(stored, of_ranks, mine or {}):
            states[key] = _by_rank_first(state)
    states = _by_rank_first(states)
    of_parameters = {key for key, *_ in found}
    states.update((k, v) for k, v in saved["state"].items() if k not in of_parameters)
    return {**saved, "state": states}


def state_to_load(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict ``given`` with the plain tensors of this rank.

    Raises:
        Zero3Error: states by rank are those of another number of ranks.
    """
    states = dict(given["state"])
    for key, name, parameter in _parameters(optimizer, given):
        if (state := states.get(key)) is not None:
            loaded = {} if is_elsewhere(parameter) else _loaded(name, parameter, (), state)
            # The entry stays: torch steps an optimizer without entries to make states.
            states[key] = loaded
    return {**given, "state": states}


def _by_rank_first(states: dict[Any, Any]) -> dict[Any, Any]:
    """Returns ``states`` in the order in which torch shall load them from a full state dict.

    It loads them in place, one after the other, and raises at those of another number of ranks.
    """

    def is_by_rank(value: Any) -> bool:
        values = value.values() if isinstance(value, dict) else value
        is_container = isinstance(value, dict | list | tuple)
        return is_container and (BY_RANK in value or any(map(is_by_rank, values)))

    return dict(sorted(states.items(), key=lambda item: not is_by_rank(item[1])))


def _parameters(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yields the key in ``state_dict``, the name and the parameter."""
    for group, described in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        names = group.get("param_names") or itertools.repeat(None)
        for key, name, parameter in zip(described["params"], names, group["params"], strict=False):
            number = name or (key if isinstance(key, str) else None)
            shape = list(parameter.shape)
            yield key, f"'{number}'" if number else f"parameter {key} of shape {shape}", parameter


def _groups(parameter: torch.Tensor) -> _Groups:
    """Returns the process groups of the ranks among which states of ``parameter`` may differ.

    Replicas are among them: they have to fail together.
    """
    if isinstance(parameter, OwnedTensor):
        return (cast(OwnerMesh, parameter.device_mesh).shard_group,)
    if not sharded_dims(parameter):
        return ()
    mesh = cast(DTensor, parameter).device_mesh
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))


def _of_all_ranks(mine: dict[int, Any], groups: _Groups) -> list[dict[int, Any]]:
    """Returns the values of all ranks, in the order of the groups' ranks, last group first."""
    everyone = [_encoded(mine)]
    for group in reversed(groups):
        gathered = all_gather_alike("state_dict() after step_locally", everyone, group)
        everyone = [each for some in gathered for each in some]
    return [_decoded(each) for each in everyone]


def _encoded(value: Any) -> Any:
    """Returns ``value`` without what JSON does not keep: keys that are numbers, and tuples."""
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_encoded(each) for each in value]}
    return {"tensor": value.encoded()} if isinstance(value, Description) else value


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "dict":
        return {key: _decoded(each) for key, each in content}
    if kind == "tensor":
        return Description.decoded(content)
    values = [_decoded(each) for each in content]
    return values if kind == "list" else tuple(values)


def _mapped(function: Callable[[_Path, Any], Any], value: Any, path: _Path = ()) -> Any:
    """Returns ``value`` with ``function(path, leaf)`` for each leaf of dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: _mapped(function, each, (*path, key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        mapped = (_mapped(function, each, (*path, i)) for i, each in enumerate(value))
        return tuple(mapped) if isinstance(value, tuple) else list(mapped)
    return function(path, value)


def _merged(
    function: Callable[[_Path, list[Any], Any], Any],
    of_ranks: Sequence[Any],
    mine: Any,
    path: _Path = (),
) -> Any:
    """Like ``_mapped``, of what all ranks have: ``function(path, leaf of each rank, my leaf)``."""
    given = [each for each in of_ranks if each is not Missing]
    first = given[0]
    if all(isinstance(each, dict) for each in given):
        return {
            key: _merged(
                function,
                [Missing if each is Missing else each.get(key, Missing) for each in of_ranks],
                mine.get(key, Missing) if isinstance(mine, dict) else Missing,
                (*path, key),
            )
            for key in dict.fromkeys(key for each in given for key in each)
        }
    if all(type(each) is type(first) for each in given) and isinstance(first, list | tuple):
        length = max(map(len, given))
        merged = (
            _merged(
                function,
                [
                    each[i] if each is not Missing and i < len(each) else Missing
                    for each in of_ranks
                ],
                mine[i] if isinstance(mine, list | tuple) and i < len(mine) else Missing,
                (*path, i),
            )
            for i in range(length)
        )
        return {AS_TUPLE: list(merged)} if isinstance(first, tuple) else list(merged)
    return function(path, list(of_ranks), mine)


def _described(parameter: DTensor, path: _Path, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, int | float | str | None) else str(type(leaf))
    value = localized(leaf, parameter)
    is_number = value.dim() == 0 and (path[-1] in NUMBERS or not value.is_floating_point())
    shard = rows_of(torch_internals.local_tensor(parameter), parameter)
    return Description(
        tuple(value.shape),
        value.dtype,
        value.device.type,
        is_like=value.shape == shard.shape,
        is_plain=type(value) in _PLAIN,
        number=value.item() if is_number else None,
    )


def _that_follow_shards(everyone: Sequence[dict[int, Any]]) -> set[_Path]:
    """Returns the paths of the states that have the shapes of shards of several shapes.

    One shape proves nothing: a table may have it by chance.
    """
    shapes: dict[_Path, set[tuple[int, ...]]] = {}
    others: set[_Path] = set()
    dtypes: dict[tuple[_Path, int], torch.dtype] = {}

    def look(position: int, path: _Path, leaf: Any) -> None:
        if isinstance(leaf, Description):
            shapes.setdefault(path, set()).add(leaf.shape)
            is_same = dtypes.setdefault((path, position), leaf.dtype) == leaf.dtype
            if not (leaf.is_like and is_same):
                others.add(path)

    for of_rank in everyone:
        for position, state in of_rank.items():
            _mapped(functools.partial(look, position), state)
    return {path for path, seen in shapes.items() if len(seen) > 1} - others


def _of_owner(parameter: OwnedTensor, path: _Path, of_owner: list[Any], mine: Any) -> Any:
    """Returns the owner's state as all ranks see it."""
    [described] = of_owner
    if not isinstance(described, Description):
        return described if mine is Missing else mine
    if described.number is not None:
        return _number(described, mine)
    if isinstance(mine, torch.Tensor):
        full = local = localized(mine, parameter).to(device_of(parameter))
    else:
        full = torch.empty(described.shape, device="meta")
        local = torch.empty(0, dtype=described.dtype, device=device_of(parameter))
    state = torch_internals.dtensor_like(local, parameter, full)
    adopt(state)
    return state


def _of_shard(
    name: str, parameter: DTensor, follow: set[_Path], path: _Path, of_ranks: list[Any], mine: Any
) -> Any:
    """Returns this rank's state ``mine``, and those of the others, as one."""
    given = [each for each in of_ranks if each is not Missing]
    tensors = [each for each in given if isinstance(each, Description)]
    state = f"state '{'.'.join(map(str, path))}' of {name}"
    numbers = [each.number if isinstance(each, Description) else each for each in given]
    if len(tensors) < len(given) or numbers[0] is not None:
        if any(repr(each) != repr(numbers[0]) for each in numbers):
            # torch keeps numbers of these names in such tensors itself.
            rename = "give it another name, and " if path[-1] in NUMBERS else ""
            raise Zero3Error(
                f"{state} is {numbers[0]!r} on one rank and "
                f"{next(n for n in numbers if repr(n) != repr(numbers[0]))!r} on another, which a "
                f"checkpoint would take for equal: {rename}keep it in a floating-point tensor, "
                "which is stored for each rank"
            )
        return _number(given[0], mine)
    if path in follow and len(given) == len(of_ranks):
        return torch_internals.dtensor_like(localized(mine, parameter), parameter)
    if not all(each.is_plain for each in tensors):
        raise Zero3Error(
            f"{state} is a tensor subclass, and its shapes {[list(t.shape) for t in tensors]} do "
            "not follow those of the shards: checkpoints cannot store it for each rank"
        )
    header = NO_BYTES if mine is Missing else _described(parameter, path, mine).header
    longest = max(len(NO_BYTES), *(each.nbytes for each in tensors))
    value = mine if mine is Missing else localized(mine, parameter)
    return {BY_RANK: packed(parameter, header, value, longest)}


def _number(described: Any, mine: Any) -> Any:
    if mine is not Missing:
        return mine
    if isinstance(described, Description):
        return torch.tensor(described.number, dtype=described.dtype)
    return described


def _loaded(name: str, parameter: torch.Tensor, path: _Path, value: Any) -> Any:
    """Returns a state of a state dict as this rank's optimizer has it."""
    if isinstance(value, dict) and BY_RANK in value:
        return unpacked(name, parameter, path, value[BY_RANK])
    if isinstance(value, dict):
        loaded = {k: _loaded(name, parameter, (*path, k), each) for k, each in value.items()}
        if AS_TUPLE in loaded:
            return tuple(loaded[AS_TUPLE])
        return {key: each for key, each in loaded.items() if each is not Missing}
    if isinstance(value, list | tuple):
        each_loaded = [_loaded(name, parameter, (*path, i), v) for i, v in enumerate(value)]
        present = [each for each in each_loaded if each is not Missing]
        return tuple(present) if isinstance(value, tuple) else present
    return localized(value, parameter) if isinstance(parameter, DTensor) else value
