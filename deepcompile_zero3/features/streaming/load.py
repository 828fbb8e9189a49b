"""``load_safetensors``: each rank reads its own part of each parameter."""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error, check_bool
from deepcompile_zero3.features.streaming.arguments import group_of_ranks, on_each_rank
from deepcompile_zero3.features.streaming.pieces import Box, box_of, local_of, named_tensors
from deepcompile_zero3.features.streaming.safetensors_format import INDEX, ONE_FILE, MappedFile
from deepcompile_zero3.sharding.module import groups_in
from deepcompile_zero3.sharding.names import plain_name
from deepcompile_zero3.transport.json_collectives import shorten

_WHAT = "load_safetensors"
_BLOCK_BYTES = 64 << 20  # of a file that are in memory at once, if the kernel needs the rest


class IncompatibleKeys(NamedTuple):
    """Names that files or model do not have, as ``load_state_dict`` returns them.

    Attributes:
        missing_keys: names of parameters and persistent buffers that no file has.
        unexpected_keys: names in the files that the model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Target(NamedTuple):
    """A tensor of the model, the names under which files may have it, and this rank's box."""

    tensor: torch.Tensor
    names: Sequence[str]
    box: Box


@torch_internals.disable_dynamo
@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    folder: str | os.PathLike,
    *,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Loads safetensors files into a sharded model, each rank its own part. Collective.

    A rank maps the files, and copies the elements that it has into its shards. No rank reads, or
    has, a whole parameter that is sharded. The files may come from
    :func:`save_safetensors` with any number of ranks and any layout, or from ``save_pretrained``. A
    model that was made on the meta device needs ``model.to_empty(device=...)`` first, which leaves
    buffers that are not persistent without values, as it does for FSDP2.

    What ``unshard()`` has gathered is resharded first, as ``load_state_dict`` does.

    Of tied parameters, files may have any of the names. Floating tensors are cast to the dtype of
    the parameter, as ``load_state_dict`` does, and integers to a wider one.

    Args:
        model: a model with any layouts, whose local tensors exist.
        folder: a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and
            the files that it names. Each host may have its own.
        strict: whether names that are missing or not expected raise.
        group: process group of all ranks that share the model; None means all ranks of the job.

    Returns:
        The missing and the unexpected names, which are empty if ``strict``.

    Raises:
        Zero3Error: on all ranks alike, before any shard changes: names are missing or not expected,
            shapes differ, a dtype has numbers that the model's lacks, a file is missing, wrong or
            was cut off, elements of a buffer share memory, or a parameter is on the meta device or
            a tensor subclass. The message names
            parameters and files.
    """
    check_bool("strict", strict)
    ranks = group_of_ranks(_WHAT, group)
    folder = os.fsdecode(folder)

    def prepare() -> tuple[dict[str, MappedFile], list[_Target], IncompatibleKeys]:
        files, targets = _open(folder), _targets(model, ranks)
        return files, targets, _compare(folder, files, targets, strict)

    files, targets, incompatible = on_each_rank(_WHAT, prepare, ranks)
    for sharded in groups_in(model):  # as load_state_dict does
        sharded.reshard()
    try:
        on_each_rank(_WHAT, lambda: _read(files, targets), ranks)
    finally:
        # On all ranks, also those that have no rows: they gather together.
        changed = [target.tensor for target in targets if isinstance(target.tensor, DTensor)]
        torch.autograd.graph.increment_version(changed)
    return incompatible


def _open(folder: str) -> dict[str, MappedFile]:
    """Returns the file that has each tensor, by its name."""
    one = os.path.join(folder, ONE_FILE)
    if os.path.exists(one):
        file = MappedFile(one)
        return {name: file for name in file.places}
    index = os.path.join(folder, INDEX)
    try:
        with open(index) as opened:
            weight_map = json.load(opened)["weight_map"]
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise TypeError("'weight_map' does not map names of tensors to names of files")
    except FileNotFoundError:
        raise Zero3Error(
            f"{folder} has neither {ONE_FILE} nor {INDEX}: nothing was saved there, or a save was "
            "interrupted"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Zero3Error(f"{index} is no index of safetensors files: {error}") from error
    files = {}
    for name in sorted({*weight_map.values()}):
        path = os.path.join(folder, name)
        if os.path.basename(name) != name:
            raise Zero3Error(f"{index} names the file {name!r}, which is not in its folder")
        if not os.path.exists(path):
            raise Zero3Error(f"{index} names {name}, and there is no such file")
        files[name] = MappedFile(path)
    for tensor, name in weight_map.items():
        if tensor not in files[name].places:
            raise Zero3Error(f"{index} says that {name} has '{tensor}', but it does not")
    return {tensor: files[name] for tensor, name in weight_map.items()}


def _targets(model: nn.Module, group: dist.ProcessGroup) -> list[_Target]:
    every: list[tuple[str, torch.Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    names: dict[int, list[str]] = {}
    for name, each in every:
        names.setdefault(id(each), []).append(plain_name(name))
    return [
        _Target(each, names[id(each)], box_of(name, each, group))
        for name, each in named_tensors(model, buffers=True)
    ]


def _compare(
    folder: str, files: dict[str, MappedFile], targets: Sequence[_Target], strict: bool
) -> IncompatibleKeys:
    missing = [t.names[0] for t in targets if not any(name in files for name in t.names)]
    known = {name for target in targets for name in target.names}
    unexpected = [name for name in files if name not in known]
    troubles = []
    for target in targets:
        for name in (name for name in target.names if name in files):
            if _shares_elements(target.tensor):
                troubles.append(f"elements of '{name}' share memory: replace it by its clone()")
            file = files[name]
            place = file.places[name]
            if place.shape != tuple(target.tensor.shape):
                troubles.append(
                    f"'{name}' has shape {list(target.tensor.shape)}, and {list(place.shape)} in "
                    f"{os.path.basename(file.path)}"
                )
            elif not _may_be_cast(place.dtype, target.tensor.dtype):
                troubles.append(
                    f"'{name}' is {target.tensor.dtype}, and {place.dtype} in "
                    f"{os.path.basename(file.path)}"
                )
    if strict and missing:
        troubles.append(f"no file has {shorten([repr(name) for name in missing])}")
    if strict and unexpected:
        troubles.append(f"the model has no {shorten([repr(name) for name in unexpected])}")
    if troubles:
        remedy = "; strict=False ignores names" if strict and (missing or unexpected) else ""
        raise Zero3Error(f"{folder} does not fit the model: {shorten(troubles)}{remedy}")
    return IncompatibleKeys(missing, unexpected)


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Returns whether there are more elements than places, as after ``expand()``."""
    local = local_of(tensor)
    count, steps = local.numel(), zip(local.shape, local.stride(), strict=True)
    return count > 1 and count > 1 + sum((size - 1) * step for size, step in steps)


def _may_be_cast(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Returns whether all numbers of ``dtype`` are numbers of ``to``, but for what is rounded."""
    kinds = [(each.is_floating_point, each.is_complex) for each in (dtype, to)]
    if kinds[0] != kinds[1]:
        return False
    if dtype == to or any(kinds[0]):
        return True
    if torch.bool in (dtype, to):
        return dtype == torch.bool
    mine, theirs = torch.iinfo(dtype), torch.iinfo(to)
    return theirs.min <= mine.min and mine.max <= theirs.max


def _read(files: dict[str, MappedFile], targets: Sequence[_Target]) -> None:
    """Copies this rank's boxes from the files into the local tensors."""
    for target in targets:
        name = next((name for name in target.names if name in files), None)
        if name is None or not target.box.numel:
            continue
        local = local_of(target.tensor)
        source = target.box.of(files[name].tensor(name))
        if not source.dim():
            local.copy_(source)
            continue
        rows = max(1, _BLOCK_BYTES * len(source) // (source.numel() * source.element_size()))
        for first in range(0, len(source), rows):
            local[first : first + rows].copy_(source[first : first + rows])
            files[name].drop_pages()
