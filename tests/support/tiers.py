"""Which tests run when: `make test` (no mark), `make test-more` (``more``), `make test-all` (all).

Tests say this themselves by marks, but for what holds of many of them:

* Tests about Inductor are ``more``, but for the few that every torch has to pass (``smoke``).
* Tests that take several ways to run and to communicate: `make test` runs pairs in which each way
  occurs, eager code over messages and rewritten graphs over shared memory, and the others are
  ``more``.
* Variants of ``thin`` tests: `make test` runs as many as cover each value of each parameter. As
  many as cover each pair of values are ``more``, and the others ``long``.
* Rewritten graphs run op by op with each combination of a test's other parameters, and through
  Inductor, which sees communication as opaque operators, with as many as cover each value.
"""

import itertools

import pytest

_MORE = {("eager", "shared_memory"), ("interpreted", "c10d")}


def mark(items):
    """Marks the tests that `make test` leaves to another tier."""
    thin = {}
    for item in items:
        if item.get_closest_marker("long"):
            continue
        values = values_of(item)
        if (values.get("how"), values.get("transport")) in _MORE or (
            item.get_closest_marker("inductor") and not item.get_closest_marker("smoke")
        ):
            item.add_marker(pytest.mark.more)
        elif item.get_closest_marker("thin"):
            thin.setdefault(_test_of(item), []).append((item, values))
    for variants in thin.values():
        every_pair = _cover(variants, size=min(2, len(variants[0][1])))
        every_value = _cover([(item, values) for item, values in variants if item in every_pair])
        for item, _ in variants:
            if item not in every_pair:
                item.add_marker(pytest.mark.long)
            elif item not in every_value:
                item.add_marker(pytest.mark.more)


def products_through_inductor(items):
    """Returns variants that go through Inductor beside others which cover each value."""
    tests = {}
    for item in items:
        values = values_of(item)
        if item.get_closest_marker("long") and values.get("how") == "zero3":
            others = {name: value for name, value in values.items() if name != "how"}
            tests.setdefault(_test_of(item), []).append((item, others))
    return [i for variants in tests.values() for i, _ in variants if i not in _cover(variants)]


def values_of(item):
    """Returns the values of a test's parameters by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def _test_of(item):
    return item.path, item.originalname


def _cover(variants, size=1):
    """Returns items in which each ``size`` values of the variants occur together.

    Args:
        variants: pairs of an item and its parameters' values by name.
    """
    occur = {  # without values, any variant is needed
        item: {frozenset(some) for some in itertools.combinations(_named(values), size)} or {None}
        for item, values in variants
    }
    needed, uncovered = set(), set().union(*occur.values())
    while uncovered:
        best = max(occur, key=lambda item: len(uncovered & occur[item]))
        needed.add(best)
        uncovered -= occur[best]
    return needed


def _named(values):
    return [(name, repr(value)) for name, value in values.items()]
