"""One sharded parameter: the shard that the optimizer sees, the placeholder that graphs see.

::

    full          [rows, ...]        gathered for a forward or backward, never at rest
    shard         [shard_rows, ...]  a DTensor nn.Parameter, in the layout of torch.chunk
    placeholder   [rows, ...]        full shape, compute dtype and strides; zero bytes of storage

Rows run along the sharded dimension, which comes first here whichever it is: see ``layouts``.
"""

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.autograd import graph
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.facts import LeafFacts, SourceFacts, guard_key
from deepcompile_zero3.options import Schedule
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.budget import Budget
from deepcompile_zero3.sharding.forward.reads import Reads
from deepcompile_zero3.sharding.registered_shard import RegisteredShard
from deepcompile_zero3.sharding.setup.blueprint import Blueprint
from deepcompile_zero3.sharding.source import (
    Source,
    Substitute,
    facts_of_source,
    kind_of,
    name_placeholder,
    source_of,
)
from deepcompile_zero3.transport.connection import Connection, channel_of

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.gradients.sink import Check, Sink
    from deepcompile_zero3.sharding.group import ParameterGroup
    from deepcompile_zero3.sharding.model import ShardedModel

# Key in the metadata of an autograd node: the models whose gradients it computes.
_MODELS = "zero3_models"
# Bytes of gradients that replicas sum together. Small: nothing else fills a slow link between them
# while the first bucket is computed, nor hides what becomes of the last.
_REPLICATED_BUCKET = 16 << 20


class ShardedParameter:
    """A parameter of a sharded model, wherever and however often the model registers it.

    Attributes:
        registered: the shard, and where it is registered.
        position: position among the parameters of its model.
        layout: where the parts of the parameter are.
        mp_policy: the policy with the parameter's own ``param_dtype``.
        ranks_meet_in_backward: whether all ranks take part when one gathers again in backward.
        is_read_as_gathered: whether modules see the all-gather's output unchanged.
        group: the ``ParameterGroup`` that gathers it, weakly; see ``group_of``.
        reads: whether reads return full tensors in eager code, for all parameters of the group.
        substitute: the sources that are gathered in the parameter's place, or None.
        sink: the sink that takes the gradient from ``.grad``, or None.
        checks: checks of the reduced gradient, by name.
        budget: the budget of memory that the shard is part of, or None.
        schedule: the schedule of graphs, in place of the one in the backend's options, or None.
        placeholder: the tensor that a traced graph takes in place of the parameter.
        handle: the parameter in the C++ runtime.
        reshard_after_forward: True gathers again in backward. False keeps what forward gathered
            until then. None leaves the choice to the compiler, and in eager code to
            ``ParameterGroup``.
        leaf_facts: all that graphs depend on, whatever is gathered.
        facts: all that graphs depend on of the parameter as a source.
        guard_key: text of these. Parameters that are alike in it and in their placeholders may
            share compiled graphs.
        compute_dtype: dtype of the full tensor.
        forward_grad_dtype: ``grad_dtype`` of the shard, initially or in the latest forward.
        contract: the contract in the latest forward, as text for ``zero3::unshard``.
    """

    def __init__(self, blueprint: Blueprint, connection: Connection) -> None:
        layout = blueprint.layout
        self.registered = RegisteredShard(blueprint)
        self.group: weakref.ref[ParameterGroup] | None = None
        self.reads = Reads()
        self._model: weakref.ref[ShardedModel] | None = None
        self.position = 0
        self.layout = layout
        self.is_read_as_gathered = layout.dim == 0 and layout.inner is None  # one guard, not many
        self.forward_grad_dtype: torch.dtype | None = None
        self.contract = ""
        self.guard_key = ""  # until it joins a model
        self._leaf = ""
        self.sink: Sink | None = None
        self.checks: dict[str, Check] = {}
        self.budget: Budget | None = None
        self.schedule: Schedule | None = None
        kind = kind_of(blueprint.parameter)
        self.substitute: Substitute | None = (
            None if kind is None else kind.substitute(self, blueprint)
        )
        self._forward_shard_id = 0
        self.ranks_meet_in_backward = True
        self._connection: Connection | None = connection
        self.mp_policy = blueprint.mp_policy
        settings = _C.Settings(divide_factor=layout.ranks.mesh.size())
        if layout.ranks.replicate_group is not None:
            settings = settings.replace(bucket_bytes=_REPLICATED_BUCKET)
        self._build(blueprint.full, blueprint.parameter.requires_grad, settings)
        self.set_reshard_after_forward(blueprint.reshard_after_forward)
        self._build_after_forward(connection)
        self._set_grad_dtype(blueprint.parameter.grad_dtype)

    def _build(self, full: torch.Tensor, requires_grad: bool, settings: _C.Settings) -> None:
        """Creates the placeholder and the runtime's parameter for a full tensor like ``full``."""
        ranks = self.layout.ranks
        self.compute_dtype = full.dtype
        self.placeholder = nn.Parameter(
            _C.make_placeholder(
                list(full.shape), list(full.stride()), self.compute_dtype, ranks.device
            ),
            requires_grad=requires_grad,
        )
        name_placeholder(self.placeholder, self)
        others = ranks.replicate_group
        replicas = None if others is None else channel_of(others, ranks.device)
        rows = self.layout.row_layout(full.shape[0])
        source = self._source(ranks.shard_group.rank(), rows, placeholder=self.placeholder)
        if replicas is not None:
            self.layout.connect_replicas(source, replicas)
        self.handle = _C.Parameter(source, replicas, settings)

    @property
    def settings(self) -> _C.Settings:
        """Settings that users may change between steps: a value, set as a whole."""
        return self.handle.settings

    @settings.setter
    def settings(self, settings: _C.Settings) -> None:
        self.handle.settings = settings

    def _build_after_forward(self, connection: Connection) -> None:
        """Creates what is gathered from fewer ranks, if forwards reshard to fewer."""
        if connection.after_forward is not None:
            channel, messages = connection.after_forward
            rows = _C.RowLayout.chunked(self.placeholder.shape[0], channel.world_size)
            self.handle.after_forward = self._source(channel.rank, rows, transport=messages)

    def _source(
        self,
        rank: int,
        layout: _C.RowLayout,
        placeholder: torch.Tensor | None = None,
        transport: _C.Transport | None = None,
    ) -> _C.Source:
        """Creates what is gathered from ranks that have the rows of ``layout``."""
        return _C.Source(
            sizes=list(self.placeholder.shape),
            strides=list(self.placeholder.stride()),
            dtype=self.compute_dtype,
            device=self.placeholder.device,
            rank=rank,
            layout=layout,
            placeholder=placeholder,
            transport=transport,
        )

    def install(self) -> DTensor:
        """Puts the shard into the module, once all ranks have built theirs. Returns the shard."""
        connection, self._connection = cast(Connection, self._connection), None
        self._set_transport(connection)
        shard = self.registered.install()
        self._follow(shard)
        return shard

    def _set_transport(self, connection: Connection) -> None:
        connection.set_transport(self.handle)
        self.ranks_meet_in_backward = self.handle.can.ranks_meet_in_backward

    @property
    def has_run(self) -> bool:
        """Whether a forward of the parameter's group, or a reduction, was prepared."""
        return self._forward_shard_id != 0

    def rebuild(self, full: torch.Tensor, connection: Connection) -> None:
        """Computes with ``full``, the placeholder in another dtype, and keeps all settings."""
        shard, old = self.shard, self.handle
        self.registered.inherit_grad_dtype(shard, self.forward_grad_dtype)
        self.registered.dtype = shard.dtype
        self._build(full, shard.requires_grad, old.settings)
        self.handle.encode_parts_like(old)
        if old.after_forward is not None:
            self._build_after_forward(connection)
        self._set_transport(connection)
        self._set_grad_dtype(shard.grad_dtype)
        self._follow(shard)
        if self.model is not None:
            self.join(self.model, self.fqn)

    def _follow(self, shard: DTensor) -> None:
        self.registered.follow(shard)
        self.handle.follow(shard, self.layout.shard_rows(self.registered.local))

    @property
    def parameter(self) -> "ShardedParameter":
        """The parameter itself: it is one of its sources."""
        return self

    @property
    def sources(self) -> Sequence[Source]:
        """The parameter, or its substitute's sources, which exist from the first forward on."""
        return [self] if self.substitute is None else self.substitute.sources

    @property
    def shard_group_name(self) -> str:
        """Name of the process group of the ranks that have the shards."""
        return self.layout.ranks.shard_group.group_name

    @property
    def shard(self) -> DTensor:
        """The DTensor ``nn.Parameter`` that the model registers now, or registered last."""
        return self.registered.shard

    @property
    def fqn(self) -> str:
        """Name relative to the outermost sharded module, for people."""
        return self.registered.fqn

    @property
    def model(self) -> "ShardedModel | None":
        """The ``ShardedModel`` of the parameter, or None if nothing owns it any more."""
        return self._model() if self._model is not None else None

    def join(self, model: "ShardedModel", fqn: str) -> None:
        """Makes the parameter one of ``model``, with the name ``fqn``."""
        self._model = weakref.ref(model)
        self.registered.fqn = fqn
        self.handle.join(model.number, fqn)
        self.layout.join(model, self.handle)
        if self.substitute is None and self.budget is None:
            model.gather_orders.add(self.handle)
        self.update_facts()

    @property
    def nbytes(self) -> int:
        """Size in bytes of the full tensor in its compute dtype."""
        return self.placeholder.numel() * self.placeholder.element_size()

    def set_reshard_after_forward(self, reshard_after_forward: bool | None) -> None:
        """Sets ``reshard_after_forward``. Ends the sharding over fewer ranks that an int set."""
        self.reshard_after_forward = reshard_after_forward
        always = reshard_after_forward is True
        self.settings = self.settings.replace(reshard_after_forward=always)
        self.handle.after_forward = None
        self.update_facts()

    def deliver_early_if_possible(self) -> None:
        """Sets whether the runtime delivers the gradient before the end of a backward.

        Call it when ``sink``, ``checks`` or the model's facts about backwards have changed.
        """
        group = None if self.group is None else self.group()
        is_possible = (
            self.sink is not None
            and not self.checks
            and self.model is not None
            and self.model.is_last_backward
            and (group is None or self.model.forwards.get(group, 0) <= 1)
        )
        if self.settings.delivers_early != is_possible:  # another thread's backward may read them
            self.settings = self.settings.replace(delivers_early=is_possible)

    def update_facts(self) -> None:
        """Tells graphs of the facts as they are now. Call it when one has changed."""
        self._leaf = f"{self.placeholder.requires_grad} {self.forward_grad_dtype}"
        if (model := self.model) is None:
            return  # it is being built
        dtypes = self.settings.gradient_dtypes
        is_gathered = self.substitute is None
        leaf = LeafFacts(
            reshard_after_forward=self.reshard_after_forward,
            leaf_dtype=dtypes.leaf,
            wire_dtype=dtypes.wire,
            schedule=self.schedule,
            budget=self.budget.key if self.budget else "",
            model_nbytes=model.nbytes,
        )
        source = facts_of_source(
            self,
            self.shard_group_name,
            # By itself, a compiler casts a gradient to the dtype of what it differentiates, and
            # what is gathered in another place may have another dtype.
            declares_grad_dtype=self.placeholder.requires_grad
            and (dtypes.leaf != self.compute_dtype or not is_gathered),
            is_read_as_gathered=self.is_read_as_gathered and is_gathered,
            is_gathered=is_gathered,
        )
        self.set_facts(leaf, source)

    def set_facts(self, leaf: LeafFacts, source: SourceFacts) -> None:
        """Tells graphs that these are the facts."""
        self.leaf_facts, self.facts = leaf, source
        others = () if self.substitute is None else self.substitute.sources
        self.guard_key = guard_key(leaf, (source, *(each.facts for each in others)))

    def value_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the value that a module reads, from the gathered ``full``. Differentiable."""
        if full.grad_fn is not None:
            keep_models_alive(full.grad_fn, [self])
        value = full if self.is_read_as_gathered else self.layout.value_of(full)
        self.registered.give_attributes(value)
        if value is not full and value.requires_grad:  # else uses would be summed before the cast
            _C.declare_grad_dtype(value, self.settings.gradient_dtypes.leaf)
        return value

    def reshard(self) -> bool:
        """Frees the full tensor, and returns whether it was written to."""
        written = self.handle.was_written()
        self.handle.reshard()
        return written

    def refresh(self) -> DTensor:
        """Makes the runtime use the shard as it is now, and returns the shard."""
        shard = self.shard
        if not shard.is_leaf:
            raise Zero3Error(
                f"'{self.fqn}' is not a leaf now: a sharded model computes with its own "
                "parameters, and functional_call with others that are computed is not supported"
            )
        if torch_internals.local_tensor(shard) is not self.registered.local:
            self.registered.check_replacement(shard)
            self.registered.inherit_grad_dtype(shard, self.forward_grad_dtype)
            self._follow(shard)
            self.handle.reshard()
        return shard

    def prepare_forward(self) -> bool:
        """Records the settings that a forward uses and that its backward keeps.

        Returns:
            Whether ``requires_grad`` and ``grad_dtype`` are those that graphs were traced with. If
            not, they are updated now.
        """
        shard = self.refresh()
        self.registered.check_tied()
        if not self.has_run and self.substitute is None:
            self._check_kind()
        if self.budget is not None:
            self.budget.place(self)
        if (is_stale := self.handle.is_stale()) and self.settings.reshard_after_backward:
            self.handle.reshard()  # its last backward raised and has not resharded it
        elif is_stale:
            raise Zero3Error(
                f"'{self.fqn}' has changed since it was gathered, and set_reshard_after_backward("
                "False) said to compute with that again: set it to True before the last backward "
                "of a step, or call reshard() before the next forward"
            )
        self._forward_shard_id = id(shard)
        return self._follow_leaf(shard)

    @property
    def leaf(self) -> str:
        """Text of what graphs depend on of the shard, the leaf: whether it trains, and grad_dtype.

        Compilers guard on it. Reading it updates all else that guards look at, so that they hold
        for the leaf as it is now, and not for that of the last forward.
        """
        try:  # noqa: SIM105 (each call of a graph reads this, and a context takes longer)
            self._follow_leaf(self.registered.latest)
        except Zero3Error:
            pass  # the forward raises it
        return self._leaf

    def _follow_leaf(self, shard: DTensor) -> bool:
        """Takes over ``requires_grad`` and ``grad_dtype``. Returns whether both were so before.

        Takes over attributes too, which graphs have as inputs.
        """
        self.registered.follow_attributes()
        as_traced = True
        if self.placeholder.requires_grad != shard.requires_grad:
            self.placeholder.requires_grad_(shard.requires_grad)
            self.update_facts()
            as_traced = False
        if self.forward_grad_dtype != shard.grad_dtype:
            if self.handle.has_gradients():
                raise Zero3Error(
                    f"grad_dtype of '{self.fqn}' changed from {self.forward_grad_dtype} to "
                    f"{shard.grad_dtype} while it has gradients that are not reduced yet"
                )
            grad_dtype.check(self.fqn, shard)
            self._set_grad_dtype(shard.grad_dtype)
            as_traced = False
        return as_traced

    def _check_kind(self) -> None:
        """Raises Zero3Error if others should be gathered in place of the shard."""
        if kind_of(local := self.registered.local) is not None:
            raise Zero3Error(
                f"the local tensor of '{self.fqn}', a {type(local).__name__}, says what to gather "
                "in its place, and did not when fully_shard was called: give the parameter these "
                "methods before fully_shard"
            )

    def prepare_reduction(self) -> None:
        """Prepares a reduction outside of a backward, perhaps before the first forward."""
        # If the shard was replaced after a forward, the settings of that forward stay.
        if not self._was_replaced(self.refresh()):
            self.prepare_forward()

    def _was_replaced(self, shard: DTensor) -> bool:
        return self._forward_shard_id not in (0, id(shard))

    def _set_grad_dtype(self, declared: torch.dtype | None) -> None:
        self.forward_grad_dtype = declared
        dtypes = grad_dtype.resolve(
            declared, self.registered.dtype, self.compute_dtype, self.mp_policy.reduce_dtype
        )
        dtypes = dtypes.quantized_like(self.settings.gradient_dtypes)
        self.settings = self.settings.replace(gradient_dtypes=dtypes)
        # Dynamo keeps each string that it meets, among the globals of the traced function.
        self.contract = sys.intern(_C.contract_name(dtypes.leaf))
        self.update_facts()

    def unchanged_shard(self) -> DTensor:
        """Returns the shard. Raises Zero3Error if it or its contract is not the forward's."""
        shard = self.refresh()
        if self._was_replaced(shard):
            raise Zero3Error(
                f"'{self.fqn}' was replaced by another parameter between a forward and its backward"
            )
        if shard.grad_dtype != self.forward_grad_dtype:
            raise Zero3Error(
                f"grad_dtype of '{self.fqn}' was {self.forward_grad_dtype} in forward and is "
                f"{shard.grad_dtype} after its backward: set it before the forward"
            )
        return shard


def parameter_of(placeholder: object) -> ShardedParameter | None:
    """Returns the parameter of the live source that has this placeholder, or None."""
    source = source_of(placeholder)
    return None if source is None else source.parameter


def keep_models_alive(node: graph.Node, parameters: Iterable[ShardedParameter]) -> None:
    """Makes an autograd node own the models of ``parameters``: a backward needs no module."""
    models = {parameter.model for parameter in parameters}
    node.metadata.setdefault(_MODELS, set()).update(models)  # type: ignore[attr-defined]
