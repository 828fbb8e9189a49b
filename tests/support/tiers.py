"""Which tests run when: `make test` (no mark), `make test-more` (``more``), `make test-all` (all).

Tests say this themselves by marks, but for what holds of many of them:

* Tests about Inductor are ``more``, but for the few that every torch has to pass (``smoke``).
* Tests that take several ways to run and to communicate: `make test` runs pairs in which each way
  occurs, eager code over messages and rewritten graphs over shared memory, and the others are
  ``more``.
* ``first(parameter=value)``, or of a tuple of values: `make test` runs no variants with another
  value. They are ``more``.
* ``thin``: of the variants that it would run, `make test` runs a few in which each value of each
  parameter occurs. `make test-more` adds the few that make each pair of ways to run and to
  communicate occur. The others are ``long``.
* Rewritten graphs run op by op with each combination of a test's other parameters, and through
  Inductor, which sees communication as opaque operators, with as many as cover each value.
"""

from collections import Counter

import pytest

_MORE = {("eager", "shared_memory"), ("interpreted", "c10d")}
_WAYS = ("how", "transport")


def check(items):
    """Raises if a mark ``first`` names something that no variant of its test has.

    Args:
        items: all variants of each test.
    """
    for (path, test), variants in _by_test(items).items():
        for name, values in _first(variants[0]).items():
            found = [values_of(item)[name] for item in variants if name in values_of(item)]
            for value in values:
                if value not in found:
                    raise pytest.UsageError(f"{path}::{test}: first({name}={value!r}): {found}")


def mark(items):
    """Marks the tests that `make test` leaves to another tier."""
    for variants in _by_test(items).values():
        transports = {values_of(item).get("transport") for item in variants}
        here, more = [], []
        for item in variants:
            values = values_of(item)
            if item.get_closest_marker("long"):
                continue
            if (
                item.get_closest_marker("more")
                or (item.get_closest_marker("inductor") and not item.get_closest_marker("smoke"))
                or (len(transports) > 1 and (values.get("how"), values.get("transport")) in _MORE)
                or any(values[name] not in first for name, first in _first(item).items())
            ):
                more.append(item)
            else:
                here.append(item)
        if variants[0].get_closest_marker("thin"):
            all_of_them = here + more
            here = _cover(here, _values)
            more = _cover(all_of_them, _values_and_pair, here)
            for item in all_of_them:
                if item not in here and item not in more:
                    item.add_marker(pytest.mark.long)
        for item in more:
            item.add_marker(pytest.mark.more)


def products_through_inductor(items):
    """Returns variants that go through Inductor beside others which cover each value."""
    products = [
        item
        for item in items
        if item.get_closest_marker("long")
        and item.get_closest_marker("inductor")
        and values_of(item).get("how") == "zero3"
    ]
    tests = _by_test(products).values()
    return [
        item for variants in tests for item in variants if item not in _cover(variants, _values)
    ]


def values_of(item):
    """Returns the values of a test's parameters by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def _by_test(items):
    tests = {}
    for item in items:
        tests.setdefault((item.path, item.originalname), []).append(item)
    return tests


def _first(item):
    """Returns the values, by parameter, that the marks ``first`` of a test name."""
    marks = item.iter_markers("first")
    named = {name: value for mark in marks for name, value in mark.kwargs.items()}
    return {name: v if isinstance(v, tuple) else (v,) for name, v in named.items()}


def _cover(items, features, chosen=()):
    """Returns the few of ``items`` that, with those ``chosen``, have each feature of the items.

    Args:
        features: a function that returns the set of features of an item.
    """
    of = {item: features(item) for item in items}
    uses = Counter(feature for item in chosen for feature in features(item))
    missing = set().union(*of.values()) - uses.keys()
    needed = []
    while missing:  # of those that add equally many, the one whose features occurred least
        best = max(of, key=lambda i: (len(missing & of[i]), -sum(uses[f] for f in of[i])))
        needed.append(best)
        uses.update(of[best])
        missing -= of[best]
    return needed


def _values(item):
    """Returns the values of an item's parameters. Without parameters there is one value."""
    return {(name, repr(value)) for name, value in values_of(item).items()} or {None}


def _values_and_pair(item):
    """Returns the values of an item, and its way to run and to communicate as one more."""
    ways = tuple(repr(values_of(item)[name]) for name in _WAYS if name in values_of(item))
    return _values(item) | {ways}
