"""Kinds of blocks that may be compiled once, and a model of them."""

from functools import partial

import torch
from torch import library, nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.effects import _EffectType as EffectType
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH = 16


@library.custom_op("zero3_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


noted.register_fake(torch.empty_like)
if hasattr(noted, "register_effect"):
    noted.register_effect(EffectType.ORDERED)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def inner(self, h):
        return h

    def forward(self, x):
        return x + self.b(self.inner(torch.relu(self.a(self.norm(x)))))


class Dropout(Plain):
    def inner(self, h):
        return nn.functional.dropout(h, 0.5, training=True)


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight


class Embeds(Plain):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)

    def inner(self, h):
        return h + self.table(torch.arange(len(h)) % 4)


class WithoutResidual(Plain):
    def forward(self, x):
        return super().forward(x) - x


class TwoResults(Plain):
    def forward(self, x):
        y = super().forward(x)
        return y, y * 2


class PostNorm(Plain):
    """Saves a view of what it reads, and what it returns."""

    def forward(self, x):
        return torch.tanh(self.norm(self.a(x)))


class ForLogging(Plain):
    """Trains ``b`` with nothing but what only a log reads."""

    def forward(self, x):
        return x + self.a(x), self.b(x).mean()


class DetachesInside(Plain):
    def forward(self, x):
        y = super().forward(x)
        return y, y.detach() * 2


class TakesASize(Plain):
    def forward(self, x, size):
        return super().forward(x).view(size)


class UsedTwice(Plain):
    def inner(self, h):
        return self.a(h)


class Splits(Plain):
    def inner(self, h):
        left, right = h.chunk(2, -1)
        return torch.cat([left * right, torch.tanh(left)], -1)


class Selective(Plain):
    def forward(self, x):
        saves = self.saves
        contexts = partial(create_selective_checkpoint_contexts, list(saves))
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


class SavesProducts(Selective):
    saves = (torch.ops.aten.addmm.default,)


class SavesNothing(Selective):
    saves = ()


class Checkpointed(Plain):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class ReadsOutsideOfItsCheckpoint(Plain):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False) * self.norm.weight


class Marked(Plain):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return super().forward(x)


class BatchNorm(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class ChangesABuffer(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def inner(self, h):
        self.scale.add_(1)
        return h * self.scale


class WritesInPlace(Plain):
    def inner(self, h):
        return (h * 1).add_(2)


class Autocast(Plain):
    def inner(self, h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(h)
        return h.float()


class WithoutGradient(Plain):
    def inner(self, h):
        with torch.no_grad():
            mean = h.mean()
        return h - mean


class Branches(Plain):
    def inner(self, h):
        return torch.cond(h.sum() > 0, lambda h: self.a(h).sin(), lambda h: self.a(h).cos(), (h,))


class Loops(Plain):
    def inner(self, h):
        def step(last, row):
            return self.a(last + row).tanh(), self.b(last).sin()

        return scan(step, torch.zeros(WIDTH), h)[1]


class Rotates(Plain):
    """Rotates pairs, as attention does with positions."""

    def inner(self, h):
        turns = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH / 2))
        pairs = torch.view_as_complex(h.view(-1, WIDTH // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(1)


class Inverts(Plain):
    """Raises for a matrix that has no inverse, which is an effect."""

    def inner(self, h):
        return h + torch.linalg.inv(self.a.weight + 9 * torch.eye(WIDTH))[: len(h)]


class TakesAPower(Plain):
    """Inverts a matrix as :class:`Inverts` does."""

    def inner(self, h):
        return h + torch.matrix_power(self.a.weight + 9 * torch.eye(WIDTH), -1)[: len(h)]


class HasANorm(Plain):
    """Computes by ``torch.linalg`` without an effect."""

    def inner(self, h):
        rank = torch.linalg.matrix_rank(self.b.weight, rtol=1e-3)
        return h * rank / torch.linalg.vector_norm(self.a.weight)


class CallsAnOperator(Plain):
    """Calls an operator that is registered with an effect."""

    def inner(self, h):
        return h + noted(h.detach())


class ReturnsAWeight(Plain):
    def forward(self, x):
        return super().forward(x), self.a.weight


class ReturnsAView(Plain):
    def forward(self, x):
        return x.view(-1, WIDTH), super().forward(x)


class BreaksTheGraph(Plain):
    def inner(self, h):
        torch._dynamo.graph_break()
        return h


class Model(nn.Module):
    def __init__(self, *classes):
        super().__init__()
        self.blocks = nn.ModuleList(cls() for cls in classes)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        rest = 0
        for block in self.blocks:
            x = block(x, x.size()) if isinstance(block, TakesASize) else block(x)
            if isinstance(x, tuple):
                x, other = x
                other = other.detach() if isinstance(block, ForLogging) else other
                rest = rest + other.sum()
        return self.head(x).sum() + rest


class ReturnsWeights(Model):
    """A model that returns what its blocks have read."""

    def forward(self, x):
        weights = []
        for block in self.blocks:
            x, weight = block(x)
            weights.append(weight)
        return self.head(x).sum(), weights


class InAutocast(Model):
    """A model that begins a mode around its blocks."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)
