"""One sharded parameter: the shard that the optimizer sees, the placeholder that graphs see.

::

    full tensor   [rows, ...]        gathered for a forward or backward, never at rest
    shard         [shard_rows, ...]  a DTensor nn.Parameter, in the layout of torch.chunk
    placeholder   [rows, ...]        full shape, compute dtype and strides; zero bytes of storage

Rows run along the sharded dimension, which comes first here whichever it is: see ``layout``.
"""

import contextlib
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layout import Layout
from deepcompile_zero3.transport.connection import Connection, channel_of

# Attribute of a placeholder: a weak reference to its parameter.
_PLACEHOLDER_OF = "_zero3_placeholder_of"
# Metadata key of an autograd node: the models whose parameters it brings gradients.
_MODELS = "zero3_models"


class ShardedModel:
    """All parameters of an outermost sharded module. They finish a backward together.

    The modules own this object, and so does the autograd graph of each forward: a backward needs no
    module.

    Attributes:
        number: number of the model, the same on all ranks.
        parameters: the parameters, in one order on all ranks.
        nbytes: size in bytes of their full tensors in their compute dtypes.
    """

    def __init__(self, number: int, parameters: Sequence["ShardedParameter"]) -> None:
        self.number = number
        self.parameters = tuple(parameters)
        self.settle()
        _models.add(self)

    def settle(self) -> None:
        """Adds up what the parameters are now: before they join, and when some were converted."""
        self.nbytes = sum(parameter.nbytes for parameter in self.parameters)
        first: dict[str, int] = {}  # the model's number in each group, whoever is alive
        for position, parameter in enumerate(self.parameters):
            parameter.position = position
            handle = parameter.handle
            assert handle.transport is not None
            handle.model = first.setdefault(parameter.group_name, handle.transport.number)
            parameter.settle_graph_key()

    def retire(self) -> None:
        """Frees the number for another model. This model takes no more steps."""
        for parameter in self.parameters:
            parameter.handle.root = 0
        _models.discard(self)


_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()


class ShardedParameter:
    """A parameter of a sharded model, wherever and however often the model registers it.

    Attributes:
        fqn: name relative to the outermost sharded module, for people.
        position: position among the parameters of its model.
        layout: where the parts of the parameter are.
        ranks_meet_in_backward: whether all ranks take part when one gathers again in backward.
        replicas_are_compared: whether the values of its replicas were compared, or it has none.
        is_read_as_gathered: whether a module reads the gathered tensor as it is.
        group: the group that gathers it, weakly; see ``group_of``.
        placeholder: the tensor that a traced graph takes in place of the parameter.
        handle: the parameter in the C++ runtime.
        settings: settings of ``handle`` that users may change between steps.
        reshard_after_forward: True gathers again in backward. False keeps what forward gathered
            until then. None leaves the choice to the compiler, and gathers again in eager.
        graph_key: what graphs depend on besides the contract. Parameters that are alike in both and
            in their placeholders may share compiled graphs.
        grad_dtype: ``grad_dtype`` of the shard when the latest forward began.
        contract: the leaf's contract in the spelling of ``zero3::unshard``.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        module: nn.Module,
        name: str,
        layout: Layout,
        mp_policy: MixedPrecisionPolicy,
        connection: Connection,
        reshard_after_forward: bool | None = None,
    ) -> None:
        self._owner = weakref.ref(module)
        self.group: weakref.ref[Any] | None = None
        self._model: weakref.ref[ShardedModel] | None = None
        self._name = name
        self.fqn = ""
        self.position = 0
        self.layout = layout
        self.is_read_as_gathered = layout.dim == 0 and layout.inner is None  # one guard, not many
        self.reshard_after_forward = reshard_after_forward
        self.grad_dtype: torch.dtype | None = None
        self.contract = ""
        self._shard_of_forward = 0
        self.ranks_meet_in_backward = True
        self.replicas_are_compared = layout.ranks.replicate_group is None
        self._connection: Connection | None = connection

        self.orig_dtype = parameter.dtype
        self._size = parameter.shape
        self._mp_policy = mp_policy
        self._build(full_like(parameter, layout, mp_policy), parameter.requires_grad)
        self.settings.divide_factor = layout.ranks.mesh.size()
        self.set_reshard_after_forward(reshard_after_forward)
        self._shard_after_forward(connection)
        self._settle_grad_dtype(parameter.grad_dtype)

        shard = nn.Parameter(layout.shard(parameter), requires_grad=parameter.requires_grad)
        shard.__dict__.update(parameter.__dict__)
        grad_dtype.carry_over(parameter, shard)
        if parameter.grad is not None:
            shard.grad = layout.shard(parameter.grad)
        self._built: nn.Parameter | None = shard

    def _build(self, full: torch.Tensor, requires_grad: bool) -> None:
        """Creates the placeholder and the runtime's parameter, gathered as ``full`` is."""
        ranks = self.layout.ranks
        self.compute_dtype = full.dtype
        self.placeholder = nn.Parameter(
            _C.make_placeholder(
                list(full.shape), list(full.stride()), self.compute_dtype, ranks.device
            ),
            requires_grad=requires_grad,
        )
        setattr(self.placeholder, _PLACEHOLDER_OF, weakref.ref(self))
        others = ranks.replicate_group
        replicas = None if others is None else channel_of(others, ranks.device)
        shards = ranks.shard_group
        self.handle = self._handle(shards.rank(), shards.size(), replicas, self.placeholder)
        self.settings = self.handle.settings

    def _shard_after_forward(self, connection: Connection) -> None:
        if connection.after_forward is not None:
            channel, messages = connection.after_forward
            self.handle.after_forward = self._handle(channel.rank, channel.world_size)
            self.handle.after_forward.transport = messages

    def _handle(
        self,
        rank: int,
        world_size: int,
        replicas: _C.Channel | None = None,
        placeholder: torch.Tensor | None = None,
    ) -> _C.Parameter:
        """Creates the runtime's parameter for a sharding over ``world_size`` ranks."""
        return _C.Parameter(
            sizes=list(self.placeholder.shape),
            strides=list(self.placeholder.stride()),
            compute_dtype=self.compute_dtype,
            device=self.placeholder.device,
            rank=rank,
            world_size=world_size,
            replicas=replicas,
            placeholder=placeholder,
        )

    def install(self) -> nn.Parameter:
        """Puts the shard into the module, once all ranks have built theirs. Returns the shard."""
        shard, self._built = cast(nn.Parameter, self._built), None
        connection, self._connection = cast(Connection, self._connection), None
        self._connect(connection)
        cast(nn.Module, self._owner())._parameters[self._name] = shard
        self._set_shard(cast(DTensor, shard))
        return shard

    def _connect(self, connection: Connection) -> None:
        self.handle.transport = connection.transport_of(self.handle)
        self.ranks_meet_in_backward = self.handle.transport.can.ranks_meet_in_backward

    @property
    def has_run(self) -> bool:
        """Whether a forward has used the parameter."""
        return self._shard_of_forward != 0

    def full_of_converted(self) -> torch.Tensor | None:
        """Returns what ``full_like`` would return for the shard as it is now.

        Returns None unless the shard was converted to another dtype before its first forward.
        """
        module = self._owner()
        shard = None if module is None else module._parameters.get(self._name)
        if (
            not isinstance(shard, DTensor)
            or shard.dtype == self.orig_dtype
            or not shard.is_floating_point()
            or self.has_run
        ):
            return None
        dtype = self._mp_policy.param_dtype or shard.dtype
        return torch.empty_strided(
            self.placeholder.shape, self.placeholder.stride(), dtype=dtype, device="meta"
        )

    def rebuild(self, full: torch.Tensor, connection: Connection) -> None:
        """Computes with tensors like ``full`` from now on, and keeps all settings.

        ``full`` comes from ``full_of_converted``.
        """
        shard, old = self.shard, self.handle
        self._inherit_grad_dtype(shard)
        self.orig_dtype = shard.dtype
        self._build(full, shard.requires_grad)
        for name in vars(_C.Settings):
            if not name.startswith("_"):
                setattr(self.settings, name, getattr(old.settings, name))
        if old.after_forward is not None:
            self._shard_after_forward(connection)
        self._connect(connection)
        self._settle_grad_dtype(shard.grad_dtype)
        self._set_shard(shard)
        if self.model is not None:
            self.join(self.model, self.fqn)

    def _set_shard(self, shard: DTensor) -> None:
        self._latest_shard = shard
        self.handle.follow_version(shard)
        self._local = torch_internals.local_tensor(shard)
        self.handle.shard = self.layout.rows(self._local)

    @property
    def group_name(self) -> str:
        """Name of the process group of the ranks that have the shards."""
        return self.layout.ranks.shard_group.group_name

    @property
    def declares_grad_dtype(self) -> bool:
        """Whether the contract differs from what any compiler does by itself."""
        return self.settings.grad_dtype != self.compute_dtype

    @property
    def shard(self) -> DTensor:
        """The DTensor ``nn.Parameter`` that the model registers now, or the last that it did."""
        module = self._owner()
        shard = self._latest_shard if module is None else module._parameters[self._name]
        if isinstance(shard, DTensor):
            return shard
        if self.layout.is_local_part(shard, self._local):
            return self._latest_shard
        raise Zero3Error(
            f"'{self.fqn}' was replaced by a {type(shard).__name__} after fully_shard; "
            "assign a DTensor of the same placement, or copy into it in place"
        )

    @property
    def model(self) -> ShardedModel | None:
        """The sharded model of the parameter, or None if nothing owns the model any more."""
        return self._model() if self._model is not None else None

    def join(self, model: ShardedModel, fqn: str) -> None:
        """Makes the parameter one of ``model``, with the name ``fqn``."""
        self._model = weakref.ref(model)
        self.fqn = self.handle.fqn = fqn
        self.handle.root = model.number
        self.handle.register()
        self.settle_graph_key()

    @property
    def nbytes(self) -> int:
        """Size in bytes of the full tensor in its compute dtype."""
        return self.placeholder.numel() * self.placeholder.element_size()

    def set_reshard_after_forward(self, reshard_after_forward: bool | None) -> None:
        """Sets ``reshard_after_forward``, for the runtime too."""
        self.reshard_after_forward = reshard_after_forward
        self.settings.reshard_after_forward = reshard_after_forward is True
        self.handle.after_forward = None
        self.settle_graph_key()

    def settle_graph_key(self) -> None:
        """Updates ``graph_key``."""
        transport = self.handle.transport
        self.graph_key = (
            f"reshard_after_forward={self.reshard_after_forward} group={self.group_name} "
            f"transport={transport and transport.name} reduce_dtype={self.settings.reduce_dtype} "
            f"model_nbytes={self.model.nbytes if self.model else 0}"  # limits what is kept
        )

    def read(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that a module reads, from the gathered ``whole``."""
        if whole.grad_fn is not None:
            own_models(whole.grad_fn, [self])
        if self.is_read_as_gathered:
            return whole
        full = self.layout.read(whole)
        if full.requires_grad:  # else uses would be summed before they are cast
            _C.declare_grad_dtype(full, self.settings.grad_dtype)
        return full

    def release(self) -> bool:
        """Drops the full tensor, and returns whether it was written to."""
        written = self.handle.was_written()
        self.handle.reshard()
        return written

    def refresh(self) -> DTensor:
        """Makes the runtime use the shard as it is now, and returns the shard."""
        shard = self.shard
        if not shard.is_leaf:
            raise Zero3Error(
                f"'{self.fqn}' is no leaf now: a sharded model computes with its own parameters, "
                "and functional_call with others that are computed is not supported"
            )
        local = torch_internals.local_tensor(shard)
        if local is not self._local:
            self._check_replacement(shard, local)
            self._inherit_grad_dtype(shard)
            self._set_shard(shard)
            self.handle.reshard()
        return shard

    def _inherit_grad_dtype(self, shard: DTensor) -> None:
        """Gives a new shard the ``grad_dtype`` that was set on the one before."""
        if torch_internals.has_grad_dtype(shard):
            return
        if shard is not self._latest_shard and torch_internals.has_grad_dtype(self._latest_shard):
            shard.grad_dtype = self._latest_shard.grad_dtype
        elif self.grad_dtype != self.orig_dtype:
            shard.grad_dtype = self.grad_dtype  # to_empty() and the like change a shard in place

    def settle(self) -> bool:
        """Fixes the settings that a forward uses and that its backward keeps.

        Returns:
            Whether ``requires_grad`` and ``grad_dtype`` are those that graphs were traced with. If
            not, they are updated now.
        """
        shard = self.refresh()
        if self.handle.is_stale() and self.settings.reshard_after_backward:
            self.handle.reshard()  # its last backward raised and has not resharded it
        if self.handle.is_stale():
            raise Zero3Error(
                f"'{self.fqn}' has changed since it was gathered, and set_reshard_after_backward("
                "False) said to compute with that again: set it to True before the last backward "
                "of a step, or call reshard() before the next forward"
            )
        self._shard_of_forward = id(shard)
        as_traced = True
        if self.placeholder.requires_grad != shard.requires_grad:
            self.placeholder.requires_grad_(shard.requires_grad)
            as_traced = False
        if self.grad_dtype != shard.grad_dtype:
            if self.handle.has_gradients():
                raise Zero3Error(
                    f"grad_dtype of '{self.fqn}' changed from {self.grad_dtype} to "
                    f"{shard.grad_dtype} while it has gradients that are not reduced yet"
                )
            grad_dtype.check(self.fqn, shard)
            self._settle_grad_dtype(shard.grad_dtype)
            as_traced = False
        return as_traced

    def settle_between_forwards(self) -> None:
        """Calls ``settle``, unless the shard was replaced after a forward, which keeps its own.

        Perhaps no forward follows.
        """
        if not self._was_replaced(self.refresh()):
            self.settle()

    def _was_replaced(self, shard: DTensor) -> bool:
        return self._shard_of_forward not in (0, id(shard))

    def _settle_grad_dtype(self, declared: torch.dtype | None) -> None:
        self.grad_dtype = declared
        contract = grad_dtype.resolve(
            declared, self.orig_dtype, self.compute_dtype, self._mp_policy.reduce_dtype
        )
        self.settings.grad_dtype = contract.leaf
        self.settings.reduce_dtype = contract.wire
        self.settings.shard_grad_dtype = contract.shard
        self.contract = _C.contract_name(contract.leaf)
        self.settle_graph_key()

    def _check_replacement(self, shard: DTensor, local: torch.Tensor) -> None:
        if shard.dtype != self.orig_dtype:
            raise Zero3Error(
                f"'{self.fqn}' was {self.orig_dtype} when it was sharded and is {shard.dtype} now; "
                "call .to(dtype) of the sharded module before its first forward, or compute in "
                "another dtype with MixedPrecisionPolicy(param_dtype=...)"
            )
        mine = list(self._size), self.layout.placements, self.layout.mesh
        found = list(shard.shape), shard.placements, shard.device_mesh
        if found != mine:
            raise Zero3Error(
                "'{}' was sharded as {} by {} over {} and was replaced by {} by {} over {}; keep "
                "shape, placement and mesh".format(self.fqn, *mine, *found)
            )
        if local.device.type not in ("meta", self.handle.device.type):
            raise Zero3Error(
                f"the shard of '{self.fqn}' is on {local.device}, but its mesh computes on "
                f"{self.handle.device}"
            )

    def check_unchanged(self) -> None:
        """Raises Zero3Error if the shard is not the one of the forward, or has another contract."""
        shard = self.refresh()
        if self._was_replaced(shard):
            raise Zero3Error(
                f"'{self.fqn}' was replaced by another parameter between a forward and its backward"
            )
        if shard.grad_dtype != self.grad_dtype:
            raise Zero3Error(
                f"grad_dtype of '{self.fqn}' was {self.grad_dtype} in forward and is "
                f"{shard.grad_dtype} after its backward: set it before the forward"
            )

    def accumulate_grad(self, reduced: torch.Tensor) -> None:
        """Adds a reduced gradient, this rank's rows [shard_rows, ...], to ``.grad``."""
        shard = self.shard
        if not shard.requires_grad:
            return
        reduced = self.layout.local(reduced)
        if shard.grad is None:
            shard.grad = torch_internals.dtensor_like(reduced.contiguous(), shard)
            return
        local = torch_internals.local_tensor(cast(DTensor, shard.grad))
        if torch.promote_types(local.dtype, reduced.dtype) == local.dtype:
            local.add_(reduced)
        else:
            shard.grad = torch_internals.dtensor_like(local + reduced, shard)


def full_like(
    parameter: torch.Tensor, layout: Layout, mp_policy: MixedPrecisionPolicy
) -> torch.Tensor:
    """Returns the tensor that is computed with for ``parameter``, rows first, on the meta device.

    It has the compute dtype, and strides in the order of the parameter's dimensions, without its
    gaps.
    """
    low = mp_policy.param_dtype if parameter.is_floating_point() else None
    return torch.empty_like(layout.whole(parameter.detach()), dtype=low, device="meta")


def find(placeholder: object) -> ShardedParameter | None:
    """Returns the live parameter that has this placeholder, or None."""
    reference = getattr(placeholder, _PLACEHOLDER_OF, None)
    return None if reference is None else reference()


def own_models(node: Any, parameters: Iterable[ShardedParameter]) -> None:
    """Makes an autograd node own the models of ``parameters``: a backward needs no module."""
    models = {parameter.model for parameter in parameters}
    node.metadata.setdefault(_MODELS, set()).update(models)


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often ``tensor`` was written to, or 0 where torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version


@torch_internals.assume_constant_result
def settle(placeholder: torch.Tensor) -> None:
    """Settles a parameter that is being traced. Runs when Dynamo meets it, not in the graph.

    A Zero3Error is left to the graph, which raises it when it runs.
    """
    parameter = find(placeholder)
    if parameter is not None:
        with contextlib.suppress(Zero3Error):
            parameter.settle()


def parameters_beside(fqns: Set[str]) -> dict[str, ShardedParameter]:
    """Returns the live parameters named in ``fqns`` and all others of their models, by name."""
    models = [m for m in list(_models) if any(p.fqn in fqns for p in m.parameters)]
    return {p.fqn: p for model in models for p in model.parameters}
