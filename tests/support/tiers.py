"""Which tests run when: `make test` (no mark), `make test-more` (``more``), `make test-all` (all).

Tests say this themselves by marks, but for what holds of many of them:

* Tests about Inductor are ``more``, but for the few that every torch has to pass (``smoke``).
* Tests that take several ways to run and to communicate: `make test` runs pairs in which each way
  occurs, eager code over messages and rewritten graphs over shared memory, and the others are
  ``more``.
* Variants of a test that is marked ``first(parameter=value)``: those of this value, or of one of a
  tuple of values, run in `make test`, and the others are ``more``.
* Of those variants of a ``thin`` test that one of these tiers has, as many run as cover each value
  of each parameter, and the others are ``long``.
* Rewritten graphs run op by op with each combination of a test's other parameters, and through
  Inductor, which sees communication as opaque operators, with as many as cover each value.
"""

import pytest

_MORE = {("eager", "shared_memory"), ("interpreted", "c10d")}


def mark(items):
    """Marks the tests that `make test` leaves to another tier."""
    thin = {}
    for item in items:
        if item.get_closest_marker("long"):
            continue
        values = values_of(item)
        is_more = (
            item.get_closest_marker("more") is not None
            or (values.get("how"), values.get("transport")) in _MORE
            or (item.get_closest_marker("inductor") and not item.get_closest_marker("smoke"))
            or not _is_first(item, values)
        )
        if is_more:
            item.add_marker(pytest.mark.more)
        if item.get_closest_marker("thin"):
            thin.setdefault((_test_of(item), is_more), []).append((item, values))
    for variants in thin.values():
        needed = _cover(variants)
        for item, _ in variants:
            if item not in needed:
                item.add_marker(pytest.mark.long)


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


def _is_first(item, values):
    """Returns whether a variant has the values of its test's mark ``first``, if there is one."""
    marker = item.get_closest_marker("first")
    wanted = marker.kwargs if marker else {}
    return all(
        values[name] in (value if isinstance(value, tuple) else (value,))
        for name, value in wanted.items()
    )


def _test_of(item):
    return item.path, item.originalname


def _cover(variants):
    """Returns items in which each value of each parameter occurs.

    Args:
        variants: pairs of an item and its parameters' values by name.
    """
    occur = {  # without values, any variant is needed
        item: {(name, repr(value)) for name, value in values.items()} or {None}
        for item, values in variants
    }
    needed, uncovered = set(), set().union(*occur.values())
    while uncovered:
        best = max(occur, key=lambda item: len(uncovered & occur[item]))
        needed.add(best)
        uncovered -= occur[best]
    return needed
