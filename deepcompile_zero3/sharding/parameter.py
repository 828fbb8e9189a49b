"""One sharded parameter: the shard that the optimizer sees, the placeholder that graphs see.

::

    full tensor   [rows, ...]        gathered for a forward or backward, never at rest
    shard         [shard_rows, ...]  a DTensor nn.Parameter, in the layout of torch.chunk
    placeholder   [rows, ...]        full shape, compute dtype and strides; zero bytes of storage

Rows run along the sharded dimension, which comes first here whichever it is: see ``layout``.
"""

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layout import Layout
from deepcompile_zero3.sharding.leaf import ShardedLeaf
from deepcompile_zero3.transport.connection import Connection, channel_of

# Attribute of a placeholder: a weak reference to its parameter.
_PLACEHOLDER_OF = "_zero3_placeholder_of"
# Metadata key of an autograd node: the models whose parameters it brings gradients.
_MODELS = "zero3_models"


class ShardedParameter:
    """A parameter of a sharded model, wherever and however often the model registers it.

    Attributes:
        leaf: the shard, and where it is registered.
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
        self.leaf = ShardedLeaf(parameter, module, name, layout)
        self.group: weakref.ref[Any] | None = None
        self._model: weakref.ref[Any] | None = None
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

        self._mp_policy = mp_policy
        self._build(layout.full_like(parameter, mp_policy.param_dtype), parameter.requires_grad)
        self.settings.divide_factor = layout.ranks.mesh.size()
        self.set_reshard_after_forward(reshard_after_forward)
        self._shard_after_forward(connection)
        self._settle_grad_dtype(parameter.grad_dtype)

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

    def install(self) -> DTensor:
        """Puts the shard into the module, once all ranks have built theirs. Returns the shard."""
        connection, self._connection = cast(Connection, self._connection), None
        self._connect(connection)
        shard = self.leaf.install()
        self._follow(shard)
        return shard

    def _connect(self, connection: Connection) -> None:
        self.handle.transport = connection.transport_of(self.handle)
        self.ranks_meet_in_backward = self.handle.can.ranks_meet_in_backward

    @property
    def has_run(self) -> bool:
        """Whether a forward has used the parameter."""
        return self._shard_of_forward != 0

    def full_of_converted(self) -> torch.Tensor | None:
        """Returns what ``Layout.full_like`` would return for the shard as it is now.

        Returns None unless the shard was converted to another dtype before its first forward.
        """
        converted = None if self.has_run else self.leaf.converted_dtype
        if converted is None:
            return None
        dtype = self._mp_policy.param_dtype or converted
        return torch.empty_strided(
            self.placeholder.shape, self.placeholder.stride(), dtype=dtype, device="meta"
        )

    def rebuild(self, full: torch.Tensor, connection: Connection) -> None:
        """Computes with tensors like ``full`` from now on, and keeps all settings.

        ``full`` comes from ``full_of_converted``.
        """
        shard, old = self.shard, self.handle
        self.leaf.inherit_grad_dtype(shard, self.grad_dtype)
        self.leaf.dtype = shard.dtype
        self._build(full, shard.requires_grad)
        for name in vars(_C.Settings):
            if not name.startswith("_"):
                setattr(self.settings, name, getattr(old.settings, name))
        if old.after_forward is not None:
            self._shard_after_forward(connection)
        self._connect(connection)
        self._settle_grad_dtype(shard.grad_dtype)
        self._follow(shard)
        if self.model is not None:
            self.join(self.model, self.fqn)

    def _follow(self, shard: DTensor) -> None:
        self.leaf.follow(shard)
        self.handle.follow_version(shard)
        self.handle.shard = self.layout.rows(self.leaf.local)

    @property
    def group_name(self) -> str:
        """Name of the process group of the ranks that have the shards."""
        return self.layout.ranks.shard_group.group_name

    @property
    def declares_grad_dtype(self) -> bool:
        """Whether the contract differs from what any compiler does by itself."""
        return self.settings.gradient_dtypes.leaf != self.compute_dtype

    @property
    def shard(self) -> DTensor:
        """The DTensor ``nn.Parameter`` that the model registers now, or the last that it did."""
        return self.leaf.shard

    @property
    def fqn(self) -> str:
        """Name relative to the outermost sharded module, for people."""
        return self.leaf.fqn

    @property
    def model(self) -> Any:
        """The ``ShardedModel`` of the parameter, or None if nothing owns it any more."""
        return self._model() if self._model is not None else None

    def join(self, model: Any, fqn: str) -> None:
        """Makes the parameter one of ``model``, with the name ``fqn``."""
        self._model = weakref.ref(model)
        self.leaf.fqn = self.handle.fqn = fqn
        self.handle.model_number = model.number
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
        transport, wire = self.handle.transport, self.settings.gradient_dtypes.wire
        self.graph_key = (
            f"reshard_after_forward={self.reshard_after_forward} group={self.group_name} "
            f"transport={transport and transport.name} reduce_dtype={wire} "
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
            _C.declare_grad_dtype(full, self.settings.gradient_dtypes.leaf)
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
        if torch_internals.local_tensor(shard) is not self.leaf.local:
            self.leaf.check_replacement(shard, self.handle.device)
            self.leaf.inherit_grad_dtype(shard, self.grad_dtype)
            self._follow(shard)
            self.handle.reshard()
        return shard

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
            declared, self.leaf.dtype, self.compute_dtype, self._mp_policy.reduce_dtype
        )
        self.settings.gradient_dtypes = _C.GradientDtypes(
            contract.leaf, contract.wire, contract.shard
        )
        self.contract = _C.contract_name(contract.leaf)
        self.settle_graph_key()

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


def find(placeholder: object) -> ShardedParameter | None:
    """Returns the live parameter that has this placeholder, or None."""
    reference = getattr(placeholder, _PLACEHOLDER_OF, None)
    return None if reference is None else reference()


def own_models(node: Any, parameters: Iterable[ShardedParameter]) -> None:
    """Makes an autograd node own the models of ``parameters``: a backward needs no module."""
    models = {parameter.model for parameter in parameters}
    node.metadata.setdefault(_MODELS, set()).update(models)
