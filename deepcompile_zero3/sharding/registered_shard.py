"""The shard of one parameter as its model registers it: the leaf that the optimizer sees."""

import weakref
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.layouts.mesh_of_few import adopt
from deepcompile_zero3.sharding.layouts.replicated_gradient import ReplicatedGradient
from deepcompile_zero3.sharding.setup.blueprint import Blueprint


class RegisteredShard:
    """A DTensor ``nn.Parameter``, and the places of the model where it is registered.

    Users may register another shard in one of them, or give the shard another local tensor.
    ``follow`` takes over such a change.

    Attributes:
        fqn: name of the parameter, for people.
        dtype: dtype of the shard.
        latest: the shard that was followed last.
        local: its local tensor at that time.
        attributes: attributes of the user's subclass of ``nn.Parameter``, set on the value that a
            module reads too.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        parameter, layout = blueprint.parameter, blueprint.layout
        self.fqn = ""
        self.dtype = parameter.dtype
        self._shape = parameter.shape
        self._layout = layout
        self._places = [(weakref.ref(blueprint.module), blueprint.attribute)]  # several: tied
        shard = nn.Parameter(layout.shard(parameter), requires_grad=parameter.requires_grad)
        inner = vars(torch_internals.local_tensor(cast(DTensor, shard)))  # attributes of a wrapper
        own_attributes = {k: v for k, v in vars(parameter).items() if k not in inner}
        shard.__dict__.update(own_attributes)
        is_special = nn.Parameter in type(parameter).__mro__[1:]
        # Graphs would be compiled for each value of a constant, whether a module reads it or not.
        self.attributes = {
            name: each
            for name, each in own_attributes.items()
            if is_special and not isinstance(each, str | int | float | None)
        }
        grad_dtype.carry_over(parameter, shard)
        if parameter.grad is not None:
            shard.grad = layout.shard(parameter.grad)
        self.follow(cast(DTensor, shard))

    def install(self) -> DTensor:
        """Puts the shard into the module and returns it."""
        self._register(self.latest)
        return self.latest

    def tie(self, module: nn.Module, name: str) -> None:
        """Puts the shard into another module too."""
        self._places.append((weakref.ref(module), name))
        self._register(self.latest)

    def tie_again(self) -> None:
        """Registers one shard in all places, after a load has put others into some of them."""
        for module, name in self._registering():
            shard = module._parameters[name]
            if isinstance(shard, DTensor) and shard is not self.latest:
                self._register(shard)
                return

    def check_tied(self) -> None:
        """Raises Zero3Error if one of several places registers another parameter than the first."""
        if len(self._places) == 1:
            return
        shard = self.shard
        for module, name in self._registering():
            other = module._parameters[name]
            if other is not shard and not self._layout.is_local_part(other, self.local):
                raise Zero3Error(
                    f"'{self.fqn}' was tied when it was sharded, and the attribute '{name}' of a "
                    f"{module._get_name()} is another parameter now: assign one parameter to all "
                    "modules that share it, or untie them before fully_shard"
                )

    def _register(self, shard: DTensor) -> None:
        for module, name in self._registering():
            module._parameters[name] = cast(nn.Parameter, shard)

    def _registering(self) -> Iterator[tuple[nn.Module, str]]:
        """Yields the modules that register something in its places, and the name there."""
        for reference, name in self._places:
            module = reference()
            if module is not None and module._parameters.get(name) is not None:
                yield module, name

    def registries(self) -> Iterator[dict[str, nn.Parameter | None]]:
        """Yields the ``_parameters`` of the modules that register the shard, or did."""
        for reference, _ in self._places:
            if (module := reference()) is not None:
                yield module._parameters

    def give_attributes(self, value: torch.Tensor) -> None:
        """Gives ``value``, which a module reads, the attributes of the parameter."""
        for name, attribute in self.attributes.items():
            setattr(value, name, attribute)

    def follow(self, shard: DTensor) -> None:
        """Takes ``shard``, as it is now, for the shard of the parameter."""
        adopt(shard)  # torch may have loaded another DTensor
        self.latest = shard
        self.follow_attributes()
        self.local = torch_internals.local_tensor(shard)
        if (pinned := self._layout.pinned(self.local)) is not self.local:
            self.local.data = pinned

    def follow_attributes(self) -> None:
        """Takes the attributes that the shard has now. Those that it lacks are given to it."""
        for name, attribute in self.attributes.items():
            self.attributes[name] = self.latest.__dict__.setdefault(name, attribute)

    @property
    def shard(self) -> DTensor:
        """The shard that the model registers now, or registered last.

        Raises:
            Zero3Error: something else is registered.
        """
        shard = self._registered
        if isinstance(shard, DTensor):
            return shard
        if self._layout.is_local_part(shard, self.local):
            return self.latest
        was = "removed" if shard is None else f"replaced by a {type(shard).__name__}"
        raise Zero3Error(
            f"'{self.fqn}' was {was} after fully_shard; assign a DTensor of the same placement, or "
            "copy into it in place; parametrize or prune a module before it is sharded"
        )

    @property
    def _registered(self) -> torch.Tensor | None:
        """The tensor that is registered now. A tied parameter's first place counts."""
        reference, name = self._places[0]
        module = reference()
        return self.latest if module is None else module._parameters.get(name)

    @property
    def converted_dtype(self) -> torch.dtype | None:
        """The dtype of the registered shard, if that is floating and another than ``dtype``."""
        shard = self._registered
        if (
            not isinstance(shard, DTensor)
            or shard.dtype == self.dtype
            or not shard.is_floating_point()
        ):
            return None
        return shard.dtype

    def inherit_grad_dtype(self, shard: DTensor, declared: torch.dtype | None) -> None:
        """Gives ``shard`` the ``grad_dtype`` of the latest shard, which it replaces.

        Args:
            shard: the new shard. A ``grad_dtype`` that was set on it stays.
            declared: the ``grad_dtype`` of the latest forward.
        """
        if torch_internals.has_grad_dtype(shard):
            return
        if shard is not self.latest and torch_internals.has_grad_dtype(self.latest):
            shard.grad_dtype = self.latest.grad_dtype
        elif declared != self.dtype:
            shard.grad_dtype = declared  # to_empty() and the like change a shard in place

    def check_replacement(self, shard: DTensor) -> None:
        """Raises Zero3Error unless ``shard`` is like the latest, and on its device or on meta."""
        if shard.dtype != self.dtype:
            raise Zero3Error(
                f"'{self.fqn}' was {self.dtype} when it was sharded and is {shard.dtype} now; "
                "call .to(dtype) of the sharded module before its first forward, or compute in "
                "another dtype with MixedPrecisionPolicy(param_dtype=...)"
            )
        mine = list(self._shape), self._layout.placements, self._layout.mesh
        found = list(shard.shape), shard.placements, shard.device_mesh
        if found != mine:
            raise Zero3Error(
                "'{}' was sharded as {} by {} over {} and was replaced by {} by {} over {}; keep "
                "shape, placement and mesh".format(self.fqn, *mine, *found)
            )
        local, device = torch_internals.local_tensor(shard), self._layout.device
        if local.shape != self.local.shape:
            raise Zero3Error(
                f"this rank's shard of '{self.fqn}' has shape {list(self.local.shape)} and was "
                f"replaced by one of shape {list(local.shape)}; keep the local tensor's shape"
            )
        if local.device.type not in ("meta", device.type) and not self._layout.is_elsewhere:
            reason = (
                f"its mesh computes on {device}"
                if self._layout.offload is None
                else 'CPUOffloadPolicy keeps it on the CPU: call to_empty(device="cpu"), or load a '
                "state dict of CPU tensors"
            )
            raise Zero3Error(f"the shard of '{self.fqn}' is on {local.device}, but {reason}")

    def check_gradient(self, shard: DTensor) -> None:
        """Raises Zero3Error unless a reduced gradient may be added to ``shard.grad``."""
        grad, found = shard.grad, "a plain tensor"
        if grad is None:
            return
        if isinstance(grad, DTensor):
            mine = shard.placements, shard.device_mesh
            if (grad.placements, grad.device_mesh) == mine:
                return
            found = f"sharded by {grad.placements} over {grad.device_mesh}"
        raise Zero3Error(
            f"the .grad of '{self.fqn}' is {found}, and the parameter is sharded by "
            f"{shard.placements} over {shard.device_mesh}: set it to None, or to such a DTensor"
        )

    def accumulate_grad(self, shard: DTensor, reduced: torch.Tensor) -> None:
        """Adds a reduced gradient, this rank's rows [shard_rows, ...], to ``shard.grad``."""
        reduced = reduced.view(0) if self._layout.is_elsewhere else self._layout.local(reduced)
        if shard.grad is None:
            shard.grad = self._gradient(reduced.contiguous(), shard)
            return
        local = torch_internals.local_tensor(cast(DTensor, shard.grad))
        if torch.promote_types(local.dtype, reduced.dtype) == local.dtype:
            local.add_(reduced)
        else:
            shard.grad = self._gradient(local + reduced, shard)

    def _gradient(self, local: torch.Tensor, shard: DTensor) -> DTensor:
        gradient = torch_internals.dtensor_like(local, shard)
        if self._layout.dim is None:
            gradient.__class__ = ReplicatedGradient
        adopt(gradient)
        return gradient
