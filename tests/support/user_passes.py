"""Passes over rewritten graphs, as a user of this library would write them."""

import operator
import tempfile
from itertools import pairwise

import torch
from torch import library
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deepcompile_zero3 import GraphPass
from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.metadata import KEEP, KEPT_OF, PARAMETER, formats_of
from deepcompile_zero3.graph.peak import gathered_bytes
from deepcompile_zero3.passes.chain import chain_gathers
from deepcompile_zero3.runtime import WAITS

_SOURCE = get_hash_for_files((__file__,))  # a cache must not return what an older pass made


class Prefetch(GraphPass):
    """Starts gathers as many waits ahead of use as full tensors of ``max_bytes`` allow."""

    needs = ("insert_gathers",)
    changes = ("gathered_peak",)

    def __init__(self, max_bytes):
        self.max_bytes = max_bytes

    def uuid(self):
        return _SOURCE, self.max_bytes

    def __call__(self, gm, facts):
        order = {node: position for position, node in enumerate(gm.graph.nodes)}
        waits = [node for node in order if node.target in WAITS]
        alive = gathered_bytes(gm.graph)
        earliest = 0  # the place of the start before
        for wait in waits:
            nbytes = sum(node.meta[PARAMETER].nbytes for node in wait.args[1])
            place = here = order[wait.args[0]]
            for other in reversed([each for each in waits if earliest <= order[each] < here]):
                if max(alive[order[other] : place]) + nbytes > self.max_bytes:
                    break
                place = order[other]
                other.prepend(wait.args[0])
            alive[place:here] = [each + nbytes for each in alive[place:here]]
            earliest = place
        chain_gathers(gm.graph)


class SelectiveGather(GraphPass):
    """Keeps for backward what takes longest to gather again for its size, up to ``max_bytes``."""

    graphs = ("forward",)
    after = "choose_kept"

    def __init__(self, max_bytes, latency=20e-6, bytes_per_second=10e9):
        self.max_bytes = max_bytes
        self.latency = latency
        self.bytes_per_second = bytes_per_second

    def uuid(self):
        return _SOURCE, self.max_bytes, self.latency, self.bytes_per_second

    def __call__(self, gm, facts):
        known = [(n, n.meta.get(PARAMETER)) for n in gm.graph.find_nodes(op="placeholder")]
        known = [(node, of) for node, of in known if of and of.fqn in facts.may_keep]
        left = self.max_bytes
        for node, parameter in sorted(known, key=lambda each: -self._gain(each[1].nbytes)):
            if parameter.reshard_after_forward is None:  # else the user has chosen
                node.meta[KEEP] = parameter.nbytes <= left
                left -= parameter.nbytes if node.meta[KEEP] else 0

    def _gain(self, nbytes):
        """Returns the seconds that each byte saves."""
        return (self.latency + nbytes / self.bytes_per_second) / nbytes


@library.custom_op("user_passes::store", mutates_args=())
def store(tensor: torch.Tensor, folder: str) -> torch.Tensor:
    """Returns a copy of ``tensor`` that lives in a file, which goes when the copy is freed."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        memory = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return memory.view(tensor.shape).copy_(tensor)


@library.custom_op("user_passes::load", mutates_args=())
def load(stored: torch.Tensor) -> torch.Tensor:
    """Returns a copy of ``stored`` in ordinary memory."""
    return stored.clone()


store.register_fake(lambda tensor, folder: torch.empty_like(tensor))
load.register_fake(torch.empty_like)


class Offload(GraphPass):
    """Keeps activations of ``numel`` elements or more in files until backward needs them."""

    def __init__(self, numel, folder, ahead=2):
        self.numel, self.folder = numel, folder
        self.ahead = ahead  # nodes between the copy back and the first use

    def uuid(self):
        return _SOURCE, self.numel, self.folder, self.ahead

    def __call__(self, gm, facts):
        nodes = list(gm.graph.nodes)
        if facts.direction == "forward":
            for node in self._activations(nodes[-1], facts.saved):
                nodes[-1].replace_input_with(node, self._copy(nodes[-1], store, node, self.folder))
            return
        inputs = gm.graph.find_nodes(op="placeholder")
        for node in inputs:
            is_known = "desc" in node.meta or {PARAMETER, KEPT_OF} & node.meta.keys()
            if node.users and not is_known and self._fits(node):
                users = list(node.users)
                place = max(len(inputs), min(map(nodes.index, users)) - self.ahead)
                loaded = self._copy(nodes[place], load, node)
                for user in users:
                    user.replace_input_with(node, loaded)

    def _activations(self, output, saved):
        """Yields what a forward saves for backward, and neither got nor returns to the user."""
        results = [(i, node) for i, node in enumerate(output.args[0]) if node is not None]
        returned = {base_of(node) for i, node in results if i not in saved}
        for base, node in {base_of(node): node for i, node in results if i in saved}.items():
            is_full = base.target is operator.getitem and base.args[0].target in WAITS
            is_known = is_full or base.op == "placeholder" or base in returned
            if not is_known and self._fits(node):
                yield node

    def _fits(self, node):
        value = node.meta["val"]
        fits = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        return fits and statically_known_true(value.numel() >= self.numel) and value.is_contiguous()

    @staticmethod
    def _copy(place, op, node, *args):
        with place.graph.inserting_before(place):
            copy = place.graph.call_function(op._opoverload, (node, *args))
        copy.meta["val"] = torch.empty_like(node.meta["val"])
        return copy


class BlockBuckets(GraphPass):
    """Gathers the parameters of a block together: those whose FQNs begin with the same names."""

    after = "insert_gathers"
    changes = ("gather_order", "gathered_peak")

    def __init__(self, depth):
        self.depth = depth  # number of names

    def uuid(self):
        return _SOURCE, self.depth

    def __call__(self, gm, facts):
        waits = [node for node in gm.graph.nodes if node.target in WAITS]
        for first, second in reversed(list(pairwise(waits))):
            if len(self._blocks(first, second)) == 1:
                self._merge(gm.graph, first, second)
        chain_gathers(gm.graph)

    def _blocks(self, *waits):
        """Returns the blocks of what is gathered, with what else a gather has one of."""
        facts = [node.meta[PARAMETER] for wait in waits for node in wait.args[1]]
        return {(*f.fqn.split(".")[: self.depth], f.process_group, f.gathers_views) for f in facts}

    @staticmethod
    def _merge(graph, first, second):
        """Makes the gather of ``first`` that of ``second`` too."""
        (start, ours, *_), (other, theirs, *_) = first.args, second.args
        formats = [*formats_of(start), *formats_of(other)]
        bucket = [*ours, *theirs]
        for item in list(first.users):
            if item.args[1] == len(ours):  # the token
                item.args = (first, len(bucket))
        for item in list(second.users):
            item.args = (first, len(ours) + item.args[1])
        start.args = (bucket, None, ",".join(formats)) if any(formats) else (bucket,)
        first.args = (start, bucket)
        first.meta["val"] = [*first.meta["val"][:-1], *second.meta["val"]]
        graph.erase_node(second)
        other.replace_all_uses_with(start)
        graph.erase_node(other)
