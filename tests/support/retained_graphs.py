"""Two losses of one forward, whose graph is retained after the first."""

from support.models import (
    Stack,
    assert_same_gradients,
    batch_of,
    compiled,
    mean_square,
    mine,
    shard,
)


def two_losses(model, x):
    """Backwards of two losses of one forward, as several tasks that share a trunk have."""
    output = model(x)
    output.square().mean().backward(retain_graph=True)
    output.sin().mean().backward()


def compare_two_losses(how, transport="shared_memory"):
    """Compares gradients of such backwards with those of plain PyTorch."""
    model = Stack()
    model, reference = shard(model, model.blocks, transport=transport)
    run = compiled(model, how)
    for seed in range(3):
        batch = batch_of(4, 8, seed=seed)
        if seed == 1:  # among other backwards, which release what forward saved
            mean_square(run, mine(batch)).backward()
            mean_square(reference, batch).backward()
        two_losses(run, mine(batch))
        two_losses(reference, batch)
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
